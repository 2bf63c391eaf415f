from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab.core.errors import InputError
from trimtab.formats.logs import gpus as logs_gpus
from trimtab.formats.logs import reader as logs
from trimtab.formats.logs.follow import LoggedStep, RunLog
from trimtab.model.workflow import Profile

DATA = Path(__file__).parents[2] / "data" / "logs"
ROOT = Path(__file__).parents[3]
SIXTEEN = logs_gpus.from_options(["16"])


def timings(step: int, gen: float = 60.0, **more: float) -> dict[str, float]:
    values = {"gen": gen, "old_log_prob": 15.0, "adv": 0.5, "update_actor": 95.0, "update_weights": 4.0, **more}
    values.setdefault("step", sum(values.values()))
    return {f"timing_s/{name}": value for name, value in values.items()}


def jsonl(path: Path, steps: list[tuple[int, dict[str, float]]]) -> Path:
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in steps))
    return path


def read(path: Path, **options: object) -> Profile:
    return logs.read([path], facts=SIXTEEN, **options)  # type: ignore[arg-type]


def seconds(profile: Profile, name: str) -> float:
    component = profile.component(name)
    assert component is not None
    return component.seconds[0][1]


def notes(profile: Profile) -> str:
    return "\n".join(profile.notes)


def test_the_file_logger_is_read_into_components() -> None:
    profile = read(ROOT / "examples/logs/verl.jsonl")
    assert profile.source == "verl"
    assert [component.name for component in profile.components] == [
        "rollout", "reward", "old_log_prob", "ref", "update_actor", "weight_sync",
    ]  # fmt: skip
    assert seconds(profile, "rollout") == pytest.approx(62.09, abs=0.01)
    assert all(component.steps == 12 and not component.waits for component in profile.components)


def test_console_lines_under_ray_are_read_with_colours_wrappers_and_a_restart() -> None:
    profile = logs.read(
        [DATA / "verl_console.log"], facts=logs_gpus.from_options(["rollout=8", "trainer=4", "reward=1"]), kind="H100"
    )
    by_name = {component.name: component.seconds[0][0] for component in profile.components}
    assert by_name == {"rollout": 8, "reward": 1, "old_log_prob": 4, "ref": 4, "update_actor": 4, "weight_sync": 8}
    assert all(component.kind == "H100" and component.steps == 7 for component in profile.components)
    assert "restart" in notes(profile)
    assert "cut off" in notes(profile)


def test_warm_up_is_dropped_after_every_start(tmp_path: Path) -> None:
    steps = [(n, timings(n, gen=500.0 if n < 3 else 60.0)) for n in range(1, 7)]
    steps += [(n, timings(n, gen=900.0 if n < 6 else 61.0)) for n in range(4, 9)]
    profile = read(jsonl(tmp_path / "run.jsonl", steps))
    rollout = profile.component("rollout")
    assert rollout is not None
    assert rollout.steps == 7
    assert 60.0 <= rollout.seconds[0][1] <= 61.0
    assert "goes back once" in notes(profile)


def test_a_run_of_nothing_but_warm_up_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "run.jsonl", [(1, timings(1)), (2, timings(2))])
    with pytest.raises(InputError, match="all 2 steps are warm-up"):
        read(path)
    assert "are few" in notes(read(path, warmup=0))


def test_advantages_count_with_the_actor_and_periodic_work_with_nobody(tmp_path: Path) -> None:
    steps = [(n, timings(n, **({"save_checkpoint": 50.0, "testing": 30.0} if n == 4 else {}))) for n in range(1, 8)]
    profile = read(jsonl(tmp_path / "run.jsonl", steps))
    assert seconds(profile, "update_actor") == pytest.approx(95.5)
    assert profile.component("save_checkpoint") is None
    assert "fell into 1 step" in notes(profile)
    assert "an iteration took 174.5 s" in notes(profile)


