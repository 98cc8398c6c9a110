"""The page with the real server, on tapes of real cores: a live run, a finished one, a simulated one."""

from __future__ import annotations

import shutil

import pytest

from atoll.cli.main import main
from atoll.core.types import SYNCER
from tests.dashboard.page_helpers import card
from tests.dashboard.threaded_server import RealDashboard
from tests.tiny_run import TinyRun, eventful_run

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
expect = playwright.expect


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return eventful_run().save(tmp_path_factory.mktemp("eventful"))


def extend_run(tiny, run, until_s):
    """Continue the run and replace its tapes by the longer ones."""
    shutil.rmtree(run / "tapes", ignore_errors=True)
    tiny.run_until(until_s).save(run)


def test_live_run_with_kill_and_syncer_restart(serve, visit, tmp_path):
    tiny, run = TinyRun(), tmp_path / "live"
    extend_run(tiny, run, 12.0)
    page = visit(serve(RealDashboard(run)).url)
    expect(card(page, 2)).to_contain_text("training")
    expect(page.locator("#verdict")).not_to_contain_text("Finished")
    tiny.kill(2)
    extend_run(tiny, run, 14.0)
    expect(card(page, 2)).to_contain_text("lost")
    expect(card(page, 1)).to_contain_text("training")
    tiny.start(2)
    extend_run(tiny, run, 20.0)
    expect(card(page, 2)).to_contain_text("training")
    tiny.kill(SYNCER)
    extend_run(tiny, run, 22.0)
    expect(card(page, 1)).to_contain_text("disconnected")
    tiny.start(SYNCER)
    extend_run(tiny, run, 30.0)
    expect(card(page, 1)).to_contain_text("training")
    expect(page.locator("#now-0 .under")).to_contain_text("epoch 2")


def test_time_travel_in_finished_run(serve, visit, finished):
    page = visit(serve(RealDashboard(finished)).url)
    expect(page.locator("#verdict")).to_contain_text("Finished")
    expect(page.locator("#ledger-0 .balance")).to_contain_text("Balanced")
    expect(page.locator("#fragments-0 .fragment")).to_have_count(3)
    page.locator("#travel input").fill("13")
    expect(card(page, 2)).to_contain_text("lost")
    page.locator("#travel input").fill("21")
    expect(card(page, 1)).to_contain_text("disconnected")
    expect(page.locator("#now-0 .under")).to_contain_text("syncer down")
    card(page, 2).get_by_role("button").click()
    expect(page.locator("#story .lines li").first).to_be_visible()
    page.locator("#story input").fill("adopted version")
    expect(page.locator("#story .lines li").first).to_contain_text("adopted version")
    page.keyboard.press("Escape")
    page.locator("#curves").scroll_into_view_if_needed()
    expect(page.locator("[data-group=merges] .uplot")).to_be_visible()


@pytest.mark.long
def test_two_real_runs_side_by_side(serve, visit, finished, tmp_path):
    other = TinyRun(learners=2).run_until(9.0).save(tmp_path / "other")
    page = visit(serve(RealDashboard(finished, other)).url, width=1440)
    expect(page.locator("#now-0 .card")).to_have_count(3)
    page.locator("#switch").get_by_role("button", name="both").click()
    expect(page.locator("#now-1 .card")).to_have_count(2)
    page.locator("#curves").scroll_into_view_if_needed()
    expect(page.locator("[data-group=merges] .series")).to_contain_text("other: ")


@pytest.mark.long
def test_simulated_tape(serve, visit, tmp_path):
    run = tmp_path / "simulated"
    arguments = [
        "simulate",
        "--learners",
        "3",
        "--chips",
        "600000",
        "--days",
        "0.005",
        "--seed",
        "4",
        "--tape",
        str(run),
    ]
    assert main(arguments) == 0
    page = visit(serve(RealDashboard(run)).url)
    expect(page.locator("#now-0 .card")).to_have_count(3)
    expect(page.locator("#verdict")).to_contain_text(
        "Finished"
    )  # then the whole tape is read and the slider has its full range
    expect(page.locator("#travel .live")).to_contain_text("end")
    page.locator("#travel input").fill("60")
    expect(page.locator(".notice[data-kind=past]")).to_contain_text("1:00.0 into the run")
    expect(card(page, 1)).to_contain_text("training")


def test_page_with_token_needs_token(serve, visit, finished):
    dash = serve(RealDashboard(finished, token="four words of sense"))
    page = visit(dash.url, allow="status of 401")
    expect(page.get_by_role("dialog")).to_contain_text("The run's token")
    other = visit(f"{dash.url}#token=four%20words%20of%20sense")
    expect(other.locator("#now-0 .card")).to_have_count(3)
    assert other.evaluate("location.href") == dash.url
