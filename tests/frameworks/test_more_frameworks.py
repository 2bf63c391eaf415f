"""slime, SkyRL and prime-rl: launches of checkouts are read as they are meant; what is written passes their checks.

FRAMEWORKS_DIR names a folder with checkouts `slime`, `skyrl` and `prime-rl`. What a launch means is found by plain
reading of its words or of its TOML file, which shares no code with the readers. The plan for each launch is written and
given to the framework's own start-up code with all words of the launch.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import row
from test_corpus import checkout, relations
from test_own_placement_code import ROOT, ask

from script_words import started
from trimtab.core.errors import InfeasibleError, InputError
from trimtab.formats.frameworks.common import FrameworkConfig
from trimtab.formats.frameworks.prime_rl import PrimeRl
from trimtab.formats.frameworks.skyrl import SkyRl
from trimtab.formats.frameworks.slime import Slime
from trimtab.formats.launch.launch import Launch
from trimtab.formats.load import load
from trimtab.formats.modes import plan_modes
from trimtab.model.workflow import ComponentProfile, Profile
from trimtab.plan.placement.compare import current_plan
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan

pytestmark = pytest.mark.frameworks

COLUMNS = (
    *("not planned", "read right", "refused", "wrong", "slower plans", "refused as it is", "own checks refuse"),
    *("script right", "script refused", "script wrong"),
)


@dataclass
class Case:
    """A launch, what it means (None: no RL on GPUs of its own), and words that its own checks get."""

    name: str
    launch: Launch
    trainer: int = 0
    rollout: int = 0
    shared: bool = False
    batch: int = 0
    staleness: int = 0
    not_planned: str = ""
    planned: dict[str, int] = field(default_factory=dict)


def profile_of(kind: type[FrameworkConfig], case: Case) -> Profile:
    points = {}
    for position, name in enumerate(kind.COMPONENTS):
        gpus = case.rollout if name == "rollout" else case.trainer
        points[name] = ((gpus, 30.0 + 17 * position), (2 * gpus, 0.6 * (30.0 + 17 * position)))
    points.pop("critic", None)
    return Profile("corpus", tuple(ComponentProfile(name, at) for name, at in points.items()))


def judge(kind: type[FrameworkConfig], case: Case, folder: Path) -> tuple[str, str, tuple[str, ...]]:
    """The column of a case, what to say of it, and the words of its plan."""
    try:
        source = kind.launched(case.launch)
        assert source is not None, "it is not recognised"
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(source.config))
        if case.not_planned:
            with pytest.raises(InputError):
                load(path, (), profile_of(kind, Case("", case.launch, 1, 1)))
            return "not planned", "", ()
        loaded = load(path, (), profile_of(kind, case))
        space, outcome = best_plan(loaded.job, loaded.rules)
    except (InputError, InfeasibleError, AssertionError) as error:
        return "refused", str(error), ()
    assert loaded.current is not None
    assert outcome.best is not None
    first = 0 if case.shared else case.trainer
    meant = {"rollout": range(first, first + case.rollout), kind.REQUIRED[1]: range(case.trainer)}
    read = {name: loaded.current.ranks[name] for name in meant}
    workflow = loaded.job.workflow
    for what, mine, theirs in (
        ("GPUs", relations(read), relations(meant)),
        ("batch", workflow.batches, case.batch),
        ("staleness", workflow.staleness, case.staleness),
    ):
        if mine != theirs:
            return "wrong", f"{what}: read {mine}, is {theirs}", ()
    best, own = to_plan(space, outcome.best), current_plan(space, loaded.current, outcome.best).plan
    if own is not None and best.iteration_seconds > own.iteration_seconds * (1 + 1e-9):
        return "slower plans", f"{best.iteration_seconds:.1f} s, own {own.iteration_seconds:.1f} s", ()
    case.planned = {name: len(best.group_of(name).gpus) for name in ("rollout", kind.REQUIRED[1])}
    settings = loaded.settings(best)
    gone = tuple(f"gone:{name.replace('_', '-')}" for name, value in settings.values.items() if value is None)
    return "read right", "", (*settings.words, *gone)


def as_a_script(kind: type[FrameworkConfig], case: Case) -> tuple[str, str]:
    """The column of a launch script that is given as it is, and what to say of it."""
    try:
        loaded = load(case.launch.script, (), profile_of(kind, case))
    except (InputError, InfeasibleError) as error:
        return "script refused", str(error)
    assert loaded.current is not None
    ranks, workflow = loaded.current.ranks, loaded.job.workflow
    found = len(ranks["rollout"]), len(ranks[kind.REQUIRED[1]]), workflow.batches, workflow.staleness
    meant = case.rollout, case.trainer, case.batch, case.staleness
    return ("script right", "") if found == meant else ("script wrong", f"read {found}, is {meant}")


def table(
    kind: type[FrameworkConfig],
    cases: list[Case],
    folder: Path,
    checked: Callable[[Case, tuple[str, ...]], Any],
    answered: Callable[[list[Any]], list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> Counter[str]:
    counts: Counter[str] = Counter()
    lines, asked, planned = [], [], []
    began = time.monotonic()
    for case in cases:
        column, why, words = judge(kind, case, folder)
        counts[column] += 1
        lines += [f"  {column}: {case.name}: {' '.join(why.split())[:300]}"] if why else []
        if column == "read right" and case.launch.script.suffix == ".sh":
            column, why = as_a_script(kind, case)
            counts[column] += 1
            lines += [f"  {column}: {case.name}: {' '.join(why.split())[:300]}"] if why else []
            column = "read right"
        if column == "read right":
            # The launch as it is, and as it is planned: what its own checks refuse anyhow says nothing of a plan.
            asked += [checked(case, ()), checked(case, words)]
            planned.append(case)
    answers = answered(asked)
    for case, before, after in zip(planned, answers[::2], answers[1::2], strict=True):
        if "error" in before:
            counts["refused as it is"] += 1
            lines.append(f"  refused as it is: {case.name}: {' '.join(before['error'].split())[:200]}")
        elif "error" in after:
            counts["own checks refuse"] += 1
            lines.append(f"  own checks refuse: {case.name}: {' '.join(after['error'].split())[:300]}")
        elif (after["trainer"], after["rollout"]) != (case.planned[kind.REQUIRED[1]], case.planned["rollout"]):
            counts["own checks refuse"] += 1
            lines.append(f"  placed unlike the plan: {case.name}: {after}, planned {case.planned}")
    right = counts["read right"]
    whole = {"found": len(cases), "not RL": counts["not planned"], "accepted": right, "read right": right}
    whole |= {"refused": counts["refused"], "wrong": counts["wrong"] + counts["script wrong"], "planned": right}
    whole |= {"slower": counts["slower plans"], "own checks no": counts["own checks refuse"]}
    row(kind.TITLE, "launches", Counter(whole), began, lines)
    head = f"{'':12} {'launches':>9} " + " ".join(f"{column:>17}" for column in COLUMNS)
    cells = f"{kind.TITLE:12} {len(cases):>9} " + " ".join(f"{counts[column]:>17}" for column in COLUMNS)
    with capsys.disabled():
        print("", head, cells, *lines, sep="\n")
    return counts


def held(counts: Counter[str]) -> None:
    planned = sum(counts[column] for column in ("read right", "refused", "wrong", "slower plans"))
    assert counts["read right"] >= 0.95 * planned
    assert counts["refused"] <= 0.05 * planned
    assert counts["wrong"] == counts["slower plans"] == counts["own checks refuse"] == counts["script wrong"] == 0
    assert counts["script refused"] <= 0.05 * counts["script right"] + 1


@pytest.fixture(autouse=True)
def _what_scripts_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BASE_FOLDER", "MASTER_ADDR", "HOSTFILE", "MLP_WORKER_0_HOST"):
        monkeypatch.setenv(name, "/root")


# ---- slime -----------------------------------------------------------------------------------------------------------


def slime_cases(root: Path) -> Iterator[Case]:
    for path in sorted(root.rglob("*.sh")):
        for start in started(path, [r"\S*train(?:_async)?\.py"]):
            words, flags = list(start.words), {}
            for at, word in enumerate(words):
                if word.startswith("--"):
                    following = words[at + 1] if at + 1 < len(words) else "--"
                    flags[word] = "" if following.startswith("--") else following
            case = Case(str(path.relative_to(root)), Launch(("python3", *start.program), start.words, {}, root, path))
            actor = int(flags.get("--actor-num-nodes", 1)) * int(flags.get("--actor-num-gpus-per-node", 8))
            case.shared, case.trainer = "--colocate" in flags, actor
            case.rollout = int(flags.get("--rollout-num-gpus") or (actor if case.shared else 0))
            case.batch = int(flags.get("--rollout-batch-size") or 0)
            case.staleness = int(start.program[0].endswith("train_async.py"))
            if flags.get("--loss-type") == "sft_loss" or "--debug-train-only" in flags:
                case.not_planned = "supervised"
            yield case


def test_slimes_launches_are_read_and_its_checks_take_what_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = checkout("slime")

    def checked(case: Case, words: tuple[str, ...]) -> Any:
        gone = {f"--{word.removeprefix('gone:')}" for word in words if word.startswith("gone:")}
        own = [word for word in case.launch.arguments if word not in gone]
        more = [part for word in words if not word.startswith("gone:") for part in word.split("=")]
        script = "train_async.py" if case.launch.runs("train_async") else "train.py"
        return {"checkout": str(root), "script": script, "words": [*own, *more]}

    cases = list(slime_cases(root))
    counts = table(Slime, cases, tmp_path, checked, lambda a: ask(".venv-skyrl", "slime_checks.py", a), capsys)
    held(counts)


# ---- SkyRL -----------------------------------------------------------------------------------------------------------


OF_EXAMPLES = (
    *("overlong_buffer", "miniswe_", "child_", "harbor_trial_config", "num_dummy_steps", "reward_num", "delta_weight"),
)
"""Parts of keys that examples add to SkyRL's config, or that its release does not have yet."""