def test_a_profiler_that_is_off_and_dumped_generations_leave_the_step_totals(tmp_path: Path) -> None:
    each = {"start_profile": 0.0002, "stop_profile": 0.0001, "dump_rollout_generations": 2.5}
    steps = [(n, timings(n, **each)) for n in range(1, 8)]
    profile = read(jsonl(tmp_path / "run.jsonl", steps))
    assert "an iteration took 177 s" in notes(profile)
    assert "fell into" not in notes(profile)


def test_a_step_in_which_a_profile_was_written_is_no_iteration(tmp_path: Path) -> None:
    steps = [(n, timings(n, start_profile=0.0002, stop_profile=40.0 if n == 5 else 0.0002)) for n in range(1, 8)]
    profile = read(jsonl(tmp_path / "run.jsonl", steps))
    assert "fell into 1 step" in notes(profile)
    assert "an iteration took 174.5 s" in notes(profile)


@pytest.mark.parametrize(
    ("timer", "mode"),
    [
        ("generate_async", "one_step_off"),
        ("sync_rollout_weights", "one_step_off"),
        ("wait_for_enough_samples", "fully_async"),
        ("timing_s/param_sync", "fully_async"),
        ("switch_wait", "separate_async"),
    ],
)
def test_the_wait_for_samples_of_an_asynchronous_run_is_no_cost(tmp_path: Path, timer: str, mode: str) -> None:
    steps = [(n, {**timings(n), f"timing_s/{timer}": 5.0}) for n in range(1, 8)]
    profile = read(jsonl(tmp_path / "run.jsonl", steps))
    rollout, actor = profile.component("rollout"), profile.component("update_actor")
    assert rollout is not None
    assert actor is not None
    assert rollout.waits
    assert not actor.waits
    assert mode in notes(profile)


def test_a_drift_of_the_answers_is_told_from_a_drift_of_the_cost(tmp_path: Path) -> None:
    steps = []
    for n in range(1, 13):
        length = 1000.0 + 50.0 * n
        tokens = {
            "response_length/mean": length,
            "prompt_length/mean": 200.0,
            "perf/total_num_tokens": 10 * (length + 200),
        }
        steps.append((n, {**timings(n, gen=length / 20), **tokens}))
    profile = read(jsonl(tmp_path / "run.jsonl", steps))
    rollout = profile.component("rollout")
    assert rollout is not None
    assert rollout.seconds_per_1k_tokens == pytest.approx(5.0)
    assert "cost per token +0%" in notes(profile)


def test_tokens_come_from_the_time_per_token_where_totals_are_missing(tmp_path: Path) -> None:
    steps = [(n, {**timings(n), "timing_per_token_ms/gen": 0.06}) for n in range(1, 8)]
    rollout = read(jsonl(tmp_path / "run.jsonl", steps)).component("rollout")
    assert rollout is not None
    assert rollout.seconds_per_1k_tokens == pytest.approx(0.06)


def test_the_same_run_from_two_loggers_counts_once(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "run.jsonl", [(n, timings(n, gen=50.0 + n)) for n in range(1, 9)])
    profile = logs.read([path, path], facts=SIXTEEN)
    assert profile.components[0].steps == 6
    assert "counted once" in notes(profile)


def test_scores_of_a_step_in_a_line_of_their_own_are_no_second_step(tmp_path: Path) -> None:
    steps = []
    for n in range(1, 7):
        steps += [(n, timings(n)), (n, {"val-core/acc": 0.5})]
    assert read(jsonl(tmp_path / "run.jsonl", steps)).components[0].steps == 4


def test_a_cut_off_last_line_is_left_out(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "run.jsonl", [(n, timings(n)) for n in range(1, 6)])
    path.write_text(path.read_text() + '{"step":6,"data":{"timing_s/gen":1')
    profile = read(path)
    assert profile.components[0].steps == 3
    assert "cut off" in notes(profile)


def test_a_component_that_ran_now_and_then_says_so(tmp_path: Path) -> None:
    steps = [(n, timings(n, **({"ref": 14.0} if n % 2 else {}))) for n in range(1, 9)]
    profile = read(jsonl(tmp_path / "run.jsonl", steps))
    assert seconds(profile, "ref") == 14.0
    assert "ref ran in 3 of 6 steps" in notes(profile)


