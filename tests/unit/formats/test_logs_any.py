from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.core.errors import InputError, TrimtabError
from trimtab.formats import profile_file
from trimtab.formats.frameworks.registry import FRAMEWORKS
from trimtab.formats.logs import gpus as logs_gpus
from trimtab.formats.logs import lengths as rollout_lengths
from trimtab.formats.logs import measured
from trimtab.formats.logs import reader as logs
from trimtab.formats.logs import records as log_records

DATA = Path(__file__).parents[2] / "data" / "logs"
ROOT = Path(__file__).parents[3]
EIGHT = logs_gpus.from_options(["8"])
SAMPLES = [
    ROOT / "examples/logs/verl.jsonl",
    ROOT / "examples/logs/rlinf.log",
    ROOT / "examples/logs/nemo_rl.log",
    DATA / "verl_console.log",
    DATA / "rlinf_metrics.log",
    DATA / "nemo_async.log",
]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_the_framework_is_found_out(path: Path) -> None:
    assert logs.detect([path]).name == next(name for name in logs.FRAMEWORKS if path.name.startswith(name[:4]))


def test_a_file_of_no_known_framework_lists_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("two roads diverged in a yellow wood\n")
    with pytest.raises(InputError) as error:
        logs.read([path], facts=EIGHT)
    for name in ("verl", "RLinf", "NeMo RL", str(path)):
        assert name in str(error.value)


def test_answers_given_for_a_log_are_told_where_they_belong() -> None:
    with pytest.raises(InputError, match="--lengths"):
        logs.read([ROOT / "examples/rollouts/3.jsonl"], facts=EIGHT)


def test_a_forced_framework_that_is_wrong_says_what_it_reads() -> None:
    with pytest.raises(InputError, match="no step with timings of rlinf"):
        logs.read([SAMPLES[0]], facts=EIGHT, framework="rlinf")
    with pytest.raises(InputError, match="did you mean verl"):
        logs.read([SAMPLES[0]], facts=EIGHT, framework="verll")


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        logs.read([tmp_path / "none.log"], facts=EIGHT)
    with pytest.raises(InputError, match="holds no log"):
        logs.read([tmp_path], facts=EIGHT)
    with pytest.raises(InputError, match="no log file"):
        logs.read([], facts=EIGHT)
    with pytest.raises(InputError, match="negative"):
        logs.read(SAMPLES[:1], facts=EIGHT, warmup=-1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12.5", 12.5), (" 1e-3 ", 0.001), ("np.float64(9.87)", 9.87), ("np.int64(0)", 0.0),
        ("tensor(1.5, device='x')", 1.5),
        ("nan", None), ("inf", None), ("np.float64(nan)", None), ("1e999", None), ("", None),
        ("12.3x", None), ("1_0", None),
    ],
)  # fmt: skip
def test_numbers_are_read_plain_or_wrapped(text: str, value: float | None) -> None:
    assert log_records.number(text) == value


def test_spread_and_drift_are_relative_to_the_median() -> None:
    assert measured.spread([10.0]) is None
    assert measured.spread([8.0, 10.0, 12.0]) == pytest.approx(0.1)
    assert measured.drift([1.0] * 5) is None
    assert measured.drift([10.0, 10.0, 11.0, 11.0, 12.0, 12.0]) == pytest.approx(0.2)