def skyrl_cases(root: Path) -> Iterator[Case]:
    for path in sorted(root.rglob("*.sh")):
        for start in started(path, [r"\S*main_\w+", r"\S*entrypoint\w*(?:\.py)?"]):
            values: dict[str, str] = dict(word.split("=", 1) for word in start.words if "=" in word)
            rl = any(key.startswith(("trainer.placement.", "trainer.policy.")) for key in values)
            if not rl or "actor_rollout_ref.model.path" in values:
                continue
            case = Case(str(path.relative_to(root)), Launch(("python3", *start.program), start.words, {}, root, path))
            place, engine = "trainer.placement.", "generator.inference_engine."

            def count(key: str, default: int = 1, values: Mapping[str, str] = values) -> int:
                return int(values.get(key, default))

            case.shared = values.get(f"{place}colocate_all", "true").lower() == "true"
            case.trainer = count(f"{place}policy_num_nodes") * count(f"{place}policy_num_gpus_per_node")
            sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
            case.rollout = count(f"{engine}num_engines") * math.prod(count(engine + size) for size in sizes)
            case.batch = count("trainer.train_batch_size", 1024)
            if values.get("trainer.fully_async.enabled") == "true":
                case.batch = count("trainer.policy_mini_batch_size", 256)
                case.staleness = count("trainer.fully_async.max_staleness_steps", 4)
            elif start.program[0].endswith("main_async"):
                case.staleness = 1
            external = any(engine + key in values for key in ("external_proxy_url", "external_server_urls"))
            other = "generate" in start.program[0] or "trainer.override_entrypoint" in values
            if external or other or values.get("trainer.fully_async.simulate_training") == "true":
                case.not_planned = "no rollout and training of its own"
            yield case


