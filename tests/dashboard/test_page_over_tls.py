"""The page for other machines: over TLS with the syncer's key, and controls that reach a syncer with keys."""

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


@pytest.mark.parametrize("words", [["--host", "0.0.0.0"], ["--host", "head"]])
def test_the_page_is_not_shown_to_others_in_plain_text(tmp_path, capsys, words):
    assert main(["dash", str(tmp_path), "--wait", "--token", TOKEN, *words]) == 2
    assert "others could read the page and its token on the way: give --keys DIR" in capsys.readouterr().err


def test_the_page_over_tls(tmp_path):
    ring = KeyRing(tmp_path / "keys")
    words = ["dash", str(tmp_path / "run"), "--wait", "--port", "0", "--keys", str(ring.directory), "--while-stdin"]
    page = subprocess.Popen(
        [sys.executable, "-m", "atoll", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert page.stdout is not None
        address = page.stdout.readline().split()[-1]
        assert address.startswith("https://127.0.0.1:")
        context = ClientTls(ca=ring["authority.pem"]).make_context()
        with urllib.request.urlopen(address, timeout=LIMIT_S, context=context) as answer:
            assert b"<html" in answer.read()
    finally:
        page.communicate(timeout=LIMIT_S)
    assert page.returncode == 0


def test_controls_of_the_page_reach_a_syncer_with_keys(tmp_path):
    ring = KeyRing(tmp_path / "keys")
    with Run(tmp_path / "run", endless(), keys=ring.syncer) as run:
        (one,) = run.joined(LearnerSpec(1, keys=ring["one"]))
        run.go(one)
        assert is_reachable(run.directory, TOKEN), (
            "whoever can read the syncer's key may; the page has a token of its own"
        )
        assert apply_control(run.directory, OperatorRequest("grace", 0.25, "ada", True)).startswith("the grace margin")
        assert run.status()["grace"] == 0.25
        assert "is being taken" in apply_control(run.directory, OperatorRequest("snapshot", None, "ada", True))
