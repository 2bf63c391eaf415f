"""Traces and scenario files: read as they are, or refused with the place and what to do."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.core.errors import InputError
from trimtab.formats.sections import FieldsOf
from trimtab.formats.yaml_text import Source
from trimtab.replay.common import traces
from trimtab.replay.common.timing import Distribution, PoolTimes
from trimtab.replay.pool import scenario

PHILLY = "submit_s,duration_s,gpus,virtual_cluster\n0,100,8,a\n5,60.5,1,b\n5,30,2,a\n"
AZURE = "arrival_s,input_tokens,output_tokens\n0.0,374,44\n4.315,396,109\n"
MOONCAKE = (
    "arrival_ms,input_tokens,output_tokens,blocks,prefix_hit_blocks_infinite_cache,hash_ids\n"
    "0,1024,500,2,0,0 1\n1500,700,4,2,1,0 7\n"
)


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["jobs.csv", "jobs.csv.gz"])
def test_a_job_table_is_read_plain_or_compressed(tmp_path: Path, name: str) -> None:
    found = traces.jobs(written(tmp_path, PHILLY, name))
    assert found[1] == traces.JobRow(5.0, 60.5, 1, "b")
    assert len(traces.jobs(tmp_path / name, 2)) == 2


def test_request_traces_say_by_their_columns_what_they_are(tmp_path: Path) -> None:
    assert traces.requests(written(tmp_path, AZURE))[1] == traces.RequestRow(4.315, 396, 109)
    assert traces.requests(written(tmp_path, MOONCAKE))[1] == traces.RequestRow(1.5, 700, 4, (0, 7))


@pytest.mark.parametrize(
    ("text", "said", "line"),
    [
        ("", "the trace is empty", ""),
        ("submit_s,duration_s,gpus\n", "has no rows", ""),
        ("submit_s,duration_s,gpu\n0,1,1\n", "column gpus is missing", "line 1"),
        ("submit_s,duration_s,gpus,colour\n0,1,1,red\n", "unknown column colour", "line 1"),
        ("submit_s,duration_s,gpus,gpus\n0,1,1,1\n", "column gpus appears twice", "line 1"),
        ("submit_s,duration_s,gpus\n0,1,1\n5,1\n", "3 columns are expected, not 2", "line 3"),
        ("submit_s,duration_s,gpus\n5,1,1\n4,1,1\n", "submit_s is earlier than in the line before", "line 3"),
        ("submit_s,duration_s,gpus\n0,soon,1\n", "duration_s is 'soon', not a number of 0 or more", "line 2"),
        ("submit_s,duration_s,gpus\n0,-1,1\n", "duration_s is '-1'", "line 2"),
        ("submit_s,duration_s,gpus\n0,nan,1\n", "duration_s is 'nan'", "line 2"),
        ("submit_s,duration_s,gpus\n0,1,1.5\n", "gpus is '1.5', not a whole number", "line 2"),
        ("submit_s,duration_s,gpus\n0,1,0\n", "a job asks for 0 GPUs", "line 2"),
    ],
)
def test_a_table_that_is_wrong_is_refused_with_its_line(tmp_path: Path, text: str, said: str, line: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        traces.jobs(written(tmp_path, text))
    assert line in str(raised.value)


def test_a_missing_column_names_the_one_that_was_meant(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean output_tokens by output_token"):
        traces.requests(written(tmp_path, "arrival_s,input_tokens,output_token\n0,1,1\n"))


def test_a_compressed_trace_that_was_cut_short_is_refused_and_not_half_read(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv.gz"
    whole = gzip.compress(("submit_s,duration_s,gpus\n" + "".join(f"{at},7,1\n" for at in range(5_000))).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cut short or damaged"):
        traces.jobs(path)
    path.write_bytes(b"\x1f\x8b not gzip at all")
    with pytest.raises(InputError, match="cut short or damaged"):
        traces.jobs(path)
    with pytest.raises(InputError, match="there is no file"):
        traces.jobs(tmp_path / "nowhere.csv")


def test_requests_out_of_order_and_hashes_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="arrival is earlier"):
        traces.requests(written(tmp_path, "arrival_s,input_tokens,output_tokens\n2,1,1\n1,1,1\n"))
    with pytest.raises(InputError, match="hash_ids has 'x'"):
        traces.requests(written(tmp_path, MOONCAKE.replace("0 7", "0 x")))


# ---- times ----------------------------------------------------------------------------------------------------------


def distribution(said: object) -> Distribution:
    found: Distribution = FieldsOf(PoolTimes).read({"start_s": said}, Source("times"))["start_s"]
    return found


def test_a_distribution_is_a_number_a_median_with_a_percentile_or_values() -> None:
    import random

    source = random.Random(1)
    assert distribution(3).draw(source) == 3.0
    values = distribution({"values": [1, 2]})
    assert {values.draw(source) for _ in range(50)} == {1.0, 2.0}
    drawn = sorted(distribution({"median": 2, "p99": 20}).draw(source) for _ in range(4_000))
    assert 1.8 < drawn[2_000] < 2.2
    assert 15 < drawn[3_960] < 26


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("soon", "a number of 0 or more"),
        (-1, "a number of 0 or more"),
        (True, "not true or false"),
        ({"p99": 3}, "median is missing"),
        ({"median": 5, "p99": 3}, "p99 is 3"),
        ({"values": []}, "at least 1 item"),
        ({"medain": 1}, "did you mean median"),
    ],
)
def test_a_distribution_that_makes_no_sense_is_refused(said: object, why: str) -> None:
    with pytest.raises(InputError, match=why):
        distribution(said)
    with pytest.raises(InputError, match=r"did you mean start_s"):
        FieldsOf(PoolTimes).read({"strat_s": 1}, Source("times"))


# ---- scenarios ------------------------------------------------------------------------------------------------------

SMALLEST = "cluster: {nodes: 2}\ntasks: {generate: {count: 3, per_hour: 10, duration_s: 60}}\n"


def read(folder: Path, text: str) -> scenario.PoolScenario:
    return scenario.read(written(folder, text, "scenario.yaml"))


def test_the_smallest_scenario_has_defaults_for_all_the_rest(tmp_path: Path) -> None:
    found = read(tmp_path, SMALLEST)
    assert [one.name for one in found.policies] == list(scenario.POLICIES)
    assert len(found.seeds) == 5
    assert found.cluster.gpus == 8
    assert any("at random" in sentence for sentence in found.assumptions())


def test_a_trace_is_found_beside_the_scenario(tmp_path: Path) -> None:
    written(tmp_path, PHILLY, "jobs.csv")
    found = read(tmp_path, "cluster: {nodes: 1}\ntasks: {trace: jobs.csv, most_gpus: 2, rate: 2}\n")
    assert [one.gpus for one in found.tasks.rows(1)] == [1, 2]
    assert "3 jobs of jobs.csv, 2 times as fast" in found.tasks.text()


def test_jobs_at_the_beginning_of_a_trace_can_be_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, PHILLY, "jobs.csv")
    found = read(tmp_path, "cluster: {nodes: 1}\ntasks: {trace: jobs.csv, skip: 1, limit: 1}\n")
    (kept,) = found.tasks.rows(1)
    assert kept == replace(traces.jobs(path)[1], submit_s=0.0)
    assert "1 jobs of jobs.csv behind the first 1" in found.tasks.text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster: {nodes: 2}\n", "tasks is missing"),
        (SMALLEST.replace("nodes", "noeds"), "did you mean nodes"),
        (SMALLEST.replace("nodes: 2", "nodes: 0"), "a whole number of 1 or more"),
        (SMALLEST.replace("nodes: 2", "nodes: true"), "not true or false"),
        (SMALLEST + "policy: [fifo]\n", "did you mean policies"),
        (SMALLEST + "policies: [fiffo]\n", "did you mean fifo"),
        (SMALLEST + "policies: [fifo, fifo]\n", "two policies are named fifo"),
        (SMALLEST + "policies: [{use: fifo, pool: {starvation_timeout_s: 1}}]\n", "fifo takes no such settings"),
        (SMALLEST + "policies: [{use: trimtab, pool: {starvation_timeout: 1}}]\n", "did you mean starvation_timeout_s"),
        (SMALLEST + "policies: [{use: trimtab, preemption: {same_pool_gap: -1}}]\n", "a number of 0 or more"),
        (SMALLEST + "policies: []\n", "at least 1 item"),
        (SMALLEST + "seeds: [a]\n", "a whole number"),
        (SMALLEST + "times: {start_s: never}\n", "a number of 0 or more"),
        ("cluster: {nodes: 2}\ntasks: {}\n", "exactly one source"),
        (SMALLEST.replace("{nodes: 2}", "{nodes: 2, events: [{at_s: 1, node: 2, what: lost}]}"), "there is no node 2"),
        (SMALLEST.replace("{nodes: 2}", "{nodes: 2, events: [{at_s: 1, node: 1, what: gone}]}"), "one of lost"),
        (SMALLEST.replace("duration_s: 60", "duration_s: {p99: 1}"), "median is missing"),
        (SMALLEST.replace("count: 3,", "count: 3, classes: 1,"), "unknown key classes"),
        ("cluster: {nodes: 2}\ntasks: {trace: nowhere.csv}\n", "there is no file"),
        ("cluster: {nodes: 2}\ntasks: {trace: jobs.csv, skip: 3}\n", "skip 3 leaves no job"),
        ("cluster: {nodes: 2}\ntasks: {trace: jobs.csv, skip: -1}\n", "a whole number of 0 or more"),
        ("- 1\n", "a section of keys"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_a_scenario_that_is_wrong_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    written(tmp_path, PHILLY, "jobs.csv")
    with pytest.raises(InputError) as raised:
        read(tmp_path, text).tasks.rows(1)
    assert said in str(raised.value)
