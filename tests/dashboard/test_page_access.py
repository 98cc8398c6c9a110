"""Access to the page: controls, the token, small screens, the keyboard, both themes."""

from __future__ import annotations

import pytest

from tests.dashboard.fake_dashboard import FakeDashboard
from tests.dashboard.fake_run import FakeRun
from tests.dashboard.page_helpers import (
    CONNECTION_ERRORS,
    card,
    find_poor_contrast,
    find_unnamed_controls,
    wait_for_render,
    wait_until,
)

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
expect = playwright.expect


@pytest.fixture
def dash(serve):
    return serve(FakeDashboard(FakeRun(now=60.0)))


# --------------------------------------------------------------------------------------------------------------------
# Controls and the token


def test_controls_are_hidden_without_reachable_syncer(dash, visit):
    page = visit(dash.url)
    expect(page.locator("#now-0 .card")).to_have_count(4)
    expect(page.locator("#controls")).to_be_hidden()
    expect(page.locator("#nav [data-to=controls]")).to_be_hidden()


def test_control_needs_confirmation_and_is_signed(serve, visit):
    dash = serve(FakeDashboard(FakeRun(controls=True, now=60.0), token="open sesame"))
    page = visit(f"{dash.url}#token=open%20sesame", allow=CONNECTION_ERRORS)
    expect(page.locator("#controls")).to_be_visible()
    assert page.evaluate("location.hash") == ""
    page.get_by_label("Signed").fill("Ada")
    page.get_by_role("button", name="Pause", exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("All learners pause after their current step.")
    assert page.evaluate("document.activeElement.textContent") == "No"
    dialog.get_by_role("button", name="No").click()
    expect(dialog).to_be_hidden()
    assert dash.runs[0].done == []
    page.get_by_role("button", name="Pause", exact=True).click()
    dialog.get_by_role("button", name="Yes, pause").click()
    expect(page.locator("#toasts")).to_contain_text("done: All learners pause")
    expect(card(page, 1)).to_contain_text("paused")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    assert [(one["action"], one["requested_by"], one.get("confirmed")) for one in dash.controls] == [
        ("pause", "Ada", None),
        ("pause", "Ada", None),
        ("pause", "Ada", True),
    ]


@pytest.mark.long
def test_update_does_not_overwrite_edited_quorum(serve, visit):
    dash = serve(FakeDashboard(FakeRun(controls=True, now=60.0)))
    page = visit(dash.url, allow=CONNECTION_ERRORS)
    page.get_by_label("Quorum", exact=True).fill("3")
    dash.change(now=61.0)
    wait_until(page, "atollPage.columns[0].newest.to === 61")
    wait_for_render(page)
    expect(page.get_by_label("Quorum", exact=True)).to_have_value("3")
    page.get_by_role("button", name="Set the quorum").click()
    page.get_by_role("dialog").get_by_role("button", name="Yes, quorum").click()
    expect(page.locator("#now-0")).to_contain_text("quorum 3")
    page.get_by_label("Quorum", exact=True).fill("9")
    page.get_by_role("button", name="Set the quorum").click()
    expect(page.locator("#toasts")).to_contain_text("quorum cannot be 9")
    page.locator("#controls select").select_option("3")
    page.get_by_role("button", name="Drain").click()
    expect(page.get_by_role("dialog")).to_contain_text("Learner 3 leaves for good.")
    page.keyboard.press("Escape")
    assert [one["action"] for one in dash.runs[0].done] == ["quorum"]


def test_controls_are_disabled_during_time_travel(serve, visit):
    dash = serve(FakeDashboard(FakeRun(controls=True, now=60.0)))
    page = visit(dash.url)
    expect(page.get_by_role("button", name="Pause", exact=True)).to_be_enabled()
    page.locator("#travel input").fill("30")
    expect(page.get_by_role("button", name="Pause", exact=True)).to_be_disabled()
    expect(page.locator("#controls")).to_contain_text("go back to live first")


def test_page_without_token_requests_it(serve, visit):
    dash = serve(FakeDashboard(FakeRun(now=60.0), token="open sesame"))
    page = visit(dash.url, allow=CONNECTION_ERRORS)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("The run's token")
    page.keyboard.type("open barley")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("The token is not valid")
    page.keyboard.type("open sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#now-0 .card")).to_have_count(4)
    page.reload()
    expect(page.locator("#now-0 .card")).to_have_count(4)
    assert not [path for path in dash.requests if "sesame" in path], "a token is never part of a URL"


# --------------------------------------------------------------------------------------------------------------------
# Small screens, themes, keyboard, contrast


@pytest.mark.long
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("learners", [4, 64])
def test_phone_needs_no_horizontal_scrolling(serve, visit, learners, theme):
    run = FakeRun(learners=learners, now=75.0, controls=True, fragments=24)
    run.log_tail = "x" * 400
    dash = serve(FakeDashboard(run, FakeRun(name="a-very-long-name-of-a-run-" * 5)))
    page = visit(dash.url, width=390, height=844, color_scheme=theme)
    expect(page.locator("#now-0 .card")).to_have_count(learners)
    page.locator("#curves").scroll_into_view_if_needed()
    expect(page.locator("[data-group=loss] .uplot")).to_be_visible()
    for view in ("A", "B", "both"):
        page.locator(f"#switch [data-view={view}]").click()
        wait_for_render(page)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.keyboard.press("s")
    expect(page.locator("#story .lines li").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.long
def test_theme_follows_system_until_selected(dash, visit):
    page = visit(dash.url, color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme-now", "dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("d")
    expect(page.locator("html")).to_have_attribute("data-theme-now", "light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme-now", "light")


def test_keyboard_reaches_everything(dash, visit):
    page = visit(dash.url)
    expect(page.locator("#now-0 .card")).to_have_count(4)
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("story of the whole run")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.keyboard.press("2")
    assert page.evaluate("document.activeElement.className") == "plot"
    page.keyboard.press("s")
    expect(page.locator("#story-title")).to_have_text("the whole run")
    page.keyboard.press("Escape")
    page.keyboard.press("5")
    expect(page.locator("[data-group=loss] .uplot")).to_be_visible()
    unreachable = page.evaluate("""() => [...document.querySelectorAll("button, input, select, a, summary")]
        .filter((some) => some.tabIndex < 0).map((some) => some.outerHTML)""")
    assert unreachable == []
    assert find_unnamed_controls(page) == []


@pytest.mark.long
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_sufficient_contrast(dash, visit, theme):
    page = visit(dash.url, color_scheme=theme)
    dash.change(now=75.0)
    expect(card(page, 3)).to_contain_text("lost")
    assert find_poor_contrast(page) == []
