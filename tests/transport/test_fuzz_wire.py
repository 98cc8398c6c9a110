"""Short run of the fuzzer, if atheris is installed, and a check that it finds a planted bug."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed; see docs/wire.md for the fuzzer",
)

# A planted bug: a message without its version byte raises IndexError.
PLANTED = """
import runpy, sys
import atoll.transport.wire as wire

def decode_message(data, sender):
    return data[4]

wire.decode_message = decode_message
runpy.run_path("tests/transport/fuzz_wire.py", run_name="__main__")
"""


def run_fuzzer(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    options = [str(tmp_path / "corpus"), "-runs=20000", "-seed=1", "-max_len=4096", f"-artifact_prefix={tmp_path}/"]
    return subprocess.run(
        [sys.executable, *command, *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_fuzzer_finds_no_error(tmp_path):
    done = run_fuzzer(tmp_path, "tests/transport/fuzz_wire.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done 20000 runs" in done.stderr


def test_fuzzer_finds_planted_bug(tmp_path):
    done = run_fuzzer(tmp_path, "-c", PLANTED)
    assert done.returncode != 0
    assert "IndexError" in done.stdout + done.stderr
