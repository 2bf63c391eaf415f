"""What launch scripts start, found by running them in the sandbox that records commands.

Shares no code with the evaluated shell: bash expands the words, and the trainer is found in the recorded words by its
name. A word that depends on a recorded command holds a marker.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from trimtab.core.errors import InputError
from trimtab.formats.launch.launch import is_unknown
from trimtab.formats.launch.sandbox import run_recorded

TRAINERS = {
    "verl": re.compile(r"(^|\.)(main_ppo|main_ppo_sync|fully_async_main)$"),
    "verl-recipe": re.compile(
        r"^((recipe|verl)\..*|(.*\.)?)(main_\w+|grpo_main|spo_main_ppo|gvpo_main_ppo|fully_async_main)$"
        r"|^recipe\..*\.main$"
    ),
    "nemo-rl": re.compile(r"(^|/)run_(\w*_)?(grpo|ppo|distillation)\w*\.py$"),
    "openrlhf": re.compile(r"^openrlhf\.cli\.train_ppo_ray$"),
    "rlinf": re.compile(
        r"(^|/)(train_embodied_agent|train_async|train_offline_rl|main_grpo|main_rstar2|main_coding_\w+"
        r"|searchr1/train|wideseek_r1/train)\.py$"
    ),
    "slime": re.compile(r"(^|/)train(_async)?\.py$"),
    "skyrl": re.compile(r"(^|[./])(main_\w+|\w*entrypoint\w*)(\.py)?$"),
    "areal": re.compile(r"(^|/)examples/\S+\.py$"),
    "roll": re.compile(r"(^|/)start_\w*pipeline\.py$"),
}
_NOT_RL = re.compile(r"generat|eval|sft|dpo|rollout_pipeline|merge|diagnos")
SUFFIXES = (".sh", ".slurm", ".sub")


@dataclass(frozen=True)
class Ran:
    """A trainer that bash would have started."""

    program: str
    arguments: list[str]
    folder: Path


def started(
    name: str, script: Path, folder: Path, environment: dict[str, str], arguments: Sequence[str] = ()
) -> list[Ran] | None:
    """Every trainer that a script starts; None if it does not run here."""
    batch = "\n".join(re.findall(r"^#SBATCH (.*)", (folder / script).read_text(errors="replace"), re.MULTILINE))
    for names, option in (
        (("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), r"(?:-N |--nodes[= ])(\d+)"),
        (("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), r"--(?:gres=gpu|gpus-per-node=?):?(?:\w+:)?(\d+)"),
    ):
        if found := re.search(option, batch):
            environment = {**environment, **dict.fromkeys(names, found[1])}
    try:
        records = run_recorded(["bash", str(script), *arguments], folder, environment, limit_s=30)
    except InputError:
        return None
    return [
        Ran(program, words, record.folder)
        for record in records
        for program, *words in _trainers(TRAINERS[name], record.words)
    ]


def missing(ran: Ran, root: Path) -> str:
    """The file that a trainer's own words ask for and the checkout does not have; "" where all are there, or unknown.

    Hydra's rules, applied by hand: `--config-path` is absolute or beside the program; a config names others in
    `defaults`.
    """
    given = dict(re.findall(r"--config[-_](path|name)[= ](\S+)", " ".join(ran.arguments)))
    if "name" not in given or is_unknown("".join(given.values())):
        return ""
    program = ran.program if ran.program.endswith(".py") else ran.program.replace(".", "/")
    place = (ran.folder / program).parent / given.get("path", "config")
    file = place / f"{given['name'].removesuffix('.yaml')}.yaml"
    if not file.is_file():
        moved = [other for other in root.rglob(file.name) if other.parent.name == place.name]
        return "" if moved else f"{file} is not there"
    defaults = yaml.safe_load(file.read_text()).get("defaults") or ()
    named = [entry if isinstance(entry, str) else "/".join(map(str, *entry.items())) for entry in defaults]
    wanted = [Path(entry.split("@")[0]).name for entry in named if entry != "_self_"]
    gone = [name for name in wanted if not any(root.rglob(f"{name}.yaml"))]
    return f"{gone[0]}.yaml, which {file} names, is not there" if gone else ""


def _trainers(wanted: re.Pattern[str], words: Sequence[str]) -> Iterator[list[str]]:
    """The words of each trainer, from its name on."""
    for at, word in enumerate(words):
        if wanted.search(word) and not _NOT_RL.search(word):
            yield list(words[at:])
            return
        if " " in word and not is_unknown(word) and any(wanted.search(part) for part in word.split()):
            try:
                yield from _trainers(wanted, shlex.split(word))
            except ValueError:
                return
            return


def agrees(read: Sequence[str], ran: Sequence[str]) -> bool:
    """Whether words that were read are those of the run; what is unknown in either fits everything."""
    return len(read) == len(ran) and all(_fits(mine, theirs) for mine, theirs in zip(read, ran, strict=True))


def _fits(mine: str, theirs: str) -> bool:
    if is_unknown(mine) or is_unknown(theirs):
        return mine.partition("=")[0].split("\ue000")[0] == theirs.partition("=")[0].split("\ue000")[0]
    return _without_time(mine) == _without_time(theirs)


def _without_time(word: str) -> str:
    return re.sub(r"20\d\d[-\d_:T]*|\d{4}[-_]\d{4,6}|\d\d[:.]\d\d[:.]\d\d", "#", word)
