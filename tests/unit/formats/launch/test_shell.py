"""What the evaluated shell says is what bash says: every case runs in a real bash, too."""

import contextlib
import subprocess
from pathlib import Path

import pytest

from trimtab.core.errors import InputError
from trimtab.formats.launch.launch import is_unknown
from trimtab.formats.launch.shell import Shell
from trimtab.formats.launch.state import Flow

CASES = [
    'x=1; show "$x" ${x} $((x + 2)) "${y:-z}" ${y:-a b} "${x:+set}" "${x:-no}"',
    "show 'a  b' \"c  d\" e\\ f $'t\\tn' \"\" ''",
    'a=(1 "2 3" four); a+=(5); show "${a[@]}" ${#a[@]} "${a[1]}" "${a[*]}" "${a[@]:1:2}" ${a[-1]}',
    'declare -A m=([k]=v [l]="w x"); show "${m[k]}" "${m[l]}"; m[z]=1; show ${#m[@]}',
    'p=/a/b/run_x.sh; show "${p##*/}" "${p%/*}" "${p%.sh}" "${p/run/walk}" "${p//\\//_}" "${p:3:4}" ${#p}',
    'v=Qwen/Qwen3-8B; show "${v,,}" "${v^^}" "${v^}" "${v#*/}" "${v%%-*}"',
    "show $((2**10)) $((7 / 2)) $((-7 % 3)) $((1 ? 5 : 6)) $(((1 + 2) * 3)) $((0x10)) $((010))",
    "i=3; ((i++)); ((i += 2)); show $i; let i=i*2; show $i",
    'for i in {1..3} x; do show "$i"; done; for ((i = 0; i < 3; i++)); do show n$i; done',
    "i=0; while [ $i -lt 3 ]; do i=$((i + 1)); [ $i = 2 ] && continue; show $i; done",
    "until [[ $((++n)) -ge 3 ]]; do show $n; done",
    'case gpu in npu) show n ;; g*|x) show g ;; *) show o ;; esac; case "a b" in "a b") show yes ;; esac',
    'if [ -z "$u" ] && [[ abc == a* && ! abc =~ ^b ]]; then show t; elif false; then show e; else show f; fi',
    'if [[ "v12-x" =~ v([0-9]+)-(.) ]]; then show "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"; fi',
    'f() { local x=in; show "$x" "$1" $#; return 3; }; x=out; f "a b" c || show $? "$x"',
    'x=$(echo one; echo "two  three"); show "$x" $x; y=`echo \\`echo q\\``; show $y',
    'show "$(printf "%s-%03d" a 7)" "$(echo a,b,c | cut -d, -f2)" "$(seq -s, 3)" "$(basename /a/b.sh .sh)"',
    'show "$(dirname /a/b/c)" "$(expr 6 / 2)" "$(echo Hello | tr A-Z a-z)" "$(echo "a b" | wc -w)"',
    'show "$(echo one-two | sed "s/-/ and /")" "$(printf "a\\nb\\n" | grep -c .)" "$(echo x y z | awk "{print \\$2}")"',
    'cat > made.txt <<EOF\nx=$((1 + 1)) \\$y\nEOF\nshow "$(cat made.txt)"',
    "cat <<'EOF' > two\n$raw\nEOF\nshow \"$(cat two)\"",
    'read -r a b <<< "one two three"; show "$a" "$b"; IFS=, read -ra l <<< "x,y"; show "${l[@]}"',
    'printf "p\\nq\\n" > list; while read -r l; do show "$l"; done < list',
    'set -- a "b c" d; shift; show "$@" $# "$1"; show "$*"; for w; do show "$w"; done',
    'x=a; x+=b; show $x; export Y=1 Z="2 3"; show $Y "$Z"; unset x; show "[${x-none}]"',
    "show {a,b}c pre{1,2}post {x} a{b,{c,d}} '{q,r}' +k={a:1}",
    'n=N; show "${!n}"; N=v; show "${!n}"; show "${n@Q}"',
    '(x=sub; show $x); show "[$x]"; { y=grp; }; show $y',
    'f() { echo "out $1"; }; show "$(f a)"; source ./lib.sh arg; show "$LIB"',
    "true && { show a; true; } || show b; false && show c; false || { show d; true; }; ! false && show e",
    "set -e; false || true; if false; then :; fi; show before; false; show never",
    'eval "show $((1 + 1)) \\"q r\\""; x=5; show "a$x"b"$x"; show a"b c"\'d e\'',
    'show "${UNSET:=given}" "$UNSET"; : "${OTHER:=w}"; show $OTHER',
    'OPTIND=1; set -- -n 4 -v rest; while getopts "n:v" o; do show $o "${OPTARG:-}"; done',
    'w="a b"; show "${x:-"$w/c d"}" "${x:-"e"f}" ${x:-"g h"} "${x:-\'i\'}"',
    "x=1 # a comment\nshow a \\\n  b # more\nshow c;# end",
    'cd sub && show "$(basename "$PWD")"; cd - > /dev/null; show "$(basename "$(pwd)")"',
    'show ~/x "~/x" *.sh nothing* "*.sh" [l]ib.sh',
    'x="a b"; y=$x; show "$y" $y; z="$x"c; show "$z"; w=${x}; show "$w"',
    'nums=(1 2 3); total=0; for n in "${nums[@]}"; do total=$((total + n)); done; show $total "${nums[@]/#/n}"',
    'mapfile -t rows < <(printf "r1\\nr2\\n"); true; x=(a b); unset x; show ${#x[@]}',
]