def test_skyrls_launches_are_read_and_its_checks_take_what_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = checkout("skyrl")

    def checked(case: Case, words: tuple[str, ...]) -> Any:
        values = dict(word.split("=", 1) for word in (*case.launch.arguments, *words) if "=" in word)
        for key in ("trainer.algorithm.advantage_estimator", "trainer.algorithm.policy_loss_type"):
            if values.get(key) in ("simple_baseline", "no_op", "reinforce"):  # registered by the example
                del values[key]
        return [f"{key}={value}" for key, value in values.items() if not any(own in key for own in OF_EXAMPLES)]

    cases = list(skyrl_cases(root))
    counts = table(SkyRl, cases, tmp_path, checked, lambda a: ask(".venv-skyrl", "skyrl_checks.py", a), capsys)
    held(counts)


# ---- prime-rl --------------------------------------------------------------------------------------------------------


def prime_rl_cases(root: Path) -> Iterator[Case]:
    for path in sorted(root.rglob("*.toml")):
        text = path.read_text()
        if "[orchestrator" not in text:
            continue
        # The last of a key in its table, as plain text.
        values, section = {}, ""
        for line in text.splitlines():
            line = line.partition(" #")[0].strip()
            if line.startswith("["):
                section = line.strip("[]").strip() + "."
                values[section] = ""
            elif "=" in line and not line.startswith("#"):
                key, _, value = line.partition("=")
                values[section + key.strip()] = value.strip().strip('"')
        launch = Launch(("uv", "rl"), ("@", str(path.relative_to(root))), {}, root, path)
        case = Case(str(path.relative_to(root)), launch)

        def count(key: str, default: int = 1, values: Mapping[str, str] = values) -> int:
            return int(values.get(key, default))

        deployed = "deployment."
        if values.get(f"{deployed}type") == "multi_node":
            per_node, inside = count(f"{deployed}gpus_per_node", 8), "inference.deployment."
            nodes = 1
            if values.get(f"{inside}type") == "disaggregated":
                nodes = sum(
                    count(f"{inside}{part}_nodes_per_replica") * count(f"{inside}num_{part}_replicas")
                    for part in ("prefill", "decode")
                )
            nodes = count(f"{deployed}num_infer_nodes", nodes) * count(f"{deployed}num_infer_replicas")
            case.trainer, case.rollout = count(f"{deployed}num_train_nodes") * per_node, nodes * per_node
        else:
            case.trainer, case.rollout = count(f"{deployed}num_train_gpus"), count(f"{deployed}num_infer_gpus")
        case.batch = count("orchestrator.batch_size", 128) // count("orchestrator.group_size")
        case.staleness = min(1, count("orchestrator.max_off_policy_steps", 8))
        yield case