LINES = sorted({line[:600] for path in SAMPLES for line in path.read_text().splitlines()[:40] if line.strip()})
PIECES = st.one_of(
    st.sampled_from(LINES),
    st.text(max_size=40),
    st.builds(lambda line, cut: line[:cut], st.sampled_from(LINES), st.integers(0, 300)),
    st.builds(
        lambda step, key, value: f"step:{step} - {key}:{value} - timing_s/gen:{value} - perf/total_num_tokens:{value}",
        st.integers(0, 9) | st.integers(0, 10**14),
        st.sampled_from(["timing_s/step", "timing_s/update_actor", "timing_s/switch_wait", "timing_per_token_ms/gen"]),
        st.floats().map(str) | st.text(max_size=6),
    ),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=12),
    ending=st.sampled_from(["", "\n", "\r", "\x00"]),
    framework=st.sampled_from([None, *logs.FRAMEWORKS]),
    warmup=st.integers(0, 2),
)
def test_no_text_makes_a_traceback(
    tmp_path: Path, pieces: list[str], ending: str, framework: str | None, warmup: int
) -> None:
    path = tmp_path / "any.log"
    path.write_bytes("\n".join(pieces).encode("utf-8", errors="surrogatepass") + ending.encode())
    try:
        profile = logs.read([path], facts=EIGHT, framework=framework, warmup=warmup)
    except TrimtabError:
        return
    assert all(component.seconds[0][1] > 0 for component in profile.components)
    json.dumps(profile_file.as_data(profile), allow_nan=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)
@given(data=st.binary(max_size=300), head=st.booleans())
def test_no_bytes_make_a_traceback(tmp_path: Path, data: bytes, head: bool) -> None:
    (events,) = (DATA / "nemo_tensorboard").iterdir()
    path = tmp_path / "any.bin"
    path.write_bytes((events.read_bytes()[:400] if head else b"") + data)
    with pytest.raises(TrimtabError):
        logs.read([path], facts=EIGHT, warmup=2)


def test_completion_follows_the_longest_sample_of_each_group(tmp_path: Path) -> None:
    path = tmp_path / "dump.jsonl"
    lengths = [100, 50, 200, 10, 400, 400, 30, 800]
    path.write_text("".join(f'{{"response_tokens": {length}}}\n' for length in lengths))
    curve, notes = rollout_lengths.read([path], group_size=2)
    assert dict(curve)[0.5] == pytest.approx(200 / 800)
    assert curve[-1] == (1.0, 1.0)
    assert "4 groups" in notes[0]


def test_groups_are_prompts_where_the_dump_names_them() -> None:
    curve, notes = rollout_lengths.read([ROOT / "examples/rollouts"])
    assert "128 answers in 32 groups" in notes[0]
    assert dict(curve)[0.5] < 0.5  # a long tail: half the prompts are done early


def test_text_without_token_counts_gives_characters_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text("".join(f'{{"input": "{n}", "output": "{"x" * n}", "step": 1}}\n' for n in (10, 20, 40)))
    curve, notes = rollout_lengths.read([path])
    assert curve[-1] == (1.0, 1.0)
    assert "characters" in notes[0]


@pytest.mark.parametrize(
    ("text", "size", "words"),
    [
        ("nothing\n", None, "no answer's length"),
        ('{"response_tokens": 5}\n', None, "single group"),
        ('{"response_tokens": 5}\n{"output": "x"}\n', None, "some only text"),
        ('{"response_tokens": 5}\n', 0, "--group-size"),
    ],
)
def test_a_dump_that_gives_no_curve_is_told(tmp_path: Path, text: str, size: int | None, words: str) -> None:
    path = tmp_path / "dump.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        rollout_lengths.read([path], group_size=size)


@given(st.lists(st.lists(st.floats(1, 1e6), min_size=2, max_size=40).map(sorted), min_size=1, max_size=4))
def test_a_curve_never_falls_and_ends_in_one(rollouts: list[list[float]]) -> None:
    curve = rollout_lengths.curve(rollouts)
    assert curve[-1] == (1.0, 1.0)
    assert len(curve) <= 12
    assert all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(curve))


@pytest.mark.parametrize("name", list(FRAMEWORKS))
def test_a_framework_logs_every_component_that_its_runs_must_have(name: str) -> None:
    framework = FRAMEWORKS[name]
    assert framework.LOG.name == name
    assert {*framework.REQUIRED} <= {*framework.LOG.parts}
