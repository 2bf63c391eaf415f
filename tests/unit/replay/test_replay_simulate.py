"""`trimtab simulate`: the command from file to answer, in every form."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from trimtab.cli.app import run
from trimtab.replay.pool import scenario

TINY = """
name: tiny & small
cluster: {nodes: 2, gpus: 4, events: [{at_s: 900, node: 1, what: lost}, {at_s: 2000, node: 1, what: joined}]}
tasks: {generate: {count: 25, per_hour: 40, duration_s: {median: 600, p99: 3000}, gpus: {1: 0.8, 4: 0.2}}}
policies: [trimtab, fifo, las, clairvoyant]
seeds: [1, 2]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


POLICIES = ("fifo", "las", "clairvoyant")


def test_the_answer_is_a_table_with_a_line_for_each_class_and_policy(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", str(tiny)]) == 0
    shown = capsys.readouterr().out
    block = [line.split() for line in shown[shown.rindex("\nall ") :].splitlines()]
    assert [word for words in block for word in words[:2] if word in POLICIES] == list(POLICIES)
    assert "8 runs" in shown
    assert "at random, independent of size and length" in shown


def test_programs_read_json_and_csv_and_one_process_or_two_say_the_same(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", str(tiny), "--format", "json", "--jobs", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in found["summary"]] == ["trimtab", "fifo", "las", "clairvoyant"]
    assert found["seeds"] == [1, 2]
    assert run(["simulate", str(tiny), "--csv", str(tiny.with_suffix(".csv"))]) == 0
    rows = list(csv.DictReader(tiny.with_suffix(".csv").read_text().splitlines()))
    assert len(rows) == len(found["runs"]) == 8
    for row, other in zip(rows, found["runs"], strict=True):
        assert all(row[key] == str(value) for key, value in other.items() if key != "seconds")


def test_only_the_policies_and_seeds_that_are_asked_for_are_run(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", str(tiny), "--policy", "fifo", "--seed", "7", "--csv", str(tiny.with_suffix(".csv"))]) == 0
    (row,) = csv.DictReader(tiny.with_suffix(".csv").read_text().splitlines())
    assert (row["policy"], row["seed"]) == ("fifo", "7")
    assert run(["simulate", str(tiny), "--policy", "fifi"]) == 2
    assert "did you mean fifo?" in capsys.readouterr().err


def test_the_report_is_one_page_that_loads_nothing(tiny: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert run(["simulate", str(tiny), "--seed", "1", "--report", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "tiny &amp; small" in text
    assert "src=" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    begin = 0
    drawn = 0
    while (begin := text.find("<svg", begin)) >= 0:
        end = text.index("</svg>", begin) + len("</svg>")
        ElementTree.fromstring(text[begin:end])
        begin, drawn = end, drawn + 1
    assert drawn == 2 * (4 + 1 + 2)  # classes and all, the cluster, two curves; wide and narrow


def test_a_sweep_tries_a_setting_of_the_machine_and_recommends_a_value_by_seeds_that_did_not_choose_it(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "sweep.html"
    asked = ["simulate", str(tiny), "--policy", "trimtab", "--sweep", "starvation_runs=0,40", "--report", str(page)]
    assert run([*asked, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["policies"]) == ["trimtab", "trimtab, starvation_runs 0", "trimtab, starvation_runs 40"]
    advice = found["recommendation"]
    assert advice["choose"] in found["policies"]
    assert "2 seeds that did not choose it" in advice["sentence"]
    assert "What the sweep recommends" in page.read_text(encoding="utf-8")
    assert run([*asked, "--seed", "1"]) == 0
    assert "keep trimtab" in capsys.readouterr().out  # one seed is too few to choose by


def test_settings_that_cannot_be_swept_are_named(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = scenario.read(tiny)
    assert len(scenario.SWEEP.sweep(asked, "same_pool_gap", [1.0, 3.0, 5.0], "here")[0].policies) == 1 + 3 + 3
    assert scenario.SWEEP.sweep(asked, "return_preempts", [1.0], "here")[0].policies[1].pool == {
        "return_preempts": True
    }
    for said, why in (
        ("starvation_timeout=1", "did you mean starvation_timeout_s"),
        ("starvation_timeout_s", "no values"),
        ("starvation_timeout_s=a", "is not a list of values"),
    ):
        assert run(["simulate", str(tiny), "--sweep", said]) == 2
        assert why in capsys.readouterr().err


def test_a_job_that_no_cluster_could_hold_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jobs.csv").write_text("submit_s,duration_s,gpus\n0,10,64\n", encoding="utf-8")
    path = tmp_path / "large.yaml"
    path.write_text("cluster: {nodes: 2}\ntasks: {trace: jobs.csv}\n", encoding="utf-8")
    assert run(["simulate", str(path)]) == 2
    assert "a job asks for 64 GPUs, but the cluster has 16" in capsys.readouterr().err
