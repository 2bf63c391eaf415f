"""What the configs of full checkouts say, found the slow and obvious way: plain composition, then plain keys.

Shares no code with trimtab's readers. For every file it gives the GPUs of each component (as global ranks where the
file names them, else as counts), which components share them, the batch of an iteration and how old weights may be;
or a reason why no placement can be planned from the file.
"""

from __future__ import annotations

import copy
import re
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf


@dataclass(frozen=True)
class Case:
    """A file as a user would give it: with the overrides, the folder and the environment that its launcher has."""

    path: Path
    overrides: tuple[str, ...] = ()
    folder: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True)
class Says:
    """What a file says. Components of one name in `places` are on those GPUs; counts stand for contiguous ranks."""

    places: dict[str, frozenset[int]]
    batch: int
    staleness: int
    cluster: int | None = None  # GPUs that a plan can be made for, where the file or its overrides say how many


@dataclass(frozen=True)
class NotPlanned:
    """No RL training run on GPUs of one kind, or a file that does not say enough: a refusal is the right answer."""

    why: str


Answer = Says | NotPlanned
GPUS_PER_NODE = 8  # of an RLinf cluster, whose configs do not say


def at(config: Any, key: str, default: Any = None) -> Any:
    """The resolved value of a dotted key."""
    value = OmegaConf.select(config, key)
    return default if value is None else value


def span(first: int, count: int) -> frozenset[int]:
    return frozenset(range(first, first + count))


# ---- NeMo RL -----------------------------------------------------------------------------------------------------


def nemo_rl_cases(root: Path) -> Iterator[Case]:
    for path in sorted(root.rglob("*.yaml")):
        text = path.read_text()
        # Helm charts, workflows of GitHub, values of several documents: no config at all
        if (
            "${{" in text
            or re.search(r"^---", text, re.MULTILINE)
            or not re.search(r"^(policy|defaults):", text, re.MULTILINE)
        ):
            continue
        if OmegaConf.select(_nemo_rl_composed(path.resolve()), "policy.generation") is not None:
            yield Case(path)


@cache
def _nemo_rl_composed(path: Path) -> Any:
    config = OmegaConf.create(yaml.load(path.read_text(), Loader=yaml.CSafeLoader))
    parents = config.pop("defaults") if "defaults" in config else []
    below = OmegaConf.create({})
    for parent in [parents] if isinstance(parents, str) else parents:
        below = _nemo_rl_over(below, copy.deepcopy(_nemo_rl_composed((path.parent / parent).resolve())))
    return _nemo_rl_over(below, config)


def _nemo_rl_over(below: Any, above: Any) -> Any:
    for key in above:
        if not OmegaConf.is_missing(above, key) and OmegaConf.is_dict(above[key]) and above[key].get("_override_"):
            above[key].pop("_override_")
            below.pop(key, None)
    return OmegaConf.merge(below, above)


def nemo_rl_says(case: Case) -> Answer:
    for name, act in (("mul", lambda a, b: a * b), ("add", lambda a, b: a + b), ("div", lambda a, b: a / b)):
        OmegaConf.register_new_resolver(name, act, replace=True)
    try:
        return _nemo_rl_says(_nemo_rl_composed(case.path.resolve()))
    finally:
        for name in ("mul", "add", "div"):
            OmegaConf.clear_resolver(name)


