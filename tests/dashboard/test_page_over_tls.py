"""The page for other hosts: over TLS with the syncer's key, and controls of a syncer with keys."""

from __future__ import annotations

import subprocess
import sys
import urllib.request

import pytest

from atoll.cli.main import main
from atoll.dashboard.control import OperatorRequest, apply_control, is_reachable
from atoll.transport.tls import ClientTls
from tests.learner.runs import LIMIT_S, LearnerSpec, Run, endless
from tests.transport.key_rings import KeyRing

TOKEN = "correct horse battery staple"


@pytest.mark.parametrize("arguments", [["--host", "0.0.0.0"], ["--host", "head"]])
def test_page_for_other_hosts_needs_tls(tmp_path, capsys, arguments):
    assert main(["dash", str(tmp_path), "--wait", "--token", TOKEN, *arguments]) == 2
    assert "could read the page and its token; give --keys DIR" in capsys.readouterr().err


def test_page_is_served_over_tls(tmp_path):
    ring = KeyRing(tmp_path / "keys")
    arguments = ["dash", str(tmp_path / "run"), "--wait", "--port", "0", "--keys", str(ring.directory), "--while-stdin"]
    page = subprocess.Popen(
        [sys.executable, "-m", "atoll", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert page.stdout is not None
        address = page.stdout.readline().split()[-1]
        assert address.startswith("https://127.0.0.1:")
        context = ClientTls(ca=ring["authority.pem"]).make_context()
        with urllib.request.urlopen(address, timeout=LIMIT_S, context=context) as response:
            assert b"<html" in response.read()
    finally:
        page.communicate(timeout=LIMIT_S)
    assert page.returncode == 0


def test_controls_reach_syncer_with_keys(tmp_path):
    ring = KeyRing(tmp_path / "keys")
    with Run(tmp_path / "run", endless(), keys=ring.syncer) as run:
        (one,) = run.joined(LearnerSpec(1, keys=ring["one"]))
        run.go(one)
        assert is_reachable(run.directory, TOKEN), "the syncer's key grants access; the page has its own token"
        assert apply_control(run.directory, OperatorRequest("grace", 0.25, "ada", True)).startswith(
            "grace margin changed"
        )
        assert run.status()["grace"] == 0.25
        assert "is being taken" in apply_control(run.directory, OperatorRequest("snapshot", None, "ada", True))