def test_a_component_without_time_is_left_out(tmp_path: Path) -> None:
    profile = read(jsonl(tmp_path / "run.jsonl", [(n, timings(n, reward=0.0)) for n in range(1, 6)]))
    assert profile.component("reward") is None
    assert "reward took no time" in notes(profile)


def test_gpu_counts_are_never_guessed(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "run.jsonl", [(n, timings(n)) for n in range(1, 6)])
    with pytest.raises(InputError, match="does not state the number of GPUs") as error:
        logs.read([path])
    assert "--gpus" in str(error.value)
    with pytest.raises(InputError, match="update_actor"):
        logs.read([path], facts=logs_gpus.from_options(["rollout=8"]))
    with pytest.raises(InputError, match="did you mean rollout"):
        logs.read([path], facts=logs_gpus.from_options(["8", "rolout=8"]))


@pytest.mark.parametrize("word", ["0", "-1", "many", "=8", "rollout=", "rollout=x", "1e3", "99999999999"])
def test_a_wrong_count_is_told(word: str) -> None:
    with pytest.raises(InputError, match="no count of GPUs"):
        logs_gpus.from_options([word])


def test_the_configuration_gives_the_counts(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "run.jsonl", [(n, timings(n)) for n in range(1, 6)])
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer: {nnodes: 2, n_gpus_per_node: 8}\nactor_rollout_ref: {rollout: {nnodes: 1, n_gpus_per_node: 4}}\n"
    )
    profile = logs.read([path], config=config)
    assert {component.name: component.seconds[0][0] for component in profile.components} == {
        "rollout": 4, "old_log_prob": 16, "update_actor": 16, "weight_sync": 16,
    }  # fmt: skip
    over = logs.read([path], config=config, facts=logs_gpus.from_options(["rollout=2"]))
    assert over.components[0].seconds[0][0] == 2


def test_the_configuration_tells_an_asynchronous_mode(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "run.jsonl", [(n, timings(n)) for n in range(1, 6)])
    config = tmp_path / "config.yaml"
    config.write_text("trainer: {nnodes: 1, n_gpus_per_node: 8, v1: {trainer_mode: colocate_async}}\n")
    assert logs.read([path], config=config).components[0].waits


def test_a_configuration_without_literal_counts_is_told(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "run.jsonl", [(n, timings(n)) for n in range(1, 6)])
    config = tmp_path / "config.yaml"
    config.write_text("trainer: {nnodes: '${oc.env:NODES}', n_gpus_per_node: 8}\n")
    with pytest.raises(InputError, match=r"trainer\.nnodes") as error:
        logs.read([path], config=config)
    assert str(config) in str(error.value)


METRICS = (
    "step:{step} - actor/entropy:0.3127 - actor/kl_loss:0.00081 - actor/pg_loss:-0.0051 - actor/grad_norm:0.2114 - "
    "critic/score/mean:0.4125 - critic/rewards/mean:0.4125 - response_length/mean:1021.5 - prompt_length/mean:104.9 - "
    "training/global_step:{step} - training/epoch:0 - timing_s/start_profile:0.0002 - timing_s/gen:4{step}.125 - "
    "timing_s/reward:1.5 - timing_s/old_log_prob:8.25 - timing_s/adv:0.0625 - timing_s/update_actor:31.5 - "
    "timing_s/step:9{step}.5 - timing_s/stop_profile:0.0001 - perf/total_num_tokens:578812 - perf/throughput:801.25"
)


def wrapped(text: str, columns: int, *, trimmed: bool = False) -> str:
    """What a window of so many columns shows of a line, as it is copied from there."""
    pieces = [text[at : at + columns] for at in range(0, len(text), columns)]
    return "\n".join(piece.rstrip() if trimmed else piece for piece in pieces)