def _nemo_rl_says(config: Any) -> Answer:
    nodes, per_node = at(config, "cluster.num_nodes"), at(config, "cluster.gpus_per_node")
    algorithm = next((name for name in ("grpo", "ppo", "distillation") if at(config, name) is not None), None)
    if algorithm is None:
        return NotPlanned("no section grpo, ppo or distillation")
    staleness = 0
    if at(config, "async_rl") is not None:
        sampler = at(config, "async_rl.sampler.name", "in_order")
        key = "max_lookahead_versions" if sampler == "in_order" else "max_staleness_versions"
        staleness = at(config, f"async_rl.sampler.{key}", 1)
    for section in ("grpo.async_grpo", "ppo.async_ppo"):
        if at(config, f"{section}.enabled"):
            staleness = at(config, f"{section}.max_trajectory_age_steps", 1)
    outside = 0
    if at(config, "on_policy_distillation.enabled") and at(
        config, "on_policy_distillation.non_colocated_teachers.enabled"
    ):
        each = at(config, "on_policy_distillation.non_colocated_teachers.default_teacher_cfg.num_nodes")
        assert at(config, "on_policy_distillation.non_colocated_teachers.teacher_overrides") is None
        assert at(config, "on_policy_distillation.deduplicate_shared_teacher_checkpoints", True)
        models = set(at(config, "on_policy_distillation.teacher_model_by_agent_name").values())
        outside = each * per_node * len(models)
    reward = 0
    if "reward_model" in str(at(config, "data")) and at(config, "env.reward_model") is not None:
        own = at(config, "env.reward_model.resources")
        reward = own.gpus_per_node if nodes == 1 else own.num_nodes * per_node
    total = nodes * per_node - outside - reward
    if at(config, "policy.generation.colocated.enabled"):
        places = {"generation": span(0, total), "policy": span(0, total)}
    else:
        own = at(config, "policy.generation.colocated.resources")
        here = own.gpus_per_node if nodes * per_node - outside <= per_node else own.num_nodes * own.gpus_per_node
        places = {"generation": span(0, here), "policy": span(here, total - here)}
    if reward:
        places["reward"] = span(total, reward)
    return Says(places, at(config, f"{algorithm}.num_prompts_per_step"), staleness)


# ---- RLinf -------------------------------------------------------------------------------------------------------


def rlinf_cases(root: Path) -> Iterator[Case]:
    examples = root / "examples"
    environment = {
        "EMBODIED_PATH": str(examples / "embodiment"),
        "DIFFUSION_PATH": str(examples / "diffusion"),
        "REWARD_PATH": str(examples / "reward"),
        "REPO_PATH": str(root),
    }
    for path in sorted(root.rglob("*.yaml")):
        if "component_placement:" in path.read_text():
            yield Case(path, (f"++cluster.num_gpus_per_node={GPUS_PER_NODE}",), path.parent, environment)


def rlinf_says(case: Case) -> Answer:
    config = _hydra_composed(case)
    kind = at(config, "runner.task_type", "")
    if kind not in ("embodied", "reasoning", "coding_online_rl"):
        return NotPlanned(f"runner.task_type {kind}")
    if at(config, "runner.only_eval") is True:
        return NotPlanned("runner.only_eval")
    written: dict[str, Any] = {}
    for names, value in at(config, "cluster.component_placement").items():
        for name in str(names).split(","):
            if name.strip() in written:
                return NotPlanned("a component is placed twice")
            written[name.strip()] = value
    if any(OmegaConf.is_dict(value) for value in written.values()):
        return NotPlanned("node groups")
    total = at(config, "cluster.num_nodes") * GPUS_PER_NODE
    places = {name: _rlinf_gpus(str(value), total) for name, value in written.items()}
    wanted = ["env", "rollout", "actor"] if kind == "embodied" else ["rollout", "actor"]
    if any(name not in places for name in wanted):
        return NotPlanned(f"not all of {', '.join(wanted)} are placed")
    staleness = 0
    if kind == "embodied":
        batch = at(config, "env.train.total_num_envs", 1)
        stages = at(config, "rollout.pipeline_stage_num", 1)
        if stages > 1:  # what streams is a stage's step, not an environment
            steps = at(config, "env.train.max_steps_per_rollout_epoch") // at(config, "actor.model.num_action_chunks")
            batch = steps * at(config, "env.train.rollout_epoch", 1) * stages
        if at(config, "algorithm.loss_type") == "decoupled_actor_critic":
            staleness = at(config, "algorithm.staleness_threshold", 1)
    else:
        batch = at(config, "data.rollout_batch_size", 1)
        if at(config, "algorithm.recompute_logprobs", True) or at(config, "algorithm.importance_sampling_fix"):
            wanted.append("inference")
            places.setdefault("inference", places["actor"])
    return Says({name: places[name] for name in wanted}, batch, staleness)


def _rlinf_gpus(text: str, total: int) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        gpus = part.split(":")[0].strip()
        if gpus == "all":
            found |= set(range(total))
        else:
            first, _, last = gpus.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _hydra_composed(case: Case) -> Any:
    with warnings.catch_warnings(), initialize_config_dir(str(case.path.resolve().parent), version_base=None):
        warnings.simplefilter("ignore")  # of search paths that are not there
        return compose(case.path.name, overrides=list(case.overrides))


