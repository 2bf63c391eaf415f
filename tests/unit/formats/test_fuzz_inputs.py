"""Every reader of files answers or refuses, whatever stands in the file: never a traceback, never without end."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from fuzzing import as_json, as_yaml, fault_of, flipped, in_time, mutated
from run_report_samples import NAMES, eventful
from trimtab.cli.simulate import read_journal_path
from trimtab.core import plain_data as plain
from trimtab.core.errors import TrimtabError
from trimtab.formats import catalogue, check_settings, job, load, profile_file, sections
from trimtab.formats.frameworks.hydra_config import ComposedConfig, ConfigReader
from trimtab.formats.frameworks.registry import FRAMEWORKS
from trimtab.formats.job import RunSection
from trimtab.formats.logs import lengths as rollout_lengths
from trimtab.formats.logs import reader as logs
from trimtab.formats.logs.follow import RunLog
from trimtab.formats.logs.gpus import RunFacts
from trimtab.formats.pipeline import layer_files, pipeedge
from trimtab.formats.rollout import elastic_config as elastic_config_file
from trimtab.formats.rollout import job_section as rollout_file
from trimtab.formats.write_back import nested
from trimtab.formats.yaml_text import Source
from trimtab.plan.check.check import check
from trimtab.render.html.run.story import read_story
from trimtab.replay.common import traces
from trimtab.replay.journal.record import read_record
from trimtab.replay.journal.replay import read_alternatives
from trimtab.replay.journal.world import world_of
from trimtab.replay.pool import scenario
from trimtab.replay.replan import past_run as loop_past
from trimtab.replay.replan import reality as loop_noise
from trimtab.replay.replan import scenario as loop_scenario
from trimtab.replay.rollout import scenario as rollout_scenario
from trimtab.runtime.advise.record import _read as read_advised
from trimtab.runtime.run import job_file as run_job
from trimtab.runtime.run.folder import read_run
from trimtab.runtime.store.journal import read_journal
from wandb_files import history, wandb_file

ROOT = Path(__file__).parents[3]
EXAMPLES, DATA = ROOT / "examples", Path(__file__).parents[2] / "data"
SEED = 20_260
IN_SUITE, IN_LONG = 300, 100_000


@dataclass(frozen=True)
class Target:
    """A reader, what it is given, and how many inputs: a long run takes some seconds to a minute for each of them."""

    name: str
    make: Callable[[Path], tuple[list[Any], Callable[[Any], Any]]]
    form: Callable[[Any, random.Random], Any]
    long: int = IN_LONG
    short: int = IN_SUITE


def _tree(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))


def _trees(given: Any, source: random.Random) -> Any:
    return mutated(given, source)


def _checked(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A reader of data as it gets them: through the check of every YAML file, and mappings only."""

    def reader(data: Any) -> Any:
        plain.check(data, "job.yaml")
        return read(data) if isinstance(data, dict) else None

    return reader


def _texts(given: bytes, source: random.Random) -> bytes:
    return flipped(given, source)


def _yaml_texts(given: Any, source: random.Random) -> bytes:
    """Half of them changed as data, half as bytes."""
    if isinstance(given, bytes):
        return flipped(given, source)
    return as_yaml(mutated(given, source)).encode()


def _one_line(given: list[Any], source: random.Random) -> bytes:
    """JSON lines of which one is changed, as data or as bytes."""
    at = source.randrange(len(given))
    lines = [json.dumps(one).encode() for one in given]
    odd = as_json(mutated(given[at], source)).encode() if source.random() < 0.8 else flipped(lines[at], source)
    return b"".join(line + b"\n" for line in (*lines[:at], odd, *lines[at + 1 :]))


