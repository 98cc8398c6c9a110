"""The page in a real browser, on invented runs: what it shows, how it is travelled, what it does when cut off."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from atoll.chaos import netns
from tests.dashboard.fake_dashboard import FakeDashboard
from tests.dashboard.fake_run import FakeRun
from tests.dashboard.page_helpers import NO_ANSWER, card, figure, settled, timeline, timeline_state, until

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright")
expect = playwright.expect


@pytest.fixture
def dash(serve):
    return serve(FakeDashboard(FakeRun(now=60.0)))


@pytest.mark.long
def test_network_interfaces_that_come_and_go_do_not_end_requests_of_the_page(dash, visit, machine_network):
    """As tests with links in the kernel and other programs add and remove them."""
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


def test_one_look_says_that_the_run_is_well(dash, visit):
    page = visit(dash.url)
    expect(page.locator("#verdict")).to_contain_text("Well")
    expect(page.locator("#verdict")).to_contain_text("4 of 4 islands alive")
    expect(figure(page, "goodput")).to_contain_text("%")
    shown = dash.runs[0].picture(None)["headline"]
    expect(figure(page, "counts").locator("b")).to_have_text(["4", "4", f"{shown['merged']:.2g}"])
    expect(page.locator("#now-0 .card")).to_have_count(4)
    expect(card(page, 1)).to_contain_text("training")
    expect(page.locator("#notices > *")).to_have_count(0)
    assert "Well" in page.title()


def test_what_is_derived_says_so(serve, visit):
    dash = serve(FakeDashboard(FakeRun(now=60.0, derived=True)))
    page = visit(dash.url)
    expect(figure(page, "goodput")).to_contain_text("derived")
    expect(card(page, 1).locator(".goodput")).to_contain_text("derived")
    dash.change(derived=False)
    expect(figure(page, "goodput")).not_to_contain_text("derived")
    expect(card(page, 1).locator(".goodput")).not_to_contain_text("derived")


def test_an_island_dies_and_training_goes_on(dash, visit):
    page = visit(dash.url)
    expect(card(page, 3)).to_contain_text("training")
    dash.change(now=75.0)
    expect(card(page, 3)).to_contain_text("gone")
    expect(card(page, 3).locator(".letter")).to_have_text("G")
    expect(card(page, 3)).to_contain_text("connection closed: its process ended")
    expect(card(page, 3).locator(".words")).to_contain_text("SIGKILL: step 151")
    expect(card(page, 1)).to_contain_text("training")
    expect(page.locator(".notice[data-kind=alert]")).to_contain_text("learner 3 is gone")
    expect(page.locator("#verdict")).to_contain_text("Look here")
    page.locator(".notice[data-kind=alert]").get_by_role("button", name="Story").click()
    expect(page.locator("#story .lines")).to_contain_text("killed by SIGKILL")
    dash.change(now=110.0)
    expect(card(page, 3)).to_contain_text("training")
    expect(page.locator(".notice")).to_have_count(0)
    expect(page.locator("#verdict")).to_contain_text("Well")


def test_every_state_has_a_letter_a_word_and_a_sentence(serve, visit):
    dash = serve(FakeDashboard(FakeRun(learners=64, horizon=2000.0, now=1999.0)))
    page = visit(dash.url)
    expect(page.locator("#now-0 .card")).to_have_count(64)
    states = set(page.locator("#now-0 .card").evaluate_all("all => all.map((some) => some.dataset.island)"))
    assert {"training", "left", "quarantined"} <= states
    for state in states:
        button = page.locator("#now-0 .filter").filter(has_text=state)
        expect(button.locator(".letter")).to_have_text(state[0].upper())
        assert button.get_attribute("title")
    page.locator("#now-0 .filter").filter(has_text="quarantined").click()
    count = sum(island.state(1999.0)[0] == "quarantined" for island in dash.runs[0].islands)
    expect(page.locator("#now-0 .card:visible")).to_have_count(count)


def test_what_is_not_known_is_a_dash_and_never_a_zero(serve, visit):
    dash = serve(FakeDashboard(FakeRun(unknown=True, learners=0, fragments=0, rounds=0, now=0.0)))
    page = visit(dash.url)
    expect(figure(page, "loss").locator("b")).to_have_text("–")
    expect(figure(page, "counts").locator("b")).to_have_text(["–", "–", "–"])
    expect(page.locator("#now-0")).to_contain_text("No island has said hello yet")
    expect(page.locator("#fragments-0")).to_contain_text("No fragment has a version yet")


@pytest.mark.long
def test_an_update_leaves_focus_selection_and_scroll_alone(dash, visit):
    page = visit(dash.url, height=500)
    card(page, 2).get_by_role("button").focus()
    page.evaluate("window.scrollTo(0, 300); window.held = document.activeElement")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#ledger-0 h2'))")
    dash.change(now=75.0)
    expect(card(page, 3)).to_contain_text("gone")
    assert page.evaluate("[document.activeElement === window.held, String(getSelection())]") == [True, "Ledger"]


@pytest.mark.long
def test_a_picture_in_which_nothing_changed_touches_nothing(dash, visit):
    page = visit(dash.url)
    expect(page.locator("#now-0 .card")).to_have_count(4)
    until(page, "document.querySelector('.range')?.textContent.includes(' to ')")  # the timeline is drawn
    page.evaluate("""() => {
        window.touched = [];
        const near = (target) => (target.closest ? target : target.parentElement);
        const outside = ({target}) => !near(target).closest(".uplot, canvas, #curves");
        const names = (all) => all.filter(outside).map((one) => one.target.className || one.target.nodeName);
        const note = (all) => window.touched.push(...names(all));  // curves may still be loading
        const everything = {subtree: true, childList: true, characterData: true, attributes: true};
        new MutationObserver(note).observe(document.getElementById("columns"), everything);
        window.before = atollPage.renders;
    }""")
    dash.change()
    until(page, "atollPage.renders > window.before")
    assert page.evaluate("window.touched") == []
    dash.change(now=61.0)
    until(page, "window.touched.length > 0")


# --------------------------------------------------------------------------------------------------------------------
# Timeline


def test_the_timeline_tells_what_is_under_the_cursor(dash, visit):
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
def test_the_timeline_is_zoomed_by_drag_wheel_and_keys(dash, visit):
    dash.change(now=100.0)
    page = visit(dash.url)
    plot = timeline(page)
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 600, box["y"] + 80, steps=3)
    page.mouse.up()
    until(page, "atollPage.columns[0].parts.timeline.zoom !== null")
    dragged = timeline_state(page)["view"]
    assert 0 < dragged["from"] < dragged["to"] < 100
    span = dragged["to"] - dragged["from"]
    plot.focus()
    page.mouse.wheel(0, -100)
    until(page, f"atollPage.columns[0].parts.timeline.zoom.to - atollPage.columns[0].parts.timeline.zoom.from < {span}")
    page.keyboard.press("0")
    assert timeline_state(page)["zoomed"] is False
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    moved = timeline_state(page)["view"]
    assert moved["from"] > 15.0
    page.keyboard.press("n")
    expect(page.locator("#said")).not_to_have_text("")
    until(page, "atollPage.columns[0].parts.timeline.detail")
    asked = [path for path in dash.requests if "/timeline?" in path and "from=" in path]
    assert asked, "a zoomed view asks for finer data"


@pytest.mark.long
def test_the_page_scrolls_over_a_timeline_that_nobody_chose(dash, visit):
    page = visit(dash.url, height=400)
    plot = timeline(page)
    plot.hover()
    page.mouse.wheel(0, 120)
    until(page, "scrollY > 0")
    assert timeline_state(page)["zoomed"] is False


def test_events_can_be_read_without_the_canvas(dash, visit):
    dash.change(now=100.0)
    page = visit(dash.url)
    page.get_by_text("Events as text").click()
    expect(page.locator("#timeline-0 .events")).to_contain_text("learner 3: killed. killed by SIGKILL")


def test_64_islands_and_2000_rounds_are_drawn_once_a_frame(serve, visit):
    run = FakeRun(learners=64, rounds=2000, fragments=24, horizon=86400.0, now=86400.0)
    dash = serve(FakeDashboard(run))
    page = visit(dash.url, width=1440)
    timeline(page)
    settled(page)
    drawn = page.evaluate("""() => new Promise((done) => {
        const plot = document.querySelector("#timeline-0 .plot"), {canvas} = atollPage.columns[0].parts.timeline;
        plot.focus();
        requestAnimationFrame(() => {
            const before = canvas.draws;
            const turn = {deltaY: -20, clientX: 700, cancelable: true};
            for (let i = 0; i < 30; i += 1) plot.dispatchEvent(new WheelEvent("wheel", turn));
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
    assert hovered <= 1, "a hover draws the cursor, not the bands"  # one may belong to finer data that arrived


# --------------------------------------------------------------------------------------------------------------------
# Fragments, ledger, curves, story


def test_fragments_say_what_they_wait_for(dash, visit):
    page = visit(dash.url)
    expect(page.locator("#fragments-0 .fragment")).to_have_count(8)
    waiting = next(one for one in dash.runs[0].picture(None)["fragments"] if one["phase"] == "grace")
    cell = page.locator("#fragments-0 .fragment").nth(waiting["fragment"])
    expect(cell).to_contain_text("grace")
    expect(cell).to_contain_text("waits for 4: quorum 1 of 4; waiting 0.8 s more")
    expect(cell).to_contain_text(f"v{waiting['version']}")
    cell.get_by_role("button").click()
    expect(page.locator("#story-title")).to_have_text(f"fragment {waiting['fragment']}")
    expect(page.locator("#story .lines li")).to_have_count(waiting["version"])


def test_a_fragment_that_is_away_with_its_shard_says_so_and_why(serve, visit):
    page = visit(serve(FakeDashboard(FakeRun(unavailable=(3, 7)))).url)
    for number in (3, 7):
        cell = page.locator("#fragments-0 .fragment").nth(number)
        expect(cell.locator(".phase")).to_have_text("× unavailable")
        expect(cell.locator(".reason")).to_have_text("its shard is unavailable: connection reset by peer")
    expect(page.locator('#fragments-0 .fragment[data-phase="unavailable"]')).to_have_count(2)


def test_the_ledger_balances_or_says_so(dash, visit):
    page = visit(dash.url)
    ledger = dash.runs[0].picture(None)["ledger"]
    rows = page.locator("#ledger-0 tbody tr")
    expect(rows).to_have_count(5)
    expect(rows.nth(0)).to_contain_text(f"{ledger['trained']:,}")
    expect(rows.nth(3)).to_contain_text("dropped: learner-lost")
    expect(page.locator("#ledger-0 .balance")).to_contain_text("Balanced")
    dash.change(balanced=False)
    expect(page.locator("#ledger-0 .balance")).to_contain_text("Out of balance")


@pytest.mark.long
def test_curves_are_loaded_when_they_are_looked_at(dash, visit):
    page = visit(dash.url, height=400)
    expect(page.locator("#now-0 .card")).to_have_count(4)
    settled(page)
    assert not [path for path in dash.requests if "series" in path or "vendor/uPlot.iife" in path]
    page.locator("#curves").scroll_into_view_if_needed()
    expect(page.locator("[data-group=loss] .uplot")).to_be_visible()
    label = page.locator("[data-group=loss] .chart").get_attribute("aria-label")
    assert "Loss against time, 5 series" in label


@pytest.mark.long
def test_an_island_that_was_away_leaves_a_gap_in_its_curve(dash, visit):
    dash.change(now=110.0)
    page = visit(dash.url)
    page.locator("#curves").scroll_into_view_if_needed()
    expect(page.locator("[data-group=loss] .uplot")).to_be_visible()
    killed, back = (mark["at"] for mark in dash.runs[0].marks if mark["kind"] in ("killed", "restarted"))
    until(page, f"atollPage.curves.charts.get('loss').plot.data[0].at(-1) > {back}")
    seen = page.evaluate(
        """([from, to]) => {
            const {data} = atollPage.curves.charts.get("loss").plot;
            return [...new Set(data[4].filter((y, i) => data[0][i] > from && data[0][i] < to))];
        }""",
        [killed + 1, back - 1],
    )
    assert seen == [None], "not one place in it that a line could cross"


@pytest.mark.long
def test_curves_against_tokens_on_a_log_scale_smoothed_and_as_a_file(dash, visit):
    page = visit(dash.url, height=1000)
    page.locator("#curves").scroll_into_view_if_needed()
    loss = page.locator("[data-group=loss]")
    expect(loss.locator(".uplot")).to_be_visible()
    page.locator("#curves").get_by_role("button", name="tokens", exact=True).click()
    expect(loss.locator(".chart")).to_have_attribute("aria-label", re.compile("against tokens"))
    page.locator("#curves").get_by_text("log scale").click()
    until(page, "atollPage.curves.charts.get('loss').plot.scales.y.distr === 3")
    before = page.evaluate("atollPage.curves.charts.get('loss').plot.data[2].filter((y) => y != null).slice(0, 30)")
    page.locator("#curves input[type=range]").fill("0.9")
    until(page, "atollPage.curves.settings.weight === 0.9")
    after = page.evaluate("atollPage.curves.charts.get('loss').plot.data[2].filter((y) => y != null).slice(0, 30)")
    assert before[0] == pytest.approx(after[0])
    assert before != after
    with page.expect_download() as waiting:
        loss.get_by_role("button", name="CSV").click()
    assert waiting.value.suggested_filename == "first-loss.csv"
    assert waiting.value.path().read_text().startswith("name,tokens,value\nloss.published,")
    page.locator("#curves .filters").get_by_role("button", name="cosine").click()
    page.locator("[data-group=cosine]").scroll_into_view_if_needed()
    expect(page.locator("[data-group=cosine] .uplot")).to_be_visible()
    loss.get_by_role("button", name="learner 2").click()
    assert page.evaluate("atollPage.curves.charts.get('loss').plot.series[3].show") is False


def test_a_story_is_filtered_and_its_times_lead_there(dash, visit):
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


def test_travelling_in_time_shows_everything_as_it_was(dash, visit):
    dash.change(now=200.0)
    page = visit(dash.url)
    expect(card(page, 3)).to_contain_text("training")
    page.locator("#travel input").fill("70")
    expect(card(page, 3)).to_contain_text("gone")
    past = page.locator(".notice[data-kind=past]")
    expect(past).to_contain_text("You look into the past: 1:10.0 into the run")
    expect(past).to_contain_text("Fragments and ledger are as of 3\u202fs earlier")
    expect(page.locator("#verdict")).to_contain_text("In the past")
    then = dash.runs[0].picture(70.0)
    expect(page.locator("#ledger-0 tbody tr").first).to_contain_text(f"{then['ledger']['trained']:,}")
    dash.change(now=201.0)
    until(page, "atollPage.columns[0].newest.to === 201")
    settled(page)
    expect(card(page, 3)).to_contain_text("gone")
    assert page.locator("#travel input").input_value() == "70"
    page.keyboard.press("l")
    expect(card(page, 3)).to_contain_text("training")
    expect(past).to_have_count(0)
    page.keyboard.press("[")
    expect(past).to_contain_text("3:18.9 into the run")
    page.keyboard.press("]")
    expect(past).to_have_count(0)


@pytest.mark.long
def test_two_runs_apart_and_side_by_side(serve, visit):
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
    expect(card(page, 3, run=0)).to_contain_text("gone")
    expect(card(page, 3, run=1)).to_contain_text("gone")


# --------------------------------------------------------------------------------------------------------------------
# When something is wrong with what is seen


def test_the_page_says_that_it_is_cut_off_and_comes_back_by_itself(dash, visit):
    page = visit(dash.url, allow=NO_ANSWER)
    expect(card(page, 3)).to_contain_text("training")
    dash.close()
    lost = page.locator(".notice[data-kind=lost]")
    expect(lost).to_contain_text(re.compile(r"What you see is .* old; trying again"))
    expect(page.locator("#verdict")).to_contain_text("Not connected")
    expect(card(page, 3)).to_contain_text("training")
    dash.listen()
    dash.change(now=75.0)
    expect(lost).to_have_count(0)
    expect(card(page, 3)).to_contain_text("gone")
    until(page, "atollPage.columns[0].parts.timeline.using.to === 75")


@pytest.mark.long
def test_a_page_opened_too_early_waits_for_the_server(dash, visit, browser):
    page = visit(dash.url, allow=NO_ANSWER)
    expect(page.locator("#now-0 .card")).to_have_count(4)
    page.route("**/api/**", lambda route: route.abort())
    page.reload()
    expect(page.locator("#verdict")).to_contain_text("Not connected")
    page.unroute_all()
    expect(page.locator("#now-0 .card")).to_have_count(4)


def test_a_tape_that_stands_still_is_called_old(dash, visit):
    page = visit(dash.url)
    expect(page.locator("#verdict")).to_contain_text("Well")
    dash.change(age_s=45.0)
    expect(page.locator(".notice[data-kind=old]")).to_contain_text("What you see is 45 s old")
    expect(page.locator("#verdict")).to_contain_text("Silent")
    dash.change(age_s=0.2, tape_errors=["learner-2-i1.tape: entry 71 is cut off"])
    expect(page.locator(".notice[data-kind=old]")).to_have_count(0)
    expect(page.locator(".notice[data-kind=tape-error]")).to_contain_text("entry 71 is cut off")


@pytest.mark.long
def test_a_long_tape_shows_how_far_it_is_read(dash, visit):
    dash.change(loading=0.43)
    page = visit(dash.url)
    expect(page.locator("#loading")).to_contain_text("Reading the tape: 43")
    expect(page.locator("#verdict")).to_contain_text("Reading")
    until(page, "atollPage.columns[0].parts.timeline.using")
    dash.change(loading=None)
    expect(page.locator("#loading")).to_be_hidden()
    expect(page.locator("#verdict")).to_contain_text("Well")
    until(page, "atollPage.columns[0].parts.timeline.loadedEdition === '60 null'")  # the rest of the tape is drawn too


def test_names_that_attack_stay_text(serve, visit):
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


def test_the_test_notices_what_the_content_policy_forbids(dash, browser):
    """Without this, a page without complaints could be a test that hears none."""
    said = []
    page = browser.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.goto(dash.url)
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<p style=\"color: red\">forbidden</p>')")
    until(page, "document.body.textContent.includes('forbidden')")
    page.close()
    assert any("Content Security Policy" in text for text in said)
