"""The page of a real job: a learner is killed, the run is paused, its syncer is killed, a learner is drained."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from atoll.transport.endpoint import read_address_file, send_request
from tests.dashboard.page_helpers import CONNECTION_ERRORS, card
from tests.reference.small_jobs import small_text

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
expect = playwright.expect

STEP_S, LIMIT_S = 0.05, 300.0


@pytest.fixture
def job(tmp_path):
    """Start `atoll train --dash` with three learners. The second one is killed after a tenth of the run."""
    text = small_text(tmp_path / "text")
    run = tmp_path / "run"
    arguments = ["--data", str(text), "--model", "100k", "--context", "16", "--batch", "1", "--learners", "3"]
    arguments += ["--tokens", str(3 * 16 * 600), "--step-time", f"{STEP_S}s", "--fragments", "4", "--every", "8"]
    arguments += ["--kill", "2@0.1+2", "--eval-tokens", "512", "--dash", "--dash-port", "0", "--out", str(run)]
    process = subprocess.Popen(
        [sys.executable, "-m", "atoll", "train", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    found = re.search(r"http://\S+", process.stderr.readline())
    assert found is not None
    yield process, run, found[0]
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)


@pytest.mark.long
def test_page_follows_kill_pause_syncer_restart_and_drain(job, visit):
    process, run, url = job
    page = visit(url, allow=CONNECTION_ERRORS + "|status of 503")
    expect(card(page, 1)).to_contain_text("training")
    expect(card(page, 2)).to_contain_text("lost")
    expect(card(page, 1)).to_contain_text("training")
    expect(card(page, 2)).to_contain_text("training")

    page.locator("[data-control=pause]").click()
    page.get_by_role("dialog").get_by_role("button", name="Yes, pause").click()
    expect(card(page, 1)).to_contain_text("paused")
    page.locator("[data-control=resume]").click()
    page.get_by_role("dialog").get_by_role("button", name="Yes, resume").click()
    expect(card(page, 1)).to_contain_text("training")

    os.kill(int((run / "store" / "lock").read_text()), signal.SIGKILL)
    expect(card(page, 3)).to_contain_text("disconnected")
    expect(page.locator("#now-0 .under")).to_contain_text("epoch 2")
    expect(card(page, 3)).to_contain_text("training")

    page.locator("#controls select").select_option("1")
    page.locator("[data-control=drain]").click()
    page.get_by_role("dialog").get_by_role("button", name="Yes, drain").click()
    expect(card(page, 1)).to_contain_text("left")
    found = read_address_file(run)
    assert found is not None
    # On a busy machine the run is far from the end of its budget.
    send_request(found.address, found.token, "POST", "/v1/finish", LIMIT_S)
    assert process.wait(LIMIT_S) == 0
    assert (run / "report.json").is_file()
