"""`atoll syncer` and `atoll shard` on the command line: refused options, files after a failed start, resuming."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from atoll.cli.main import main
from tests.learner.runs import processes

TOKEN = "a token of this test"

PORTS = {
    "syncer": ["--out", "RUN", "--port"],
    "shard": ["--out", "RUN", "--syncer", "127.0.0.1:7400", "--shard", "0", "--shards", "1", "--port"],
    "dash": ["RUN", "--port"],
    "train": ["--out", "RUN", "--dash", "--dash-port"],
}
"""Arguments of every command that listens, without the number of its port."""


def arguments(command: str, run: Path) -> list[str]:
    return [command, *(str(run) if word == "RUN" else word for word in PORTS[command])]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


# --------------------------------------------------------------------------------------------------------------------
# Ports


@pytest.mark.parametrize("port", ["65536", "70000"])
@pytest.mark.parametrize("command", PORTS)
def test_port_above_65535_is_refused(tmp_path, capsys, command, port):
    assert main([*arguments(command, tmp_path / "run"), port]) == 2
    output = capsys.readouterr().err
    assert f"port': {port} is not a port; give a number from 0 to 65535" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", PORTS)
def test_negative_port_is_refused_and_host_is_not_blamed(tmp_path, capsys, command):
    assert main([*arguments(command, tmp_path / "run"), "-5"]) == 2
    output = capsys.readouterr().err
    assert "port': -5 is not a port; give a number from 0 to 65535" in output
    assert "--host" not in output
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------------------------
# A failed start leaves no files


@pytest.mark.parametrize("command", ["syncer", "shard"])
def test_port_in_use_leaves_no_directory(tmp_path, capsys, taken_port, command):
    assert main([*arguments(command, tmp_path / "runs" / "first"), str(taken_port)]) == 2
    assert f"cannot listen on 127.0.0.1:{taken_port}: Address already in use; give another --port" in (
        capsys.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


def test_unknown_host_leaves_no_directory(tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["syncer", "--out", str(run), "--host", "no-such-host.invalid", "--plain-text", "--token", TOKEN]) == 2
    assert "cannot listen on no-such-host.invalid" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_out_that_cannot_be_created_leaves_no_parents(tmp_path, capsys):
    run = tmp_path / "runs" / ("x" * 300)  # not even root can create it
    assert main(["syncer", "--out", str(run), "--port", "0"]) == 2
    assert "File name too long" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["syncer", "shard"])
def test_bad_keys_leave_no_directory(tmp_path, capsys, command):
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in ("certificate.pem", "key.pem", "authority.pem"):
        (keys / name).write_text("nothing of a key")
    assert main([*arguments(command, tmp_path / "run"), "0", "--keys", str(keys)]) == 2
    assert str(keys) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [keys]


def test_bad_certificate_leaves_no_directory(tmp_path, capsys):
    file = tmp_path / "file.pem"
    file.write_text("nothing of a certificate")
    tls = ["--certificate", str(file), "--private-key", str(file), "--token", TOKEN]
    assert main(["syncer", "--out", str(tmp_path / "run"), "--port", "0", *tls]) == 2
    assert str(file) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


# --------------------------------------------------------------------------------------------------------------------
# Resuming


def _serve(arguments: list[str], token: str | None, pipe: Connection) -> None:
    """Run `atoll syncer` in a child process with its output in the pipe."""
    for stream in (1, 2):
        os.dup2(pipe.fileno(), stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1) for stream in (1, 2))  # noqa: SIM115 - open until the process exits
    if token is not None:
        os.environ["ATOLL_TOKEN"] = token
    sys.exit(main(["syncer", *arguments]))


def stopped_syncer(*arguments: str, token: str | None = None) -> tuple[str, str]:
    """Serve until the address is printed, then send SIGINT. Return the port and the resume command."""
    context = processes()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(list(arguments), token, theirs))
    process.start()
    theirs.close()
    output = ""
    try:
        with open(ours.fileno(), closefd=False) as lines:
            for line in lines:
                output += line
                if line.startswith("On each island:"):
                    os.kill(process.pid, signal.SIGINT)
        process.join()
        assert process.exitcode == 130, output
        assert TOKEN not in output
        hint = output.partition("learners continue to train; resume with: ")[2].splitlines()[0]
        return output.partition("The syncer listens on 127.0.0.1:")[2].partition(".\n")[0], hint
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def test_interrupted_syncer_prints_command_that_resumes_it_on_same_port(tmp_path):
    run = tmp_path / "a run"
    port, hint = stopped_syncer("--out", str(run), "--port", "0", "--host", "localhost", "--log-format", "json")
    expected = ["--host", "localhost", "--port", port, "--log-format", "json"]
    assert shlex.split(hint) == ["atoll", "syncer", "--out", str(run), "--resume", *expected]
    assert stopped_syncer(*shlex.split(hint)[2:]) == (port, hint)


def test_run_that_had_a_token_is_not_resumed_without_one(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("ATOLL_TOKEN", raising=False)
    run = tmp_path / "run"
    port, hint = stopped_syncer("--out", str(run), "--port", "0", token=TOKEN)
    assert hint == f"atoll syncer --out {run} --resume --port {port}, with the same ATOLL_TOKEN"
    for option in ("--resume", "--or-resume", "--standby"):
        assert main(["syncer", "--out", str(run), "--port", "0", option]) == 2
        output = capsys.readouterr().err
        assert f"{run} was served with a token, and none is given now: set ATOLL_TOKEN or give --token" in output
    assert not any(TOKEN in path.read_text(errors="replace") for path in run.rglob("*") if path.is_file())


def test_command_to_resume_has_a_place_for_the_token_and_not_the_token(tmp_path):
    port, hint = stopped_syncer("--out", str(tmp_path), "--port", "0", "--token", TOKEN)
    assert hint == f"atoll syncer --out {tmp_path} --resume --port {port} --token SECRET"


def test_unknown_model_size_is_refused_with_the_known_ones(tmp_path, capsys):
    assert main(["syncer", "--out", str(tmp_path / "run"), "--port", "0", "--model", "7b"]) == 2
    assert "there is no model '7b'; give one of 100k, 360k, 1m, 5m, 10m, moe" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