def evaluated(text: str, folder: Path, **environment: str) -> Shell:
    shell = Shell(folder / "run.sh", folder, {"HOME": "/home/me", "PATH": "/usr/bin:/bin", **environment})
    with_flow = shell.run_text(text, folder / "run.sh", [], name=str(folder / "run.sh"))
    assert with_flow is None
    return shell


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "lib.sh").write_text('LIB="lib $1"\n')
    return tmp_path


@pytest.mark.parametrize("text", CASES)
def test_words_are_those_of_bash(text: str, folder: Path) -> None:
    script = folder / "run.sh"
    script.touch()
    shown = [list(start.arguments) for start in evaluated(text, folder).starts if start.program == ("show",)]
    script.write_text('show() { printf "%s\\0" "$#" "$@" >> "$SHOWN"; }\n' + text)
    environment = {"HOME": "/home/me", "PATH": "/usr/bin:/bin", "SHOWN": str(folder / "shown")}
    subprocess.run(["bash", str(script)], cwd=folder, env=environment, check=False, capture_output=True, timeout=20)
    fields = iter((folder / "shown").read_text().split("\0"))
    expected = [[next(fields) for _ in range(int(count))] for count in fields if count]
    assert shown == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("show $(nvidia-smi -L | wc -l)", "nvidia-smi"),
        ("N=$(python -c 'print(8)'); show key=$((N * 2))", "python"),
        ("if curl -s http://x; then N=1; else N=2; fi; show $N", "curl"),
        ('[ -d /no/such/folder ] && N=1 || N=2; show "$N"', "/no/such/folder"),
        ("set -u; show key=$NNODES", "NNODES"),
        ("show key=$NNODES", "NNODES"),
        ("show key=${NNODES:?number of nodes}", "number of nodes"),
        ("N=$(hostname); show ${N%%.*} ${#N}", "hostname"),
        ("case $(uname -m) in x86_64) N=1 ;; *) N=2 ;; esac; show $N", "uname"),
        ("ROOT=<your folder>; show $ROOT/x", "your folder"),
    ],
)
def test_what_only_a_run_could_tell_is_unknown_and_says_why(text: str, why: str, folder: Path) -> None:
    (start,) = [s for s in evaluated(text, folder).starts if s.program == ("show",)]
    assert all(is_unknown(word) for word in start.arguments)
    assert why in start.arguments[0]


def test_a_way_that_ends_the_script_is_not_the_way_to_the_launch(folder: Path) -> None:
    shell = evaluated("N=4; if ! ray status; then N=8; exit 1; fi; show $N; test -f gone || exit 1; show on", folder)
    assert [s.arguments for s in shell.starts if s.program == ("show",)] == [("4",), ("on",)]


def test_equal_results_of_both_ways_are_known(folder: Path) -> None:
    shell = evaluated("if ray status; then ray stop; N=4; else N=4; fi; show $N", folder)
    assert shell.starts[-1].arguments == ("4",)