@pytest.mark.parametrize("columns", [*range(60, 140), 160, 213, 300])
@pytest.mark.parametrize("prefix", ["", "(TaskRunner pid=4242) ", "(TaskRunner pid=4242, ip=10.0.0.7) "])
def test_lines_that_a_window_broke_anywhere_are_read_as_the_whole_ones(
    tmp_path: Path, columns: int, prefix: str
) -> None:
    lines = [prefix + METRICS.format(step=step) for step in range(1, 5)]
    whole, broken = tmp_path / "whole.log", tmp_path / "broken.log"
    whole.write_text("\n".join(lines) + "\n")
    broken.write_text("\n".join(wrapped(line, columns) for line in lines) + "\nTraining finished\n")
    assert [c.seconds for c in read(broken, warmup=0).components] == [
        c.seconds for c in read(whole, warmup=0).components
    ]
    assert notes(read(broken, warmup=0)) == notes(read(whole, warmup=0))
    assert steps_of(broken) == steps_of(whole)


@pytest.mark.parametrize("columns", range(72, 100, 3))
def test_a_blank_that_was_lost_at_the_break_joins_no_two_metrics(tmp_path: Path, columns: int) -> None:
    path = tmp_path / "run.log"
    path.write_text("\n".join(wrapped(METRICS.format(step=n), columns, trimmed=True) for n in range(1, 5)) + "\n")
    assert [step.values["timing_s/step"] for step in steps_of(path)] == [91.5, 92.5, 93.5, 94.5]
    assert [step.values["timing_s/gen"] for step in steps_of(path)] == [41.125, 42.125, 43.125, 44.125]


def steps_of(path: Path) -> list[LoggedStep]:
    log = RunLog(logs.FRAMEWORKS["verl"])
    return log.take("run.log", path.read_bytes()) + log.end()


@pytest.mark.parametrize(
    "line", ["5", "Done", "INFO: 5 - warning:3 of it", "(WorkerDict pid=9) reward:1.5 - x:2", "", "loss:"]
)
def test_another_line_after_a_short_one_is_never_taken_for_its_rest(tmp_path: Path, line: str) -> None:
    path = tmp_path / "run.log"
    short = "step:{} - timing_s/update_actor:31.5 - timing_s/gen:41.5 - timing_s/step:75"
    path.write_text("".join(f"{short.format(n)}\n{line}\n" for n in range(1, 5)))
    assert [step.values["timing_s/step"] for step in steps_of(path)] == [75.0] * 4


def test_colours_that_a_web_page_left_without_their_escape_are_no_part_of_a_number(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    line = "[36m(TaskRunner pid=4242, ip=10.0.0.7)[0m step:{} - timing_s/gen:41.5 - timing_s/step:[1;32m75.5[0m"
    path.write_text("".join(f"{line.format(n)}\n" for n in range(1, 5)))
    assert [step.values["timing_s/step"] for step in steps_of(path)] == [75.5] * 4


def test_timers_of_the_first_releases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    line = (
        "step:{} - timing/gen:21.470 - timing/ref:4.360 - timing/values:5.800 - actor/reward_kl_penalty:0.000 - "
        "timing/adv:0.109 - timing/update_critic:15.664 - critic/lr(1e-4):0.100 - timing/update_actor:20.314 - "
        "response_length/mean:239.133 - prompt_length/mean:104.883"
    )
    path.write_text("".join(f"{line.format(n)}\n" for n in range(6)))
    profile = read(path)
    assert profile.source == "verl"
    assert [c.name for c in profile.components] == ["rollout", "ref", "values", "update_critic", "update_actor"]
    assert seconds(profile, "rollout") == 21.47
    assert seconds(profile, "update_actor") == pytest.approx(20.423)


def test_a_short_line_of_a_growing_log_is_told_once_nothing_follows_it() -> None:
    log = RunLog(logs.FRAMEWORKS["verl"])
    assert log.take("run.log", b"step:1 - timing_s/gen:41.5 - timing_s/update_actor:30.5 - timing_s/step:75.5\n") == []
    told = [step.number for _ in range(4) for step in log.settle()]
    assert told == [1]
