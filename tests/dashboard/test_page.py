"""The page in a real browser, on generated runs: what it shows, time travel, lost connections."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from atoll.chaos import netns
from tests.dashboard.fake_dashboard import FakeDashboard
from tests.dashboard.fake_run import FakeRun
from tests.dashboard.page_helpers import (
    CONNECTION_ERRORS,
    card,
    metric,
    timeline,
    timeline_state,
    wait_for_render,
    wait_until,
)

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
expect = playwright.expect


@pytest.fixture
def dash(serve):
    return serve(FakeDashboard(FakeRun(now=60.0)))


@pytest.mark.long
def test_changing_network_interfaces_do_not_abort_requests(dash, visit, machine_network):
    """Other tests and programs add and remove interfaces at the same time."""
    if netns.unavailable_reason() is not None:
        pytest.skip(f"no network namespaces: {netns.unavailable_reason()}")
    page, loaded = visit(dash.url), threading.Event()

    def change() -> None:
        netns.enter_namespace(machine_network)
        name = f"at{os.getpid():06x}p"
        while not loaded.is_set():
            netns.run_command("ip", "link", "add", name, "type", "veth")
            netns.run_command("ip", "addr", "add", "198.18.1.1/32", "dev", name)
            netns.run_command("ip", "link", "set", name, "up")
            netns.run_command("ip", "link", "del", name)

    with ThreadPoolExecutor() as pool:
        changing = pool.submit(change)
        try:
            for _ in range(10):
                page.reload()
                expect(page.locator("#now-0 .card")).to_have_count(4)
        finally:
            loaded.set()
        changing.result()


# --------------------------------------------------------------------------------------------------------------------
# Now


def test_page_shows_healthy_run(dash, visit):
    page = visit(dash.url)
    expect(page.locator("#verdict")).to_contain_text("Healthy")
    expect(page.locator("#verdict")).to_contain_text("4 of 4 islands alive")
    expect(metric(page, "goodput")).to_contain_text("%")
    shown = dash.runs[0].status(None)["headline"]
    expect(metric(page, "counts").locator("b")).to_have_text(["4", "4", f"{shown['merged']:.2g}"])
    expect(page.locator("#now-0 .card")).to_have_count(4)
    expect(card(page, 1)).to_contain_text("training")
    expect(page.locator("#notices > *")).to_have_count(0)
    assert "Healthy" in page.title()


def test_derived_values_are_marked(serve, visit):
    dash = serve(FakeDashboard(FakeRun(now=60.0, derived=True)))
    page = visit(dash.url)
    expect(metric(page, "goodput")).to_contain_text("derived")
    expect(card(page, 1).locator(".goodput")).to_contain_text("derived")
    dash.change(derived=False)
    expect(metric(page, "goodput")).not_to_contain_text("derived")
    expect(card(page, 1).locator(".goodput")).not_to_contain_text("derived")


def test_killed_learner_is_shown_as_lost_until_it_returns(dash, visit):
    page = visit(dash.url)
    expect(card(page, 3)).to_contain_text("training")
    dash.change(now=75.0)
    expect(card(page, 3)).to_contain_text("lost")
    expect(card(page, 3).locator(".letter")).to_have_text("X")
    expect(card(page, 3)).to_contain_text("connection closed: its process ended")
    expect(card(page, 3).locator(".words")).to_contain_text("SIGKILL: step 151")
    expect(card(page, 1)).to_contain_text("training")
    expect(page.locator(".notice[data-kind=alert]")).to_contain_text("learner 3 is lost")
    expect(page.locator("#verdict")).to_contain_text("Warning")
    page.locator(".notice[data-kind=alert]").get_by_role("button", name="Story").click()
    expect(page.locator("#story .lines")).to_contain_text("killed by SIGKILL")
    dash.change(now=110.0)
    expect(card(page, 3)).to_contain_text("training")
    expect(page.locator(".notice")).to_have_count(0)
    expect(page.locator("#verdict")).to_contain_text("Healthy")


def test_every_state_has_letter_name_and_meaning(serve, visit):
    dash = serve(FakeDashboard(FakeRun(learners=64, horizon=2000.0, now=1999.0)))
    page = visit(dash.url)
    expect(page.locator("#now-0 .card")).to_have_count(64)
    states = set(page.locator("#now-0 .card").evaluate_all("all => all.map((some) => some.dataset.island)"))
    assert {"training", "left", "quarantined"} <= states
    labels = {"training": "training", "gone": "lost", "alone": "disconnected", "recovering": "joining"}
    letters = {"lost": "X"}
    for state in states:
        label = labels.get(state, state)
        button = page.locator("#now-0 .filter").filter(has_text=label)
        expect(button.locator(".letter")).to_have_text(letters.get(label, label[0].upper()))
        assert button.get_attribute("title")
    page.locator("#now-0 .filter").filter(has_text="quarantined").click()
    count = sum(island.state(1999.0)[0] == "quarantined" for island in dash.runs[0].islands)
    expect(page.locator("#now-0 .card:visible")).to_have_count(count)


def test_unknown_values_are_dashes(serve, visit):
    dash = serve(FakeDashboard(FakeRun(unknown=True, learners=0, fragments=0, rounds=0, now=0.0)))
    page = visit(dash.url)
    expect(metric(page, "loss").locator("b")).to_have_text("–")
    expect(metric(page, "counts").locator("b")).to_have_text(["–", "–", "–"])
    expect(page.locator("#now-0")).to_contain_text("No island has joined yet")
    expect(page.locator("#fragments-0")).to_contain_text("No fragment has a version yet")


@pytest.mark.long
def test_update_keeps_focus_and_selection(dash, visit):
    page = visit(dash.url, height=500)
    card(page, 2).get_by_role("button").focus()
    page.evaluate("window.scrollTo(0, 300); window.focused = document.activeElement")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#ledger-0 h2'))")
    dash.change(now=75.0)
    expect(card(page, 3)).to_contain_text("lost")
    assert page.evaluate("[document.activeElement === window.focused, String(getSelection())]") == [True, "Ledger"]


@pytest.mark.long
def test_unchanged_status_changes_no_node(dash, visit):
    page = visit(dash.url)
    expect(page.locator("#now-0 .card")).to_have_count(4)
    wait_until(page, "document.querySelector('.range')?.textContent.includes(' to ')")  # wait for the timeline
    page.evaluate("""() => {
        window.changed = [];
        const elementOf = (target) => (target.closest ? target : target.parentElement);
        const outside = ({target}) => !elementOf(target).closest(".uplot, canvas, #curves");
        const names = (all) => all.filter(outside).map((one) => one.target.className || one.target.nodeName);
        const note = (all) => window.changed.push(...names(all));  // curves may still be loading
        const everything = {subtree: true, childList: true, characterData: true, attributes: true};
        new MutationObserver(note).observe(document.getElementById("columns"), everything);
        window.before = atollPage.renders;
    }""")
    dash.change()
    wait_until(page, "atollPage.renders > window.before")
    assert page.evaluate("window.changed") == []
    dash.change(now=61.0)
    wait_until(page, "window.changed.length > 0")


# --------------------------------------------------------------------------------------------------------------------
# Timeline


def test_timeline_tooltip_describes_point_under_cursor(dash, visit):
    dash.change(now=100.0)
    page = visit(dash.url)
    plot = timeline(page)
    place = page.evaluate("""() => { const {canvas, view} = {canvas: atollPage.columns[0].parts.timeline.canvas,
        view: atollPage.columns[0].parts.timeline.view()};
        return {x: canvas.x(67.2, view), y: canvas.y(2) + 5}; }""")
    plot.hover(position=place)
    expect(plot.locator(".tip")).to_contain_text("learner 3")
    expect(plot.locator(".tip")).to_contain_text("killed by SIGKILL")
    assert "Arrow keys move" in (plot.get_attribute("aria-label") or "")
    plot.click(position=place)
    expect(page.locator("#story-title")).to_have_text("learner 3")


@pytest.mark.long
def test_timeline_zooms_by_drag_wheel_and_keys(dash, visit):
    dash.change(now=100.0)
    page = visit(dash.url)
    plot = timeline(page)
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 600, box["y"] + 80, steps=3)
    page.mouse.up()
    wait_until(page, "atollPage.columns[0].parts.timeline.zoom !== null")
    dragged = timeline_state(page)["view"]
    assert 0 < dragged["from"] < dragged["to"] < 100
    span = dragged["to"] - dragged["from"]
    plot.focus()
    page.mouse.wheel(0, -100)
    zoom = "atollPage.columns[0].parts.timeline.zoom"
    wait_until(page, f"{zoom}.to - {zoom}.from < {span}")
    page.keyboard.press("0")
    assert timeline_state(page)["zoomed"] is False
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    moved = timeline_state(page)["view"]
    assert moved["from"] > 15.0
    page.keyboard.press("n")
    expect(page.locator("#announcement")).not_to_have_text("")
    wait_until(page, "atollPage.columns[0].parts.timeline.detail")
    paths = [path for path in dash.requests if "/timeline?" in path and "from=" in path]
    assert paths, "a zoomed view asks for finer data"


@pytest.mark.long
def test_wheel_scrolls_page_if_timeline_has_no_focus(dash, visit):
    page = visit(dash.url, height=400)
    plot = timeline(page)
    plot.hover()
    page.mouse.wheel(0, 120)
    wait_until(page, "scrollY > 0")
    assert timeline_state(page)["zoomed"] is False


def test_events_are_available_as_text(dash, visit):
    dash.change(now=100.0)
    page = visit(dash.url)
    page.get_by_text("Events as text").click()
    expect(page.locator("#timeline-0 .events")).to_contain_text("learner 3: killed. killed by SIGKILL")


def test_64_islands_and_2000_rounds_are_drawn_once_per_frame(serve, visit):
    run = FakeRun(learners=64, rounds=2000, fragments=24, horizon=86400.0, now=86400.0)
    dash = serve(FakeDashboard(run))
    page = visit(dash.url, width=1440)
    timeline(page)
    wait_for_render(page)
    drawn = page.evaluate("""() => new Promise((done) => {
        const plot = document.querySelector("#timeline-0 .plot"), {canvas} = atollPage.columns[0].parts.timeline;
        plot.focus();
        requestAnimationFrame(() => {
            const before = canvas.draws;
            const wheel = {deltaY: -20, clientX: 700, cancelable: true};
            for (let i = 0; i < 30; i += 1) plot.dispatchEvent(new WheelEvent("wheel", wheel));
            requestAnimationFrame(() => requestAnimationFrame(() => done(canvas.draws - before)));
        });
    })""")
    assert drawn in (1, 2)
    hovered = page.evaluate("""() => new Promise((done) => {
        const plot = document.querySelector("#timeline-0 .plot"), {canvas} = atollPage.columns[0].parts.timeline;
        const before = canvas.draws;
        for (let i = 0; i < 30; i += 1)
            plot.dispatchEvent(new PointerEvent("pointermove", {clientX: 400 + i, clientY: 300}));
        requestAnimationFrame(() => requestAnimationFrame(() => done(canvas.draws - before)));
    })""")
    assert hovered <= 1, "a hover draws the cursor, not the bands"  # one draw may belong to new detail data


# --------------------------------------------------------------------------------------------------------------------
# Fragments, ledger, curves, story


def test_fragment_shows_what_it_waits_for(dash, visit):
    page = visit(dash.url)
    expect(page.locator("#fragments-0 .fragment")).to_have_count(8)
    fragment = next(one for one in dash.runs[0].status(None)["fragments"] if one["phase"] == "grace")
    cell = page.locator("#fragments-0 .fragment").nth(fragment["fragment"])
    expect(cell).to_contain_text("grace")
    expect(cell).to_contain_text("waiting for 4: quorum 1 of 4; waiting 0.8 s more")
    expect(cell).to_contain_text(f"v{fragment['version']}")
    cell.get_by_role("button").click()
    expect(page.locator("#story-title")).to_have_text(f"fragment {fragment['fragment']}")
    expect(page.locator("#story .lines li")).to_have_count(fragment["version"])


def test_unavailable_fragment_shows_reason(serve, visit):
    page = visit(serve(FakeDashboard(FakeRun(unavailable=(3, 7)))).url)
    for number in (3, 7):
        cell = page.locator("#fragments-0 .fragment").nth(number)
        expect(cell.locator(".phase")).to_have_text("× unavailable")
        expect(cell.locator(".reason")).to_have_text("its shard is unavailable: connection reset by peer")
    expect(page.locator('#fragments-0 .fragment[data-phase="unavailable"]')).to_have_count(2)


def test_ledger_shows_whether_it_balances(dash, visit):
    page = visit(dash.url)
    ledger = dash.runs[0].status(None)["ledger"]
    rows = page.locator("#ledger-0 tbody tr")
    expect(rows).to_have_count(5)
    expect(rows.nth(0)).to_contain_text(f"{ledger['trained']:,}")
    expect(rows.nth(3)).to_contain_text("dropped: learner-lost")
    expect(page.locator("#ledger-0 .balance")).to_contain_text("Balanced")
    dash.change(balanced=False)
    expect(page.locator("#ledger-0 .balance")).to_contain_text("Out of balance")


@pytest.mark.long
def test_curves_are_loaded_when_visible(dash, visit):
    page = visit(dash.url, height=400)
    expect(page.locator("#now-0 .card")).to_have_count(4)
    wait_for_render(page)
    assert not [path for path in dash.requests if "series" in path or "vendor/uPlot.iife" in path]
    page.locator("#curves").scroll_into_view_if_needed()
    expect(page.locator("[data-group=loss] .uplot")).to_be_visible()
    label = page.locator("[data-group=loss] .chart").get_attribute("aria-label")
    assert "Loss against time, 5 series" in label


@pytest.mark.long
def test_lost_learner_leaves_gap_in_curve(dash, visit):
    dash.change(now=110.0)
    page = visit(dash.url)
    page.locator("#curves").scroll_into_view_if_needed()
    expect(page.locator("[data-group=loss] .uplot")).to_be_visible()
    killed, restarted = (mark["at"] for mark in dash.runs[0].marks if mark["kind"] in ("killed", "restarted"))
    wait_until(page, f"atollPage.curves.charts.get('loss').plot.data[0].at(-1) > {restarted}")
    seen = page.evaluate(
        """([from, to]) => {
            const {data} = atollPage.curves.charts.get("loss").plot;
            return [...new Set(data[4].filter((y, i) => data[0][i] > from && data[0][i] < to))];
        }""",
        [killed + 1, restarted - 1],
    )
    assert seen == [None], "a line could cross the gap"


@pytest.mark.long
def test_curves_over_tokens_log_scale_smoothing_and_download(dash, visit):
    page = visit(dash.url, height=1000)
    page.locator("#curves").scroll_into_view_if_needed()
    loss = page.locator("[data-group=loss]")
    expect(loss.locator(".uplot")).to_be_visible()
    page.locator("#curves").get_by_role("button", name="tokens", exact=True).click()
    expect(loss.locator(".chart")).to_have_attribute("aria-label", re.compile("against tokens"))
    page.locator("#curves").get_by_text("log scale").click()
    wait_until(page, "atollPage.curves.charts.get('loss').plot.scales.y.distr === 3")
    before = page.evaluate("atollPage.curves.charts.get('loss').plot.data[2].filter((y) => y != null).slice(0, 30)")
    page.locator("#curves input[type=range]").fill("0.9")
    wait_until(page, "atollPage.curves.settings.weight === 0.9")
    after = page.evaluate("atollPage.curves.charts.get('loss').plot.data[2].filter((y) => y != null).slice(0, 30)")
    assert before[0] == pytest.approx(after[0])
    assert before != after
    with page.expect_download() as download:
        loss.get_by_role("button", name="CSV").click()
    assert download.value.suggested_filename == "first-loss.csv"
    assert download.value.path().read_text().startswith("name,tokens,value\nloss.published,")
    page.locator("#curves .filters").get_by_role("button", name="cosine").click()
    page.locator("[data-group=cosine]").scroll_into_view_if_needed()
    expect(page.locator("[data-group=cosine] .uplot")).to_be_visible()
    loss.get_by_role("button", name="learner 2").click()
    assert page.evaluate("atollPage.curves.charts.get('loss').plot.series[3].show") is False


def test_story_is_filtered_and_times_travel(dash, visit):
    dash.change(now=110.0)
    page = visit(dash.url)
    opener = card(page, 3).get_by_role("button")
    opener.focus()
    page.keyboard.press("Enter")
    lines = page.locator("#story .lines li")
    expect(lines).to_have_count(3)
    page.keyboard.press("/")
    page.keyboard.type("sigkill")
    expect(lines).to_have_count(1)
    dash.change(now=111.0)
    expect(page.locator("#story input")).to_have_value("sigkill")
    lines.get_by_role("button").click()
    expect(page.locator(".notice[data-kind=past]")).to_contain_text("1:07.2 into the run")
    page.keyboard.press("Escape")
    expect(page.locator("#story")).to_be_hidden()
    assert page.evaluate("document.activeElement.textContent") == "learner 3"


# --------------------------------------------------------------------------------------------------------------------
# Time travel, two runs


def test_time_travel_shows_earlier_state(dash, visit):
    dash.change(now=200.0)
    page = visit(dash.url)
    expect(card(page, 3)).to_contain_text("training")
    page.locator("#travel input").fill("70")
    expect(card(page, 3)).to_contain_text("lost")
    past = page.locator(".notice[data-kind=past]")
    expect(past).to_contain_text("Time travel: 1:10.0 into the run")
    expect(past).to_contain_text("Fragments and ledger are from 3\u202fs earlier")
    expect(page.locator("#verdict")).to_contain_text("Time travel")
    then = dash.runs[0].status(70.0)
    expect(page.locator("#ledger-0 tbody tr").first).to_contain_text(f"{then['ledger']['trained']:,}")
    dash.change(now=201.0)
    wait_until(page, "atollPage.columns[0].newest.to === 201")
    wait_for_render(page)
    expect(card(page, 3)).to_contain_text("lost")
    assert page.locator("#travel input").input_value() == "70"
    page.keyboard.press("l")
    expect(card(page, 3)).to_contain_text("training")
    expect(past).to_have_count(0)
    page.keyboard.press("[")
    expect(past).to_contain_text("3:18.9 into the run")
    page.keyboard.press("]")
    expect(past).to_have_count(0)


@pytest.mark.long
def test_two_runs_separately_and_side_by_side(serve, visit):
    other = FakeRun(name="second", seed=7, live=False, now=240.0, learners=3)
    dash = serve(FakeDashboard(FakeRun(), other))
    page = visit(dash.url, width=1440, height=1200)
    expect(page.locator("#now-0")).to_be_visible()
    expect(page.locator("#now-1")).to_be_hidden()
    page.keyboard.press("v")
    expect(page.locator("#title")).to_have_text("second")
    expect(page.locator("#verdict")).to_contain_text("Finished")
    page.locator("#switch").get_by_role("button", name="both").click()
    expect(page.locator("#now-0")).to_be_visible()
    expect(page.locator("#now-1 .card")).to_have_count(3)
    boxes = [page.locator(f"#timeline-{run}").bounding_box() for run in (0, 1)]
    assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
    page.locator("#curves").scroll_into_view_if_needed()
    expect(page.locator("[data-group=loss] .series")).to_contain_text("second: learner 1")
    label = page.locator("[data-group=loss] .chart")
    expect(label).to_have_attribute("aria-label", re.compile("9 series"))
    page.locator("#travel input").fill("70")
    expect(card(page, 3, run=0)).to_contain_text("lost")
    expect(card(page, 3, run=1)).to_contain_text("lost")


# --------------------------------------------------------------------------------------------------------------------
# Lost connections, old data, hostile text


def test_page_reports_lost_connection_and_reconnects(dash, visit):
    page = visit(dash.url, allow=CONNECTION_ERRORS)
    expect(card(page, 3)).to_contain_text("training")
    dash.close()
    lost = page.locator(".notice[data-kind=lost]")
    expect(lost).to_contain_text(re.compile(r"The data is .* old; retrying"))
    expect(page.locator("#verdict")).to_contain_text("Not connected")
    expect(card(page, 3)).to_contain_text("training")
    dash.listen()
    dash.change(now=75.0)
    expect(lost).to_have_count(0)
    expect(card(page, 3)).to_contain_text("lost")
    wait_until(page, "atollPage.columns[0].parts.timeline.using.to === 75")


@pytest.mark.long
def test_page_waits_for_server(dash, visit, browser):
    page = visit(dash.url, allow=CONNECTION_ERRORS)
    expect(page.locator("#now-0 .card")).to_have_count(4)
    page.route("**/api/**", lambda route: route.abort())
    page.reload()
    expect(page.locator("#verdict")).to_contain_text("Not connected")
    page.unroute_all()
    expect(page.locator("#now-0 .card")).to_have_count(4)


def test_page_reports_old_data_and_tape_errors(dash, visit):
    page = visit(dash.url)
    expect(page.locator("#verdict")).to_contain_text("Healthy")
    dash.change(age_s=45.0)
    expect(page.locator(".notice[data-kind=old]")).to_contain_text("The data is 45 s old")
    expect(page.locator("#verdict")).to_contain_text("No data")
    dash.change(age_s=0.2, tape_errors=["learner-2-i1.tape: entry 71 is cut off"])
    expect(page.locator(".notice[data-kind=old]")).to_have_count(0)
    expect(page.locator(".notice[data-kind=tape-error]")).to_contain_text("entry 71 is cut off")


@pytest.mark.long
def test_page_shows_reading_progress_of_long_tape(dash, visit):
    dash.change(loading=0.43)
    page = visit(dash.url)
    expect(page.locator("#loading")).to_contain_text("Reading tapes: 43")
    expect(page.locator("#verdict")).to_contain_text("Reading")
    wait_until(page, "atollPage.columns[0].parts.timeline.using")
    dash.change(loading=None)
    expect(page.locator("#loading")).to_be_hidden()
    expect(page.locator("#verdict")).to_contain_text("Healthy")
    # The timeline has the rest of the tape too.
    wait_until(page, "atollPage.columns[0].parts.timeline.loadedEdition === '60 null'")


def test_hostile_names_stay_text(serve, visit):
    attack = "<img src=x onerror=document.title='taken'>"
    alert = {"rule": attack, "severity": "critical", "since": 1.0, "subject": attack, "text": f"alert {attack}"}
    run = FakeRun(name=attack, now=75.0, log_tail=f"</pre>{attack}", alerts=[alert])
    run.marks.append({"at": 70.0, "subject": attack, "kind": attack, "text": attack})
    dash = serve(FakeDashboard(run, FakeRun(name=f"B {attack}")))
    page = visit(dash.url)
    expect(page.locator("#title")).to_have_text(attack)
    expect(page.locator(".notice").first).to_contain_text(f"alert {attack}")
    expect(card(page, 3).locator(".words")).to_have_text(f"</pre>{attack}")
    page.get_by_text("Events as text").first.click()
    expect(page.locator("#timeline-0 .events")).to_contain_text(attack)
    page.keyboard.press("s")
    expect(page.locator("#story .lines")).to_contain_text(attack)
    assert page.locator("img[src=x]").count() == 0
    assert "taken" not in page.title().replace(attack, "")


def test_console_reports_content_policy_violation(dash, browser):
    """Otherwise a test could pass because it receives no console messages."""
    texts = []
    page = browser.new_page()
    page.on("console", lambda message: texts.append(message.text))
    page.goto(dash.url)
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<p style=\"color: red\">forbidden</p>')")
    wait_until(page, "document.body.textContent.includes('forbidden')")
    page.close()
    assert any("Content Security Policy" in text for text in texts)
