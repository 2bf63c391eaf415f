from pathlib import Path

import pytest

from trimtab.formats.launch.flags import flag_words, flags
from trimtab.formats.launch.launch import Launch, is_unknown, unknown, why_unknown


@pytest.mark.parametrize(
    ("program", "module"),
    [
        (("python3", "-m", "verl.trainer.main_ppo"), "verl.trainer.main_ppo"),
        (("/opt/venv/bin/python", "/root/slime/train.py"), "root.slime.train"),
        (("python", "./examples/run_grpo.py"), "examples.run_grpo"),
        (("prime-rl",), "prime-rl"),
    ],
)
def test_a_program_has_one_name_however_it_is_started(program: tuple[str, ...], module: str) -> None:
    launch = Launch(program)
    assert launch.module == module
    assert launch.runs(module.split(".")[-1])
    assert not launch.runs("main")


def test_a_file_is_found_above_the_script_and_on_the_python_path(tmp_path: Path) -> None:
    (tmp_path / "checkout" / "config").mkdir(parents=True)
    (tmp_path / "checkout" / "config" / "a.yaml").touch()
    (tmp_path / "else").mkdir()
    script = tmp_path / "checkout" / "examples" / "run.sh"
    assert Launch(("x",), script=script, folder=tmp_path / "else").find("config/a.yaml") is not None
    there = Launch(("x",), folder=tmp_path / "else", environment={"PYTHONPATH": "../checkout"})
    assert there.find("no.yaml", "config/a.yaml") is not None
    assert Launch(("x",), folder=tmp_path / "else").find("config/a.yaml") is None


def test_a_word_built_from_an_unknown_one_says_why_it_is_unknown() -> None:
    word = f"trainer.nnodes={unknown('nvidia-smi -L in line 3')}"
    assert is_unknown(word)
    assert why_unknown(word) == "nvidia-smi -L in line 3"
    assert why_unknown(unknown(word)) == "trainer.nnodes=nvidia-smi -L in line 3"


def test_flags_are_read_as_argparse_reads_them() -> None:
    words = ["pos", "--a.b=c=d", "--lr", "-1e-6", "--on", "--n", "1", "2", "-s", "x", "--lr", "3", "--", "--rest"]
    assert flag_words(words)[""] == ("pos", "--rest")
    assert flags(words) == {"a.b": "c=d", "lr": 3, "on": True, "n": [1, 2], "s": "x"}
    assert flags(["--on", "file", "--x", "True", "--none", "None"], switches=("on",)) == {
        "on": True,
        "x": True,
        "none": None,
    }
