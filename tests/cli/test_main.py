"""The command line: help, startup time, and errors in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from atoll import __version__
from atoll.cli.main import COMMANDS, Command, main
from atoll.cli.output import print_json

HEAVY = ("atoll.core.types", "atoll.sim", "hypothesis", "matplotlib", "msgspec", "multiprocessing", "numpy", "torch")


def command_that(action):
    """Return a command table in which `act` calls `action`."""

    def run() -> None:
        """Act."""
        action()

    return {"act": Command(run, "atoll act"), "rest": COMMANDS["version"]}


def failing_with(error):
    def action():
        raise error

    return command_that(action)


def atoll(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "atoll", *arguments], capture_output=True, text=True, timeout=300, check=False, **options
    )


def test_version_is_shown_in_three_ways(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"atoll {__version__}\n"
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"atoll {__version__} on Python ")
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["atoll"] == __version__


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_says_what_it_does_and_ends_with_an_example(name, capsys):
    assert main([name, "--help"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    doc = COMMANDS[name].run.__doc__
    assert doc
    assert doc.split("\n")[0].strip() in output
    assert COMMANDS[name].example.startswith(f"atoll {name}")
    assert output.endswith(f"Example: {COMMANDS[name].example}")


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert [name for name in COMMANDS if f"\n  {name} " not in output] == []


def test_help_loads_nothing_heavy():
    script = (
        "import sys; from atoll.cli.main import main; main(['--help'])\n"
        "print(*sorted({*sys.argv[1:]} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *HEAVY], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.splitlines()[-1] == "", "import it inside the command's run()"


def test_value_error_is_one_line_and_exit_code_2(capsys):
    assert main(["act"], failing_with(ValueError("quorum is 5 of 4 learners:\n  lower it"))) == 2
    assert capsys.readouterr() == ("", "atoll: quorum is 5 of 4 learners: lower it\n")


def test_a_missing_file_is_one_line_and_exit_code_2(capsys, tmp_path):
    assert main(["act"], command_that(lambda: (tmp_path / "gone").read_text())) == 2
    assert capsys.readouterr().err == f"atoll: {tmp_path / 'gone'}: No such file or directory\n"


def test_traceback_shows_where_an_error_came_from():
    with pytest.raises(ValueError, match="too few"):
        main(["--traceback", "act"], failing_with(ValueError("too few")))


def test_other_exceptions_pass_through():
    with pytest.raises(AssertionError, match="the story"):
        main(["act"], failing_with(AssertionError("the story")))


def test_an_unknown_command_is_exit_code_2(capsys):
    assert main(["sail"]) == 2
    assert "No such command 'sail'" in capsys.readouterr().err


def test_ctrl_c_is_one_line_and_exit_code_130(capsys):
    assert main(["act"], failing_with(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "atoll: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "codes"),
    [
        (["version"], {141}),
        (["--version"], {141}),
        (["simulate", "--days", "1", "--protocol-hours", "0.1", "--seeds", "1"], {141}),
        (["--help"], {1, 141}),
    ],  # Typer prints the help, with or without a buffer
)
def test_closed_pipe_is_silent(arguments, codes):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "atoll", *arguments], stdout=writing, stderr=subprocess.PIPE, timeout=300, check=False
    )
    os.close(writing)
    assert done.stderr == b""
    assert done.returncode in codes


@pytest.mark.parametrize("arguments", ["version", "version --json", "--help", "swarm --seeds 1 --small --jobs 1"])
def test_a_closed_stdout_is_no_traceback(arguments):
    line = f"exec {sys.executable} -m atoll {arguments} >&-"
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no disk that is always full")
def test_full_disk_is_reported_with_its_file():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "atoll", "version"],
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=300,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == b"atoll: standard output: No space left on device\n"


def test_ctrl_c_while_modules_are_loaded_is_one_line():
    script = (
        "import sys, atoll.__main__ as start\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "sys.exit(start.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "atoll: interrupted\n")


def test_python_m_atoll_is_the_same_command():
    assert atoll("--version").stdout == f"atoll {__version__}\n"


def test_print_json_refuses_nan():
    with pytest.raises(ValueError, match="JSON"):
        print_json({"goodput": float("nan")})