@pytest.mark.parametrize(
    "text",
    [
        "while true; do sleep 1; done; show x",
        "f() { f; }; f",
        ":(){ :|:& };:",
        "x=a; while :; do x=$x$x; done",
        "source ./run.sh",
        "bash ./run.sh",
        "while curl x; do if ping y; then break; fi; done; show done",
        "show {1..100000} ; for i in $(seq 100000); do for j in $(seq 10000); do :; done; done",
        'show "$(' * 30 + "echo" + ')"' * 30,
        "x=1; ((x = x ** 99999999))",
        "[[ aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa =~ ^(a+)+b$ ]] && show x",
    ],
)
def test_every_script_ends(text: str, folder: Path) -> None:
    (folder / "run.sh").write_text(text)
    with contextlib.suppress(InputError, Flow):
        evaluated(text, folder)


BROKEN = ["if true", "echo 'open", "x=(1", "case x in", "${", "for do", "a | | b", "echo $(", "fi"]


@pytest.mark.parametrize("text", BROKEN)
def test_a_script_that_cannot_be_parsed_is_refused_with_its_line(text: str, folder: Path) -> None:
    with pytest.raises(InputError) as refused:
        evaluated(f"true\n{text}\n", folder)
    assert "run.sh" in str(refused.value.where)


def test_nothing_is_written_or_run(folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    evaluated("touch a; mkdir b; echo x > c; rm -rf sub; echo y >> lib.sh; bash -c 'touch d'; cp lib.sh e", folder)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert (folder / "lib.sh").read_text() == 'LIB="lib $1"\n'


@pytest.mark.parametrize(
    "command",
    [
        "python3 -m pkg.main k=v",
        "nohup python3 -u -m pkg.main k=v > log 2>&1 &",
        "env A=1 B=2 python3 -m pkg.main k=v",
        "uv run --frozen --extra vllm python3 -m pkg.main k=v",
        "uv run -m pkg.main k=v",
        "conda run -n env --no-capture-output python3 -m pkg.main k=v",
        "ray job submit --address=x --runtime-env y.yaml --no-wait -- python3 -m pkg.main k=v",
        'ray job submit --runtime-env-json=\'{"env_vars": {"A": "1"}}\' -- python3 -m pkg.main k=v',
        "torchrun --nnodes 1 --nproc_per_node=8 -m pkg.main k=v",
        "accelerate launch --num_processes 8 --multi_gpu -m pkg.main k=v",
        "python -m torch.distributed.run --nproc_per_node 8 -m pkg.main k=v",
        "docker run --rm -it --gpus all -v /a:/b -w /b image:tag python3 -m pkg.main k=v",
        "docker exec -it box bash -c 'cd /x && python3 -m pkg.main k=v'",
        "ssh -p 22 user@host 'cd /x; python3 -m pkg.main k=v'",
        "srun --nodes=2 --container-image img --unknown-option v bash -lc 'python3 -m pkg.main k=v'",
        "sbatch --nodes=2 --wrap 'python3 -m pkg.main k=v'",
        "COMMAND='uv run python3 -m pkg.main k=v' CONTAINER=c sbatch --nodes=2 ray.sub",
        "timeout 3h /opt/venv/bin/python3 -m pkg.main k=v",
        "exec python3 -m pkg.main k=v",
        "CMD='python3 -m pkg.main k=v'; eval $CMD",
        'CMD=(python3 -m pkg.main k=v); "${CMD[@]}" 2>&1 | tee log',
        "bash <<'EOF'\npython3 -m pkg.main k=v\nEOF",
        "cat > job.sh <<EOF\npython3 -m pkg.main k=v\nEOF\nsbatch job.sh",
        "if ray status; then python3 -m pkg.main k=v; fi",
    ],
)
def test_a_program_is_found_behind_what_starts_it(command: str, folder: Path) -> None:
    found = [start for start in evaluated(command, folder).starts if start.module == "pkg.main"]
    assert [start.arguments for start in found] == [("k=v",)]


def test_slurm_says_how_many_nodes_a_script_has(folder: Path) -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --gres=gpu:a100:8\n"
    script = head + "show n=$SLURM_NNODES g=$SLURM_GPUS_ON_NODE j=$SLURM_JOB_ID"
    (start,) = evaluated(script, folder).starts
    assert start.arguments[:2] == ("n=4", "g=8")
    assert is_unknown(start.arguments[2])
    (folder / "job.sh").write_text(script)
    (start,) = evaluated("sbatch -N 2 job.sh", folder).starts
    assert start.arguments[0] == "n=2"
