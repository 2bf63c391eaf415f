"""What a started program starts in turn: `uv run`, `ray job submit`, `sbatch`, `docker run`, `ssh`, `torchrun`, shells.

`start` takes wrappers off until a program is left that is no wrapper, and notes it as a `Launch`. Scripts and command
texts on the way are evaluated by the same shell.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.core.frozen import Frozen
from trimtab.formats.launch.launch import Launch, is_unknown, known_part, unknown, why_unknown
from trimtab.formats.launch.state import Variable

if TYPE_CHECKING:
    from trimtab.formats.launch.shell import Shell

_MAX_WRAPPERS = 20
_MAX_STARTS = 500
PROGRAM = re.compile(
    r"(.*/)?(python[\d.]*|bash|sh|uv|ray|torchrun|accelerate|deepspeed|coverage|conda|env|nohup|nsys|sbatch|srun|docker|ssh"
    r"|[\w.-]+\.(py|sh|sub|slurm))\Z"
)
_SHELLS = {"bash", "sh", "zsh", "dash", "ksh"}
SCRIPT_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch", ".sub")


class _Wrapper(Frozen):
    """Options before the command: `values` take a word, or with `switches` all but these do; then `skip` words."""

    values: str = ""
    switches: str | None = None
    skip: int = 0
    scan: bool = False  # options are too many to know: the command is the first word that looks like one

    def inner(self, words: Sequence[str]) -> tuple[str, ...]:
        at, values = 0, self.values.split()
        switches = None if self.switches is None else self.switches.split()
        while at < len(words) and words[at].startswith("-") and words[at] != "-":
            word = words[at]
            at += 1
            if word == "--":
                break
            takes = word not in switches if switches is not None else word in values
            at += takes and "=" not in word
        at += self.skip
        if self.scan and at < len(words) and not PROGRAM.match(words[at]):
            at = next((n for n in range(at, len(words)) if PROGRAM.match(words[n])), at)
        return tuple(words[at:])


_UV = (
    "--extra --no-extra --with --with-editable --with-requirements --group --no-group --only-group --python -p "
    "--project --directory --env-file --package --index --index-url --extra-index-url --default-index "
    "--index-strategy --refresh-package --upgrade-package -P --reinstall-package --config-setting --link-mode "
    "--cache-dir --config-file --color --prerelease --resolution --exclude-newer --no-binary-package "
    "--no-build-package --keyring-provider -f --find-links --isolated-with "
)
_DOCKER = (
    "-v --volume -e --env -w --workdir -u --user --name --gpus --shm-size --network --net --ipc --ulimit --mount -p "
    "--publish --entrypoint --env-file -h --hostname --cap-add --device --runtime --pid --memory -m --cpus --restart "
    "--label -l --security-opt --add-host --privileged-with --platform --userns --detach-keys"
)
_WRAPPERS: Mapping[str, _Wrapper] = {
    **dict.fromkeys(("nohup", "setsid", "unbuffer", "poetry run", "pdm run", "hatch run"), _Wrapper()),
    "time": _Wrapper("-o -f"),
    "exec": _Wrapper("-a"),
    "stdbuf": _Wrapper("-i -o -e"),
    "sudo": _Wrapper("-u -g -h -p -C"),
    "timeout": _Wrapper("-k -s --kill-after --signal", skip=1),
    "nice": _Wrapper("-n --adjustment"),
    "ionice": _Wrapper("-c -n --class --classdata"),
    "chrt": _Wrapper("", skip=1),
    "taskset": _Wrapper("", skip=1),
    "numactl": _Wrapper("-N -m -C -i -p --cpunodebind --membind --physcpubind --interleave"),
    "script": _Wrapper("-c", scan=True),
    "xvfb-run": _Wrapper("-n -s -e -f"),
    "uv run": _Wrapper(_UV),
    "pixi run": _Wrapper("-e --environment --manifest-path"),
    **dict.fromkeys(("conda run", "mamba run", "micromamba run"), _Wrapper("-n --name -p --prefix --cwd")),
    "srun": _Wrapper("-N -n -c -w -p -t -A -J -o -e -G --nodes --ntasks --gpus --mpi --export --nodelist", scan=True),
    "mpirun": _Wrapper("-n -np -H -x --host --hostfile -mca", scan=True),
    "mpiexec": _Wrapper("-n -np -H -x --host --hostfile", scan=True),
    "torchrun": _Wrapper(switches="--standalone -m --module --no-python --no_python --use-env --use_env --run-path"),
    "accelerate launch": _Wrapper(
        switches="--multi_gpu --multi-gpu --cpu --use_deepspeed --use_fsdp --quiet -q -m --module --no_python --debug "
        "--tpu --mps --same_network --use_megatron_lm --use_cpu --ipex --use_xpu --rdzv_standalone"
    ),
    "deepspeed": _Wrapper(
        "-H --hostfile -i --include -e --exclude --num_nodes --num_gpus --master_port --master_addr --launcher "
        "--launcher_args --bind_core_list --autotuning"
    ),
    "coverage run": _Wrapper("--data-file --source --rcfile --include --omit --concurrency"),
    "nsys profile": _Wrapper("-o -t -s -w -c -f --output --trace --sample --capture-range", scan=True),
    "py-spy record": _Wrapper("-o -f -r", scan=True),
    **dict.fromkeys(("docker exec", "docker run", "podman exec", "podman run"), _Wrapper(_DOCKER, skip=1)),
    "singularity exec": _Wrapper("-B --bind --env --pwd --overlay -H --home", skip=1),
    "apptainer exec": _Wrapper("-B --bind --env --pwd --overlay -H --home", skip=1),
    "kubectl exec": _Wrapper("-n --namespace -c --container", scan=True),
    "ray job submit": _Wrapper(
        "--address --job-id --submission-id --runtime-env --runtime-env-json --working-dir --metadata-json "
        "--entrypoint-num-cpus --entrypoint-num-gpus --entrypoint-memory --entrypoint-resources --headers --verify "
        "--entrypoint-label-selector --log-style --log-color"
    ),
}
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}


def start(shell: Shell, fields: tuple[str, ...]) -> None:
    """Note what a command would start."""
    shell.state.status = None
    inside: dict[str, str] = {}
    for _ in range(_MAX_WRAPPERS):
        shell.step()
        if not fields:
            return
        name = os.path.basename(fields[0]) if not is_unknown(fields[0]) else ""
        special = _SPECIAL.get(name)
        if special is not None:
            rest = special(shell, fields, inside)
            if rest is None:
                return
            fields = rest
            continue
        found = next(
            (" ".join(words) for n in (3, 2, 1) if (words := (name, *fields[1:n])) and " ".join(words) in _WRAPPERS),
            None,
        )
        if found is None:
            break
        fields = _unwrapped(found, fields, inside)
    if _is_script(shell, fields[0]):
        _script(shell, ("bash", *fields), inside)
        return
    _note(shell, fields[:1], fields[1:], inside)


def _unwrapped(name: str, fields: tuple[str, ...], inside: dict[str, str]) -> tuple[str, ...]:
    words = fields[len(name.split()) :]
    rest = _WRAPPERS[name].inner(words)
    options = words[: len(words) - len(rest)]
    inside["\0words"] = " ".join((inside.get("\0words", ""), name, *options)).strip()
    if name == "ray job submit":
        _ray_options(options, inside)
        if len(rest) == 1 and " " in rest[0]:
            return ("bash", "-c", *rest)
    if name in ("torchrun", "accelerate launch", "deepspeed", "coverage run") or (name == "uv run" and rest):
        module = bool({"-m", "--module"} & set(options))
        if module:
            return ("python3", "-m", *rest)
        if rest and rest[0].endswith(".py"):
            return ("python3", *rest)
    return rest


def _ray_options(options: Sequence[str], inside: dict[str, str]) -> None:
    """The environment and folder that `ray job submit` gives to the job."""
    for at, word in enumerate(options):
        name, equals, value = word.partition("=")
        value = value if equals else options[at + 1] if at + 1 < len(options) else ""
        if name == "--working-dir" and value and not is_unknown(value) and "://" not in value:
            inside["\0folder"] = value
        if name == "--runtime-env-json" and not is_unknown(value):
            try:
                data = json.loads(value)
            except ValueError:
                continue
            variables = data.get("env_vars") if isinstance(data, dict) else None
            if isinstance(variables, dict):
                inside.update({str(key): str(item) for key, item in variables.items()})
            if isinstance(data, dict) and isinstance(data.get("working_dir"), str) and "://" not in data["working_dir"]:
                inside["\0folder"] = data["working_dir"]


def _is_script(shell: Shell, name: str) -> bool:
    if is_unknown(name) or ("/" not in name and not name.endswith(SCRIPT_SUFFIXES)):
        return False
    if name.endswith(SCRIPT_SUFFIXES):
        return True
    text = shell.read(name)
    return bool(text and re.match(r"#!.*\b(ba|z|da|k)?sh\b", text))


def _note(shell: Shell, program: Sequence[str], arguments: Sequence[str], inside: Mapping[str, str]) -> None:
    """Note a program; \0 names what is no variable of its environment: its folder, and the words before it."""
    folder = shell.path(inside["\0folder"]) if "\0folder" in inside else shell.folder
    own = {name: value for name, value in inside.items() if not name.startswith("\0")}
    environment = {**shell.state.environment(), **own}
    launch = Launch(
        tuple(program),
        tuple(arguments),
        environment,
        folder,
        shell.script,
        shell.line,
        tuple(inside.get("\0words", "").split()),
    )
    if launch not in shell.starts[-20:]:
        if len(shell.starts) >= _MAX_STARTS:
            raise shell.error(f"the script starts more than {_MAX_STARTS} programs")
        shell.starts.append(launch)
    shown = " ".join((*program, *arguments))
    shell.doubt = f"what `{why_unknown(shown) if is_unknown(shown) else shown[:60]}` gives (line {shell.line})"
    shell.print(unknown(shell.doubt))


# ---- programs of their own kind -------------------------------------------------------------------------------------

_Special = Callable[["Shell", tuple[str, ...], dict[str, str]], "tuple[str, ...] | None"]


def _python(shell: Shell, fields: tuple[str, ...], inside: dict[str, str]) -> tuple[str, ...] | None:
    at = 1
    while at < len(fields) and fields[at].startswith("-") and fields[at] not in ("-", "-m", "-c"):
        at += 2 if fields[at] in ("-X", "-W") else 1
    words = fields[at:]
    if words[:1] == ("-c",):
        if "torch_npu" in " ".join(words):
            shell.assumed("torch_npu is not installed: the GPUs are NVIDIA's")
            shell.state.status = 1
            return None
        _note(shell, (fields[0], *words[:2]), words[2:], inside)
        return None
    if words[:1] == ("-m",) and len(words) > 1:
        wrapper = _MODULES.get(words[1])
        if wrapper is not None:
            return _unwrapped(wrapper, (*wrapper.split(), *words[2:]), inside)
        if words[1:3] == ("coverage", "run"):
            return _unwrapped("coverage run", words[1:], inside)
        _note(shell, (fields[0], *words[:2]), words[2:], inside)
        return None
    _note(shell, (fields[0], *words[:1]), words[1:], inside)
    return None


def _script(shell: Shell, fields: tuple[str, ...], inside: dict[str, str]) -> None:
    """A shell with a file, a text or its input."""
    words = list(fields[1:])
    while words and re.match(r"[-+]", words[0]) and words[0] != "-":
        option = words.pop(0)
        if option in ("-o", "+o", "--rcfile", "--init-file", "-O") and words:
            words.pop(0)
        elif re.fullmatch(r"-[a-z]*c[a-z]*", option) and words:
            _evaluate(shell, words[0], None, words[2:], inside, words[1] if len(words) > 1 else None)
            return
        elif option == "--":
            break
    if not words or words[0] == "-":
        text = shell.input_text()
        if text is not None:
            _evaluate(shell, text, None, [], inside)
        return
    text = shell.read(words[0])
    if is_unknown(words[0]) or text is None:
        shell.missing.append(why_unknown(words[0]) or str(shell.path(words[0])))
        _note(shell, ("bash", words[0]), words[1:], inside)
        return
    _evaluate(shell, text, shell.path(words[0]), words[1:], inside, words[0])


def _evaluate(
    shell: Shell,
    text: str,
    script: Path | None,
    arguments: Sequence[str],
    inside: Mapping[str, str],
    name: str | None = None,
) -> None:
    """Evaluate a script, or without one a text of the script that is evaluated."""
    if not known_part(text).strip():
        return
    with shell.subshell():
        for key, value in inside.items():
            if key == "\0folder":
                shell.state.folder = shell.path(value)
            elif not key.startswith("\0"):
                shell.state.variables[key] = Variable(value, exported=True)
        shell.run_text(text, script, arguments, name=name)
    shell.print(shell.captured)


def _bash(shell: Shell, fields: tuple[str, ...], inside: dict[str, str]) -> None:
    _script(shell, fields, inside)


def _env(shell: Shell, fields: tuple[str, ...], inside: dict[str, str]) -> tuple[str, ...]:
    words = list(fields[1:])
    while words and (words[0].startswith("-") or re.match(r"[A-Za-z_]\w*=", words[0])):
        word = words.pop(0)
        if word in ("-u", "--unset", "-C", "--chdir") and words:
            words.pop(0)
        elif not word.startswith("-"):
            name, _, value = word.partition("=")
            inside[name] = value
    return tuple(words)


def _ssh(shell: Shell, fields: tuple[str, ...], inside: dict[str, str]) -> None:
    words = _Wrapper("-p -i -o -l -F -J -L -R -b -c -E -m -S -w", skip=1).inner(fields[1:])
    if words:
        _evaluate(shell, " ".join(words), None, [], inside)
    elif (text := shell.input_text()) is not None:
        _evaluate(shell, text, None, [], inside)


_SBATCH = (
    "-N -n -c -w -p -t -A -J -o -e -G -d -x -C -q -a -D --nodes --ntasks --gpus --export --partition --account --time "
    "--output --error --job-name --dependency --gres --chdir --mem --array --qos --constraint --exclude --nodelist "
    "--gpus-per-node --ntasks-per-node --cpus-per-task --segment --comment --reservation"
)


def _sbatch(shell: Shell, fields: tuple[str, ...], inside: dict[str, str]) -> tuple[str, ...] | None:
    rest = _Wrapper(_SBATCH + " --wrap").inner(fields[1:])
    options = fields[1 : len(fields) - len(rest)]
    for name, value in slurm_variables(options).items():
        inside.setdefault(name, value)
    slurm, shell.in_slurm = shell.in_slurm, True
    shell.doubt = "the job id of sbatch"
    try:
        for at, word in enumerate(options):
            if word == "--wrap" or word.startswith("--wrap="):
                text = word[7:] if "=" in word[:7] else options[at + 1] if at + 1 < len(options) else ""
                _evaluate(shell, text, None, [], inside)
                return None
        command = inside.get("COMMAND") or shell.lookup("COMMAND")
        if rest and os.path.basename(rest[0]) == "ray.sub" and command:
            # NeMo RL's script starts a Ray cluster and runs COMMAND on it.
            _evaluate(shell, command, None, [], inside)
        elif rest or shell.state.input is not None:
            _script(shell, ("bash", *rest), inside)
    finally:
        shell.in_slurm = slurm
        shell.state.status = None
    return None


def slurm_variables(options: Sequence[str]) -> dict[str, str]:
    """The variables that Slurm sets from these options."""
    found: dict[str, str] = {}
    for at, word in enumerate(options):
        name, equals, value = word.partition("=")
        if not equals and at + 1 < len(options):
            value = options[at + 1]
        if re.fullmatch(r"-N\d{1,6}", word):
            name, value = "-N", word[2:]
        if name in ("-N", "--nodes") and re.fullmatch(r"\d{1,6}", value):
            found |= dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), value)
        gpus = re.fullmatch(r"(?:gpu:)?(?:[\w-]+:)?(\d{1,3})", value)
        if name in ("--gres", "--gpus-per-node") and gpus:
            found |= dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), gpus[1])
    return found


_SPECIAL: Mapping[str, _Special] = {
    "env": _env,
    "ssh": _ssh,
    "sbatch": _sbatch,
    "salloc": lambda shell, fields, inside: _WRAPPERS["srun"].inner(fields[1:]) or None,
    **dict.fromkeys(sorted(_SHELLS), _bash),
    **dict.fromkeys(["python", "python3", *(f"python3.{minor}" for minor in range(8, 16))], _python),
}
