"""`--execute`: runs a script in namespaces of its own, where commands are recorded instead of run.

The script's shell has its own users, processes, mounts and network: it sees no other process, reaches no network, and
finds every file system read-only; what it writes to its folder, its home or a new folder of `/` goes to memory. Only
the commands of `TOOLS` run; every other one, and whatever is started by an absolute path, is recorded with its
arguments and environment, and prints a marker of an unknown value. Where such namespaces cannot be had, nothing is run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from trimtab.core.errors import InputError
from trimtab.formats.launch.launch import CLOSE, OPEN

LIMIT_S = 20.0
MAX_RECORDS = 1_000
_MEMORY_KB = 2 * 2**20
_NEEDED = ("unshare", "mount", "chroot", "setpriv", "awk", "sort", "cp")
TOOLS = (
    *("bash", "sh", "awk", "basename", "cat", "cut", "date", "dirname", "env", "expr", "false", "grep", "head", "ls"),
    *("mkdir", "nproc", "paste", "printf", "pwd", "readlink", "realpath", "rev", "sed", "seq", "setpriv", "sort"),
    *("tail", "tee", "tr", "true", "uname", "uniq", "wc", "xargs", "mktemp", "touch", "cp", "ln"),
)
"""Programs that may run; what they write stays in the sandbox's memory."""
_RECORDED = (
    *("python", "python3", "ray", "uv", "pip", "pip3", "nvidia-smi", "torchrun", "accelerate", "deepspeed", "docker"),
    *("srun", "sbatch", "scontrol", "conda", "ssh", "git", "curl", "wget", "pkill", "killall", "sleep", "hostname"),
    *("nohup", "timeout", "sudo", "numactl", "jq", "whoami", "id", "ps", "rm", "rmdir", "mv", "chmod", "kubectl"),
    *("huggingface-cli", "hf", "wandb"),
)
"""Programs that `command -v` finds, too; a command of any other name is recorded by the shell."""
_WRITE = r"""
file=$TRIMTAB_RECORDS/$EPOCHREALTIME.$BASHPID
{
    printf '%s\0' "$PWD" "$#" "$@"
    for name in $(compgen -e); do printf '%s\0' "$name=${!name}"; done
    printf '\0'
} > "$file" 2> /dev/null
"""
_MARK = f"printf '{OPEN}what_%s_gives{CLOSE}\\n' \"${{1##*/}}\""
_SILENT = "case ${1##*/} in sleep | pkill | killall | rm | rmdir | mv | chmod | pip | pip3) ;; *) " + _MARK + " ;; esac"
_PROBE = 'case "$*" in python*torch_npu*) exit 1 ;; esac'
_RECORDER = f'#!/usr/bin/bash\nset -- "${{0##*/}}" "$@"\n{_WRITE}\n{_PROBE}\n{_SILENT}\n'
_FILTERS = ("awk", "cat", "cut", "grep", "head", "paste", "rev", "sed", "sort", "tail", "tr", "uniq", "wc", "xargs")
# A filter whose input holds a marker gives the marker: `nvidia-smi -L | wc -l` is not 1.
_SETUP = f"""command_not_found_handle() {{
{_WRITE}
{_SILENT}
}}
_trimtab_filter() {{
    local text tool=$1
    shift
    if [ ! -p /proc/self/fd/0 ]; then
        command "$tool" "$@"
        return
    fi
    text=$(command cat && printf x)
    case $text in
        *{OPEN}*{CLOSE}*) text=${{text#*{OPEN}}} && printf '{OPEN}%s{CLOSE}\\n' "${{text%%{CLOSE}*}}" ;;
        *) printf %s "${{text%x}}" | command "$tool" "$@" ;;
    esac
}}
for tool in {" ".join(_FILTERS)}; do eval "$tool() {{ _trimtab_filter $tool \\"\\$@\\"; }}; export -f $tool"; done
unset tool
# Its own limits stand; a script that raises them goes on.
ulimit() {{ :; }}
export -f command_not_found_handle _trimtab_filter ulimit
"""


@dataclass(frozen=True)
class RecordedCommand:
    """A command that a script would have run: words, folder, environment."""

    words: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]


def run_recorded(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], limit_s: float = LIMIT_S
) -> list[RecordedCommand]:
    """The commands that running `words` would have run. Raises InputError where no sandbox can be had."""
    missing = [name for name in _NEEDED if shutil.which(name) is None and not Path("/usr/sbin", name).exists()]
    if not sys.platform.startswith("linux") or missing:
        raise InputError(
            "--execute needs Linux namespaces, which cannot be had here",
            where=f"missing: {', '.join(missing)}" if missing else sys.platform,
            hint="read the script without --execute",
        )
    with tempfile.TemporaryDirectory(prefix="trimtab-") as made:
        private = Path(made)
        (private / "root").mkdir()
        (private / "space").mkdir()
        for name, text in (
            ("tools", "".join(f"{tool}\n" for tool in TOOLS)),
            ("recorded", "".join(f"{name}\n" for name in _RECORDED)),
            ("recorder", _RECORDER),
            ("setup", _SETUP),
            ("enter", (resources.files("trimtab.formats.launch") / "sandbox.sh").read_text(encoding="utf-8")),
        ):
            (private / name).write_text(text, encoding="utf-8")
        enter = ["/bin/bash", str(private / "enter"), str(private), str(_MEMORY_KB), str(limit_s), *words]
        spaces = ["--user", "--map-root-user", "--pid", "--fork", "--mount", "--net", "--ipc", "--uts", "--kill-child"]
        try:
            done = subprocess.run(
                ["unshare", *spaces, *enter],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=limit_s + 10,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InputError(f"--execute did not finish: {str(error)[:200]}", where=str(folder)) from None
    if done.returncode != 0:
        why = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise InputError(
            f"--execute needs namespaces, which cannot be had here: {why[-1][:200] if why else 'unshare failed'}",
            hint="read the script without --execute",
        )
    return _records(done.stdout.decode("utf-8", "replace"))


def _records(text: str) -> list[RecordedCommand]:
    found: list[RecordedCommand] = []
    fields = iter(text.split("\0"))
    for folder in fields:
        count = next(fields, "")
        if not count.isdigit():
            break
        words = tuple(next(fields, "") for _ in range(int(count)))
        environment: dict[str, str] = {}
        for entry in fields:
            if not entry:
                break
            name, _, value = entry.partition("=")
            environment[name] = value
        environment = {name: text for name, text in environment.items() if name not in ("TRIMTAB_RECORDS", "BASH_ENV")}
        if words and len(found) < MAX_RECORDS:
            found.append(RecordedCommand(words, Path(folder), environment))
    return found