def test_prime_rls_configs_are_read_and_its_checks_take_what_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = checkout("prime-rl")

    def checked(case: Case, words: tuple[str, ...]) -> Any:
        return {"checkout": str(root), "files": [str(root / case.launch.arguments[1])], "words": list(words)}

    cases = list(prime_rl_cases(root))
    answered = lambda a: ask(".venv-prime-rl", "prime_rl_checks.py", a)  # noqa: E731
    held(table(PrimeRl, cases, tmp_path, checked, answered, capsys))


# ---- modes -----------------------------------------------------------------------------------------------------------


def mode_words(name: str, more: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    """All words of each other mode of an example, planned with made-up costs."""
    path = ROOT / "examples" / "frameworks" / name
    costs = {"rollout": 60.0, "inference": 10.0, "actor": 40.0, "policy": 40.0, "trainer": 40.0}
    profile = Profile("test", tuple(ComponentProfile(part, ((8, seconds),)) for part, seconds in costs.items()))
    present = load(path, more, profile)
    space, outcome = best_plan(present.job, present.rules)
    assert outcome.best is not None
    plan = to_plan(space, outcome.best)
    _, *found = plan_modes((present, None), plan, lambda words: (load(path, (*more, *words), profile), None))
    assert all(not mode.reason for mode in found), found
    return {mode.mode: mode.words for mode in found}


def test_slimes_own_checks_take_its_other_modes() -> None:
    data = yaml.safe_load((ROOT / "examples" / "frameworks" / "slime.yaml").read_text())
    own = [f"--{key.replace('_', '-')}={value}" for key, value in data.items() if key != "colocate"]
    cases = [
        {
            "checkout": str(checkout("slime")),
            "script": "train.py" if mode == "partial rollout" else "train_async.py",
            "words": [*own, "--num-rollout=9", *words],
        }
        for mode, words in mode_words("slime.yaml").items()
    ]
    answers = ask(".venv-skyrl", "slime_checks.py", cases)
    assert len(answers) == 3
    assert all("error" not in answer for answer in answers), answers
    assert [answer["trainer"] + answer["rollout"] <= 16 for answer in answers] == [False, True, True]


def test_skyrls_own_checks_take_its_other_modes() -> None:
    data = yaml.safe_load((ROOT / "examples" / "frameworks" / "skyrl.yaml").read_text())

    def flat(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in tree.items():
            found |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
        return found

    cases = []
    for words in mode_words("skyrl.yaml").values():
        values = {**flat(data), **dict(word.split("=", 1) for word in words)}
        cases.append([f"{key}={value}" for key, value in values.items()])
    answers = ask(".venv-skyrl", "skyrl_checks.py", cases)
    assert len(answers) == 2
    assert all("error" not in answer and not answer["shared"] for answer in answers), answers


def test_prime_rls_own_checks_take_its_other_mode() -> None:
    (words,) = mode_words("prime_rl.toml", ("++orchestrator.max_off_policy_steps=0",)).values()
    file = str(ROOT / "examples" / "frameworks" / "prime_rl.toml")
    case = {"checkout": str(checkout("prime-rl")), "files": [file], "words": list(words)}
    (answer,) = ask(".venv-prime-rl", "prime_rl_checks.py", [case])
    assert "error" not in answer, answer
    assert answer["trainer"] + answer["rollout"] == 8