# ---- verl and its recipes -------------------------------------------------------------------------------------------

_LAUNCH = re.compile(r"python3?\s+(?:-u\s+)?(?:-m\s+([\w.]+)|(\S+\.py))((?:.*\\\n)*.*)")
_ASSIGNED = re.compile(r"^\s*(?:export\s+)?(\w+)=(\S+|\"[^\"$`]*\"|'[^'$`]*')\s*(?:#.*)?$", re.MULTILINE)
_MODULES = {
    "verl.trainer.main_ppo": ("verl/trainer/config", "ppo_trainer"),
    "verl.experimental.fully_async_policy.fully_async_main": (
        "verl/experimental/fully_async_policy/config",
        "fully_async_ppo_trainer",
    ),
    "verl.experimental.one_step_off_policy.main_ppo": (
        "verl/experimental/one_step_off_policy/config",
        "one_step_off_ppo_trainer",
    ),
    "recipe.dapo.main_dapo": ("dapo/config", "dapo_trainer"),
}


def verl_cases(root: Path, verl: Path) -> Iterator[Case]:
    """Trainer configs, and those launch scripts whose overrides can be read without a shell."""
    for path in sorted(root.rglob("*.yaml")):
        if "actor_rollout_ref:" in path.read_text() or "ppo_trainer" in path.read_text():
            yield Case(path, folder=verl)
    for path in sorted(root.rglob("*.sh")):
        launch = _launch(path)
        if launch is None:
            continue
        module, words = launch
        folder, name = _MODULES[module]
        overrides: list[str] = []
        for word in words:
            key, _, value = word.partition("=")
            if key == "--config-name":
                name = value.removesuffix(".yaml")
            elif key == "--config-path" and value.strip("./") == "config":
                pass  # beside the module: where it is looked for anyway
            elif key.startswith("--") or "=" not in word:
                break
            else:
                overrides.append(word)
        else:
            home = root if folder.startswith("dapo") else verl
            if (config := home / folder / f"{name}.yaml").is_file():
                yield Case(config, tuple(overrides), verl, name=str(path))


def _launch(path: Path) -> tuple[str, list[str]] | None:
    """The module and the words of the only launch in a script, where plain variables are all that it needs."""
    text = path.read_text(errors="replace")
    found = [m for m in _LAUNCH.finditer(text) if m[1] in _MODULES]
    if len(found) != 1:
        return None
    variables: dict[str, str] = {"HOME": "/home"}
    for name, value in _ASSIGNED.findall(text[: found[0].start()]):
        variables[name] = _filled(value.strip("\"'"), variables)
    try:
        words = shlex.split(_filled(found[0][3].replace("\\\n", " "), variables), comments=True)
    except ValueError:
        return None
    words = [word for word in words if word not in ("$@", "2>&1", "|", "&")]
    return (found[0][1], words) if not any(set("$`|>") & set(word) for word in words) else None


def _filled(text: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0])

    return re.sub(r"\$\{(\w+)(?::-([^{}]*))?\}|\$(\w+)", value, text)