def _file(folder: Path, name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    path = folder / name

    def reader(data: bytes) -> Any:
        path.write_bytes(data)
        return read(path)

    return reader


# ---- job files -------------------------------------------------------------------------------------------------------


def _jobs(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    samples = [_tree(EXAMPLES / "grpo" / "job.yaml"), _tree(ROOT / "src/trimtab/examples/grpo.yaml")]
    return samples, _checked(lambda data: job.read(data, Path("job.yaml")))


def _jobs_to_run(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    samples = [_tree(EXAMPLES / "grpo" / name) for name in ("job.yaml", "demo.yaml", "engines.yaml")]
    return samples, _checked(lambda data: run_job.read_run_job(data, Path("job.yaml")))


def _job_texts(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    samples = [(EXAMPLES / "grpo" / "demo.yaml").read_bytes(), (EXAMPLES / "rollout" / "job.yaml").read_bytes()]
    return samples, _file(folder, "job.yaml", load.load)


def _run_sections(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    section = {"iterations": 60, "seed": 0, "save_every": 10, "step_limit_s": 600, "profile_iterations": 4,
               "priority": 8, "modules_from": "..", "loop": {"mode": "auto", "dwell_iterations": 5, "margin": 0.5,
                                                             "elastic": ["rollout"], "wait_s": 10.0}}  # fmt: skip
    return [section], _checked(lambda data: sections.read(RunSection, data, Source("job.yaml")).rules)


def _rollouts(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    whole = {
        "rollout": {
            "engines": ["http://127.0.0.1:8000", {"kind": "vllm", "model": "m", "count": 2, "devices": ["0", "1"]},
                        {"command": "serve {model} --port {port}", "model": "m", "name": "mine", "pool": "p",
                         "count": "nodes", "gpus": 1, "limit": 8, "start_s": 10, "environment": {"A": 1}}],
            "classes": {"eval": {"priority": 3, "queue_limit": 10, "deadline_s": 60}},
            "ownership": {"refit": "trainer"}, "rules": {"retries": 3, "back_off_s": 0.5, "queue_s": 5},
            "gateway": {"port": 8268, "max_concurrent": 100, "deadline_s": 30, "allowed_hosts": ["a"]},
            "journal": "journal", "version": 3,
        },
        "elastic_config": {"max_workers": 8, "monitoring_interval": 1.0, "policy": "threshold"},
    }  # fmt: skip
    samples = [whole, _tree(EXAMPLES / "rollout" / "job.yaml")]
    return samples, _checked(lambda data: rollout_file.from_data(data, Source("job.yaml")))


def _elastic(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    block = {"elastic_config": {"max_workers": 8, "min_workers": 1, "monitoring_interval": 1.0, "policy": "threshold",
                                "scale_up_cooldown": 5.0, "drain_timeout": 60.0}}  # fmt: skip
    return [block], _checked(lambda data: elastic_config_file.from_data(data, Source("job.yaml")))


# ---- frameworks ------------------------------------------------------------------------------------------------------


def _launches(name: str) -> Any:
    return _tree(DATA / "real" / name / "launches.yaml")


PLACED = {
    "verl": _tree(DATA / "verl_sync.yaml"),
    "rlinf": _tree(EXAMPLES / "math/config/qwen2.5-1.5b-grpo-megatron.yaml"),
    "rlinf embodied": _tree(DATA / "rlinf_embodied.yaml"),
    "nemo_rl": _tree(DATA / "nemo" / "base.yaml"),
    "openrlhf": _tree(EXAMPLES / "logs" / "openrlhf.yaml"),
    "areal": _launches("areal")[0]["config"],
    "roll": _launches("roll")[0]["config"],
    "trl": {"use_vllm": True, "vllm_mode": "server", "num_processes": 6, "vllm_serve": {"tensor_parallel_size": 2},
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8},
    "slime": _tree(EXAMPLES / "frameworks" / "slime.yaml"),
    "skyrl": _tree(EXAMPLES / "frameworks" / "skyrl.yaml"),
    "prime_rl": _launches("prime_rl")[0]["config"],
}  # fmt: skip
MODULES = {name: FRAMEWORKS[name.removesuffix(" embodied")] for name in PLACED}


def _framework(name: str) -> Callable[[Path], tuple[list[Any], Callable[[Any], Any]]]:
    def make(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        from trimtab.model.workflow import ComponentProfile, Profile

        path = Path(f"{name}.yaml")
        components = (
            "rollout",
            "generation",
            "policy",
            "actor",
            "inference",
            "update_actor",
            "old_log_prob",
            "ref",
            "values",
            "trainer",
        )
        profile = Profile("x", tuple(ComponentProfile(one, ((8, 10.0),)) for one in components))

        def reader(data: Any) -> Any:
            if not isinstance(data, dict):
                return
            try:
                config = OmegaConf.create(data)
            except (OmegaConfBaseException, ValueError, TypeError, RecursionError, AttributeError):
                return  # refused before any of this, where the file is read
            composed = ComposedConfig(path, ConfigReader(config, path))
            if MODULES[name].matches(composed.reader):
                with contextlib.suppress(TrimtabError):
                    MODULES[name].read(composed, None)
                MODULES[name].read(composed, profile)

        return [PLACED[name]], reader

    return make


def _framework_texts(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    samples: list[Any] = [as_yaml(tree).encode() for tree in PLACED.values()]
    return samples, _file(folder, "config.yaml", load.load)


def _launch_scripts(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    from trimtab.formats.launch.read import evaluated, trainers

    scripts = sorted(path for name in ("verl", "openrlhf") for path in (DATA / "real" / name).glob("*.sh"))
    return [path.read_bytes() for path in scripts], _file(
        folder, "run.sh", lambda path: trainers(evaluated(path, ())[0])
    )


# ---- logs ------------------------------------------------------------------------------------------------------------

LOGS = {
    "verl": [EXAMPLES / "logs" / "verl.jsonl", DATA / "logs" / "verl_console.log"],
    "rlinf": [EXAMPLES / "logs" / "rlinf.log", DATA / "logs" / "rlinf_metrics.log"],
    "nemo_rl": [EXAMPLES / "logs" / "nemo_rl.log", DATA / "logs" / "nemo_async.log"],
    "openrlhf": [EXAMPLES / "logs" / "openrlhf.log"],
    **{
        name: sorted(path for path in (DATA / "real" / "logs").glob(f"{name}*") if "wandb" not in path.name)
        for name in ("areal", "roll", "trl", "slime", "skyrl", "prime_rl")
    },
}


def _log(name: str) -> Callable[[Path], tuple[list[Any], Callable[[Any], Any]]]:
    def make(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
        samples = [path.read_bytes()[:2_500] for path in LOGS[name]]
        framework = logs.framework_named(name)
        whole = _file(folder, "run.log", lambda path: logs.read([path], framework=name, facts=RunFacts(8), warmup=0))

        def reader(data: bytes) -> Any:
            run = RunLog(framework)
            half = len(data) // 2
            run.take("run.log", data[:half])
            run.settle()
            run.take("run.log", data[half:])
            run.end()
            return whole(data)

        return samples, reader

    return make


def _event_files(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    found = sorted(path for path in (DATA / "logs" / "nemo_tensorboard").rglob("*") if path.is_file())
    samples = [path.read_bytes()[:4_000] for path in found]
    framework = logs.framework_named("nemo_rl")
    whole = _file(folder, "events.out.tfevents.1", lambda path: logs.read([path], framework="nemo_rl",
                                                                         facts=RunFacts(8), warmup=0))  # fmt: skip

    def reader(data: bytes) -> Any:
        run = RunLog(framework)
        run.take("events", data)
        run.end()
        return whole(data)

    return samples, reader


def _wandb_files(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    row = {"timing_s/gen": 60.5, "timing_s/step": 100.0, "text": "x" * 40}
    whole = wandb_file([history(step, row) for step in range(6)])
    return [whole], _file(
        folder, "run.wandb", lambda path: logs.read([path], framework="verl", facts=RunFacts(8), warmup=0)
    )


def _dumps(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    lines = (EXAMPLES / "rollouts" / "3.jsonl").read_text(encoding="utf-8").splitlines()[:12]
    return [[json.loads(line) for line in lines]], _file(folder, "3.jsonl", lambda path: rollout_lengths.read([path]))


# ---- pipelines, profiles, models -------------------------------------------------------------------------------------

PIPELINE = {
    "models.yml": {"m": {"layers": 2, "mem_MB": [1.0, 2], "parameters_in": 3, "parameters_out": [4, 5]}},
    "device_types.yml": {
        "t": {"bw_Mbps": 1000, "mem_MB": 100,
              "model_profiles": {"m": [{"dtype": "torch.float32", "batch_size": 8, "time_s": [0.1, 0.2]}]}},
    },
    "devices.yml": {"t": ["a", "b"]},
    "links.yml": [{"hosts": ["a", "b"], "bw_Mbps": 10, "latency_ms": 1}],
}  # fmt: skip


def _pipeline(name: str) -> Callable[[Path], tuple[list[Any], Callable[[Any], Any]]]:
    def make(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
        for other, tree in PIPELINE.items():
            (folder / other).write_text(as_yaml(tree), encoding="utf-8")

        def reader(data: bytes) -> Any:
            (folder / name).write_bytes(data)
            files = [folder / one for one in PIPELINE]
            return pipeedge.load(files[0], files[1], files[2], pipeedge.PartitionRequest("m"), links=files[3])

        return [PIPELINE[name], as_yaml(PIPELINE[name]).encode()], reader

    return make


def _profiles(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    whole = {"profile": {"source": "verl", "notes": ["n"], "components": {
        "rollout": {"seconds": {"8": 59.9, "16": 30}, "kind": "H200", "spread": 0.1, "drift": 0.2, "steps": 9,
                    "completion": [[0.5, 0.2], [1, 1]], "seconds_per_1k_tokens": 0.1, "waits": False}}}}  # fmt: skip
    samples = [whole, _tree(EXAMPLES / "logs" / "drifting" / "profile.yaml")]
    return samples, _checked(lambda data: profile_file.from_data(data, "p.yaml"))


def _profile_texts(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    sample = (EXAMPLES / "logs" / "drifting" / "profile.yaml").read_bytes()
    return [sample, _tree(EXAMPLES / "logs" / "drifting" / "profile.yaml")], _file(folder, "p.yaml", profile_file.read)


def _layers(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    path = EXAMPLES / "pipeline_h200" / "measured" / "h200-bf16.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    short = {key: value[:3] if isinstance(value, list) else value for key, value in whole.items()}
    return [short, as_json(short).encode()], _file(folder, "layers.json", layer_files.read_json)


def _models(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    text = (EXAMPLES / "models" / "qwen2.5-1.5b" / "config.json").read_bytes()
    return [json.loads(text), text], _file(folder, "config.json", catalogue.read_config)


def _checks(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    """Settings and configs of runs that died, read and judged."""
    files = [DATA / "died" / f"{name}.yaml" for name in ("rllm-93", "skypilot-10269", "verl-855", "openrlhf-1013")]
    cases = [_tree(file) for file in files]
    texts = [case["settings"] if "settings" in case else nested(case["config"]) for case in cases]

    def judged(path: Path) -> Any:
        return check(check_settings.read(path, [], {"gpu": "h100"}), check_settings.exclusions())

    return [*texts, as_yaml(texts[0]).encode()], _file(folder, "run.yaml", judged)


# ---- traces and scenarios --------------------------------------------------------------------------------------------


def _trace(read: Callable[[Path], Any], *lines: str) -> Callable[[Path], tuple[list[Any], Callable[[Any], Any]]]:
    return lambda folder: (["".join(f"{line}\n" for line in lines).encode()], _file(folder, "trace.csv", read))


def _job_traces(path: Path) -> Any:
    return traces.jobs(path)


def _request_traces(path: Path) -> Any:
    return traces.requests(path)


def _noise(path: Path) -> Any:
    loop_noise.minibatches.cache_clear()
    return loop_noise.minibatches(path)


def _scenario(name: str, read: Callable[[Path], Any]) -> Callable[[Path], tuple[list[Any], Callable[[Any], Any]]]:
    def make(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
        path = EXAMPLES / "simulate" / name
        return [_tree(path), path.read_bytes()], _file(folder, name, read)

    return make


def _policies(path: Path) -> Any:
    return read_alternatives([str(path)])


# ---- journals and runs -----------------------------------------------------------------------------------------------


def _journals(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    text = (EXAMPLES / "simulate" / "journal" / "journal-00000000.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()[:60]]

    def replayed(path: Path) -> Any:
        found = read_journal_path(path.parent)
        return world_of(read_record(found.snapshot, found.events, found.instructions, found.began))

    return [lines], _file(folder, "journal-00000000.jsonl", replayed)


def _snapshots(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
    source = EXAMPLES / "simulate" / "journal"
    found = read_journal(source)
    from trimtab.machines.pool.machine import PoolMachine

    machine = PoolMachine()
    for now, event in found.events[:40]:
        machine.handle(event, now)
    whole = {"format": "trimtab-journal", "version": 2, "time": found.events[39][0], "machine": machine.dump()}

    def replayed(path: Path) -> Any:
        found = read_journal_path(path.parent)
        return world_of(read_record(found.snapshot, found.events, found.instructions, found.began))

    return [json.loads(json.dumps(whole))], _file(folder, "snapshot-00000001.json", replayed)


def _events(read: Callable[[Path], Any]) -> Callable[[Path], tuple[list[Any], Callable[[Any], Any]]]:
    def make(folder: Path) -> tuple[list[Any], Callable[[Any], Any]]:
        lines = [json.loads(line) for line in (eventful(folder) / "events.jsonl").read_text().splitlines()]
        kinds: dict[Any, int] = {}
        few = []
        for line in lines:  # a few of each kind
            kind = line["event"], line.get("state"), line.get("what")
            kinds[kind] = kinds.get(kind, 0) + 1
            if kinds[kind] <= (5 if line["event"] == "iteration" else 1):
                few.append(line)
        return [few], _file(folder, "events.jsonl", lambda path: read(path.parent))

    return make


def _shown(folder: Path) -> Any:
    """As the dashboard and `trimtab show --live` show it."""
    from trimtab.render.html.dashboard.source import DashboardSource
    from trimtab.render.text.top import picture

    source = DashboardSource(folder)
    source.look()
    json.dumps(source.whole(), ensure_ascii=False, allow_nan=False).encode()
    for kind in ("component", "node", "task", "worker", "move", "mark"):
        for name in ("rollout", "alpha", "eval-1", "rollout w0", "1", "0"):
            source.story(kind, name)
    from io import StringIO

    from rich.console import Console

    Console(file=StringIO()).print(picture(source, 40))
    assert source.board is not None
    assert len(source.board.story.unparsed_lines) <= 2


def _reported(folder: Path) -> Any:
    from trimtab.render.html.run.report import run_report

    return run_report(read_story(folder), title="x", command=None).encode()


WORKFLOW = job.read(
    {
        "cluster": {"nodes": 2, "gpus_per_node": 4},
        "workflow": {"components": {name: {"seconds": {4: 1.0}} for name in NAMES}},
    },
    Path("job.yaml"),
).job.workflow


def _past(folder: Path) -> Any:
    return loop_past.read_past_run(folder, WORKFLOW)


TARGETS = [
    Target("job file", _jobs, _trees),
    Target("job file to run", _jobs_to_run, _trees, long=5_000, short=60),
    Target("job file as text", _job_texts, _yaml_texts, long=2_000, short=40),
    Target("run section", _run_sections, _trees),
    Target("rollout file", _rollouts, _trees, long=20_000),
    Target("elastic_config", _elastic, _trees),
    *(Target(f"{name} config", _framework(name), _trees, long=2_000, short=40) for name in PLACED),
    Target("framework config as text", _framework_texts, _texts, long=1_000, short=20),
    *(Target(f"{name} log", _log(name), _texts, long=20_000, short=150) for name in LOGS),
    Target("TensorBoard file", _event_files, _texts, long=20_000, short=150),
    Target("W&B file", _wandb_files, _texts, long=20_000, short=150),
    Target("rollout dump", _dumps, _one_line),
    *(Target(name, _pipeline(name), _yaml_texts, long=3_000, short=40) for name in PIPELINE),
    Target("profile file", _profiles, _trees),
    Target("profile file as text", _profile_texts, _yaml_texts, long=3_000, short=40),
    Target("layer file", _layers, _yaml_texts),
    Target("launch script", _launch_scripts, _texts),
    Target("model config", _models, _yaml_texts),
    Target("run to check", _checks, _yaml_texts, long=2_000, short=40),
    Target("job trace", _trace(_job_traces, "submit_s,duration_s,gpus", "0,10,1", "5,20,8", "6,1e3,2"), _texts),
    Target("request trace", _trace(_request_traces, "arrival_ms,input_tokens,output_tokens,hash_ids", "0,10,3,1 2",
                                   "7,100,20,3 4"), _texts),
    Target("noise trace", _trace(_noise, "worker,iteration,batch_time_norm", "a,1,0.9", "a,2,1.1", "b,1,1"), _texts),
    Target("pool scenario", _scenario("small.yaml", scenario.read), _yaml_texts, long=3_000, short=40),
    Target("rollout scenario", _scenario("rollout.yaml", rollout_scenario.read), _yaml_texts, long=3_000, short=40),
    Target("loop scenario", _scenario("loop.yaml", loop_scenario.read), _yaml_texts, long=2_000, short=30),
    Target("policy file", _scenario("policy.yaml", _policies), _yaml_texts, long=5_000, short=40),
    Target("journal", _journals, _one_line, long=10_000, short=100),
    Target("snapshot", _snapshots, _yaml_texts, long=5_000, short=60),
    Target("events.jsonl in the report", _events(_reported), _one_line, long=2_000, short=30),
    Target("events.jsonl in the dashboard", _events(_shown), _one_line, long=1_000, short=20),
    Target("events.jsonl of a run that goes on", _events(read_run), _one_line, long=15_000, short=100),
    Target("events.jsonl of a run that is simulated", _events(_past), _one_line, long=10_000, short=80),
    Target("events.jsonl of an advised run", _events(read_advised), _one_line, long=15_000, short=100),
]  # fmt: skip


def _faults(target: Target, count: int, folder: Path) -> Iterator[tuple[int, str]]:
    samples, reader = target.make(folder)
    for sample in samples:  # as they are, they are read
        assert not fault_of(reader, sample if isinstance(sample, bytes) or target.form is _trees else _plain(sample))
    with in_time() as begins:
        for number in range(count):
            source = random.Random(f"{SEED} {target.name} {number}")
            given = target.form(source.choice(samples), source)
            begins()
            fault = fault_of(reader, given)
            if fault:
                yield number, f"{fault}\n    given {given!r:.600}"


def _plain(sample: Any) -> bytes:
    if isinstance(sample, list) and all(isinstance(one, dict | list) for one in sample):
        return b"".join(json.dumps(one).encode() + b"\n" for one in sample)
    return as_yaml(sample).encode()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_whatever_stands_in_a_file_it_is_read_or_refused(target: Target, tmp_path: Path) -> None:
    assert list(_faults(target, target.short, tmp_path)) == []


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_whatever_stands_in_a_file_it_is_read_or_refused_many_times_over(target: Target, tmp_path: Path) -> None:
    assert list(_faults(target, target.long, tmp_path)) == []
