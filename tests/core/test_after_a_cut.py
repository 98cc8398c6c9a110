"""Effects of a temporary link failure on the other learners, taken from recorded tapes."""

from __future__ import annotations

from atoll.core.protocol import Contribution, MergeRound, OpenGrace, Pull
from atoll.core.types import RunConfig
from tests.core.harness import FakeLearner, SyncerHarness


def _rounds(harness: SyncerHarness, fakes: list[FakeLearner], steps: range, silent: FakeLearner | None = None) -> None:
    """Take steps of one second each. All learners reply immediately, except silent ones."""
    active = [fake for fake in fakes if fake is not silent]
    for step in steps:
        for fake in active:
            fake.reports(float(step), step)
        for fake in active:
            for fragment in list(fake.pulls):
                fake.contributes(step + 0.1, fragment)
                del fake.pulls[fragment]
        harness.fire_timers(step + 0.2)
        while any(isinstance(effect, MergeRound) for effect in harness.awaited):
            harness.merges_and_persists(step + 0.2)
        for fake in active:
            fake.acknowledges(step + 0.3)


def test_one_broken_connection_does_not_end_the_grace_of_others():
    """(1) The link of a learner fails while a version is in flight, (2) its acknowledgement arrives seconds later,
    (3) measured as sync time it would leave no slack, (4) and merges would contain only the first contribution."""
    harness = SyncerHarness(RunConfig(fragments=4, every_steps=4, overlap_steps=1, grace_margin=0.9))
    fakes = [harness.joined(i) for i in (1, 2, 3)]
    _rounds(harness, fakes, range(1, 21))
    before = harness.core.view().sync_s
    _rounds(harness, fakes, range(21, 24), silent=fakes[2])
    assert harness.member(3).state == "live", "the outage is shorter than the silence limit"
    fakes[2].acknowledges(23.9)
    assert harness.core.view().sync_s < before + 0.1
    fakes[0].reports(24.0, step=24)
    fakes[1].reports(24.0, step=24)
    fakes[0].contributes(24.1, next(iter(fakes[0].pulls)))
    assert harness.one(OpenGrace).window_s > 0.5
    assert harness.of(MergeRound) == []


def test_outage_is_not_measured_as_sync_time():
    """The same holds if all learners were disconnected."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=2, overlap_steps=4))
    one = harness.joined(1)
    _rounds(harness, [one], range(1, 21))
    one.reports(21.0, step=21)
    one.contributes(21.1)
    harness.merges_and_persists(21.2)
    before = harness.core.view().sync_s
    now = 21.2
    while harness.member(1).state == "live":
        now += 0.5
        harness.fire_timers(now)
        assert now < 60
    one.acknowledges(now)
    assert harness.member(1).state == "live"
    assert harness.core.view().sync_s == before


def test_silence_is_detected_soon_after_a_learner_starts_to_train():
    """The silence limit of a joining learner is long. A check armed with it would count a dead learner as live for
    half a minute."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=99))
    one, two = harness.joined(1), harness.joined(2)
    for tenth in range(1, 8):
        one.reports(0.1 * tenth, tenth, step_time_s=0.1)
        two.reports(0.1 * tenth, tenth, step_time_s=0.1)
    harness.fire_timers(4.0)
    assert (harness.member(1).state, harness.core.view().alive) == ("suspect", 0)


def test_burst_of_delayed_reports_does_not_make_a_round_due():
    """(1) A round opens while reports of a learner are delayed, (2) they arrive together, (3) counted as steps since
    the opening they would open the next round immediately, without the learners that were just pulled."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=4))
    one, two = harness.joined(1), harness.joined(2)
    _rounds(harness, [one, two], range(1, 10))
    _rounds(harness, [one, two], range(10, 14), silent=two)
    version = harness.fragment(0).version
    assert harness.core.state.fragments[0].opened_at == 13.0
    for step in range(10, 18):
        two.reports(13.5, step)
        assert harness.bodies(Pull) == []
    assert harness.fragment(0).phase == "idle"
    _rounds(harness, [one], range(14, 18))
    assert harness.fragment(0).version == version + 1


def test_burst_of_delayed_messages_leaves_a_silence_limit_of_four_steps():
    """Forty simultaneous reports reduce the measured gap to zero, but the next message still takes a step."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=999))
    one = harness.joined(1)
    for step in range(1, 21):
        one.reports(float(step), step)
        harness.fire_timers(float(step))
    for step in range(21, 61):
        one.reports(22.0, step)
    harness.fire_timers(25.9)
    assert harness.member(1).state == "live"
    harness.fire_timers(30.1)
    assert harness.member(1).state == "suspect"


def test_short_steps_on_a_busy_machine_do_not_cause_suspicion():
    """Steps take 1 ms and the process gets no CPU for 0.5 s: the limit is 4 * `min_wait_s`, one second."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=999))
    one = harness.joined(1)
    for step in range(1, 201):
        one.reports(0.001 * step, step, step_time_s=0.001)
        harness.fire_timers(0.001 * step)
    harness.fire_timers(1.1)
    assert harness.member(1).state == "live"
    harness.fire_timers(1.5)
    assert harness.member(1).state == "suspect"


def test_learner_with_a_slow_link_is_in_every_second_merge():
    """Its contributions take five steps, those of others a fifth of a step. Without an extended grace window all of
    them would be late and never be merged."""
    harness = SyncerHarness(RunConfig(fragments=1, every_steps=12, overlap_steps=2))
    fakes = [harness.joined(i) for i in (1, 2, 3)]
    upload_s = {1: 0.2, 2: 0.25, 3: 5.2}
    in_flight: list[tuple[float, int, Contribution]] = []  # in flight: time of arrival, learner
    merged: list[tuple[int, ...]] = []

    def move(until: float) -> None:
        harness.fire_timers(until)
        while sealed := [effect for effect in harness.awaited if isinstance(effect, MergeRound)]:
            merged.append(tuple(each.learner for each in sealed[0].contributions))
            harness.merges_and_persists(until)
            for fake in fakes:
                fake.acknowledges(until)

    for step in range(1, 144):
        while in_flight and min(in_flight)[0] < step:
            at, learner, body = in_flight.pop(in_flight.index(min(in_flight)))
            move(at)
            harness.learners[learner].delivers(at, body)
            move(at)
        move(float(step))
        for fake in fakes:
            fake.reports(float(step), step)
        for fake in fakes:
            if fake.pulls:
                in_flight.append((step + upload_s[fake.id], fake.id, fake.contribution()))
                fake.pulls.clear()
    assert set(merged[-6:]) == {(1, 2), (1, 2, 3)}, merged
    assert merged[-6:].count((1, 2, 3)) == 3, merged