def verl_says(case: Case) -> Answer:
    search = ()
    if (packages := re.findall(r"pkg://([\w.]+)", case.path.read_text())) and case.folder is not None:
        search = (f"hydra.searchpath=[{','.join(f'file://{case.folder}/' + p.replace('.', '/') for p in packages)}]",)
    config = _hydra_composed(replace(case, overrides=(*case.overrides, *search)))
    nodes, per_node = at(config, "trainer.nnodes"), at(config, "trainer.n_gpus_per_node")
    if at(config, "actor_rollout_ref.actor") is None or at(config, "actor_rollout_ref.rollout") is None:
        return NotPlanned("no actor, or no rollout")
    if nodes is None or per_node is None:
        return NotPlanned("trainer.nnodes and trainer.n_gpus_per_node are not stated")
    training = int(nodes) * int(per_node)  # a variable of the environment is text
    batch, staleness = at(config, "data.train_batch_size", 1), 0
    places = {"update_actor": span(0, training), "rollout": span(0, training)}
    mode = at(config, "trainer.v1.trainer_mode", "sync") if at(config, "trainer.use_v1", True) else "sync"
    own = None
    if at(config, "async_training") is not None:
        own, staleness = at(config, "rollout"), max(1, -(-at(config, "async_training.staleness_threshold") // 1))
        # Prompts between two weight syncs.
        batch = at(config, "actor_rollout_ref.actor.ppo_mini_batch_size") * at(config, "async_training.require_batches")
        batch *= at(config, "async_training.trigger_parameter_sync_step")
    elif at(config, "rollout.nnodes") is not None:
        own, staleness = at(config, "rollout"), 1
    elif mode == "separate_async":
        own = at(config, "actor_rollout_ref.rollout")
        staleness = max(1, int(at(config, "trainer.v1.separate_async.num_warmup_batches", 1)))
    if own is not None:
        places["rollout"] = span(training, int(own.nnodes) * int(own.n_gpus_per_node))
    return Says(places, batch, int(staleness))


# ---- OpenRLHF ------------------------------------------------------------------------------------------------------


def openrlhf_cases(root: Path, made: Path) -> Iterator[Case]:
    """The flags of the PPO launch scripts, as a file with the same names."""
    for path in sorted((root / "examples" / "scripts").glob("*.sh")):
        lines = [line for line in path.read_text().splitlines() if not line.strip().startswith("#")]
        text = "\n".join(lines)
        if "openrlhf.cli.train_ppo_ray" not in text:
            continue
        flags: dict[str, Any] = {}
        for name, value in re.findall(r"--([a-z]\w*\.[\w.]+)[ =]*((?!--)[^\s\\\"]+)?", text):
            number = re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", value)
            flags[name] = (float if re.search("[.e]", value) else int)(value) if number else value or True
        written = made / f"{path.stem}.yaml"
        written.write_text(yaml.safe_dump(_nested(flags)))
        taken = _openrlhf_gpus(flags)[2]
        nodes = -(-taken // GPUS_PER_NODE)
        own = ("++trimtab.gpus_per_node=8", f"++trimtab.nodes={nodes}") if nodes > 1 else ()
        yield Case(written, own, name=str(path))


def _nested(flags: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flags.items():
        *above, last = name.split(".")
        place = tree
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def _openrlhf_gpus(flags: dict[str, Any]) -> tuple[dict[str, frozenset[int]], int, int]:
    """The GPUs of actor and engines, how many other models have to themselves, and how many the whole run takes."""

    def size(role: str) -> int:
        return int(flags.get(f"{role}.num_nodes", 1)) * int(flags.get(f"{role}.num_gpus_per_node", 8))

    engines = int(flags["vllm.num_engines"]) * int(flags.get("vllm.tensor_parallel_size", 1))
    is_async, together = bool(flags.get("train.async_enable")), bool(flags.get("train.colocate_all"))
    actor = size("actor")
    if together and not is_async:
        return {"actor": span(0, actor), "rollout": span(0, actor)}, 0, actor
    apart = 0
    has_reward = not flags.get("reward.remote_url") and not flags.get("train.agent_func_path")
    if not together:
        critic = size("critic") if flags.get("algo.advantage.estimator", "gae") == "gae" else 0
        reward = size("reward") if has_reward else 0
        apart = max(critic, reward) if flags.get("train.colocate_critic_reward") and critic else critic + reward
        if float(flags.get("algo.kl.init_coef", 0.01)) > 0 and not flags.get("train.colocate_actor_ref"):
            apart += size("ref")
    return {"actor": span(0, actor), "rollout": span(actor, engines)}, apart, actor + engines + apart


def openrlhf_says(case: Case) -> Answer:
    flags: dict[str, Any] = {}

    def flatten(tree: dict[str, Any], prefix: str) -> None:
        for name, value in tree.items():
            if isinstance(value, dict):
                flatten(value, f"{prefix}{name}.")
            else:
                flags[prefix + name] = value

    flatten(yaml.safe_load(case.path.read_text()), "")
    places, apart, taken = _openrlhf_gpus(flags)
    nodes = -(-taken // GPUS_PER_NODE)
    cluster = (nodes * GPUS_PER_NODE if nodes > 1 else taken) - apart
    staleness = int(flags.get("train.async_queue_size", 1)) if flags.get("train.async_enable") else 0
    return Says(places, int(flags.get("rollout.batch_size", 1024)), staleness, cluster)
