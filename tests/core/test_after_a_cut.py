"""Effects of a temporary link failure on the other learners, taken from recorded tapes."""

from __future__ import annotations

from atoll.core.protocol import Contribution, MergeRound, OpenGrace, Pull
from atoll.core.types import RunConfig
from tests.core.conversation import SyncerTalk, Voice


def _rounds(talk: SyncerTalk, voices: list[Voice], steps: range, silent: Voice | None = None) -> None:
    """Take steps of one second each. All learners reply immediately, except silent ones."""
    heard = [voice for voice in voices if voice is not silent]
    for step in steps:
        for voice in heard:
            voice.reports(float(step), step)
        for voice in heard:
            for fragment in list(voice.pulls):
                voice.contributes(step + 0.1, fragment)
                del voice.pulls[fragment]
        talk.fires(step + 0.2)
        while any(isinstance(effect, MergeRound) for effect in talk.awaited):
            talk.merges_and_persists(step + 0.2)
        for voice in heard:
            voice.acknowledges(step + 0.3)


def test_one_broken_link_does_not_end_the_grace_of_others():
    """(1) A version is on its way to a learner whose link is cut, (2) its acknowledgement comes seconds later, (3)
    taken for the time of a synchronisation it leaves no slack, (4) and merges go without all but the first."""
    talk = SyncerTalk(RunConfig(fragments=4, every_steps=4, overlap_steps=1, grace_margin=0.9))
    voices = [talk.joined(i) for i in (1, 2, 3)]
    _rounds(talk, voices, range(1, 21))
    before = talk.core.view().sync_s
    _rounds(talk, voices, range(21, 24), silent=voices[2])
    assert talk.member(3).state == "live", "shorter than its limit: this is not about silence"
    voices[2].acknowledges(23.9)
    assert talk.core.view().sync_s < before + 0.1
    voices[0].reports(24.0, step=24)
    voices[1].reports(24.0, step=24)
    voices[0].contributes(24.1, next(iter(voices[0].pulls)))
    assert talk.one(OpenGrace).window_s > 0.5
    assert talk.of(MergeRound) == []


def test_outage_is_not_measured_as_sync_time():
    """The same if all learners were disconnected."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=2, overlap_steps=4))
    one = talk.joined(1)
    _rounds(talk, [one], range(1, 21))
    one.reports(21.0, step=21)
    one.contributes(21.1)
    talk.merges_and_persists(21.2)
    before = talk.core.view().sync_s
    now = 21.2
    while talk.member(1).state == "live":
        now += 0.5
        talk.fires(now)
        assert now < 60
    one.acknowledges(now)
    assert talk.member(1).state == "live"
    assert talk.core.view().sync_s == before


def test_silence_is_noticed_soon_after_a_learner_has_begun_to_train():
    """The limit of a learner that joins is long, and so was the time until its silence was looked at for the first
    time: half a minute in which it counted as alive whatever became of it."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=99))
    one, two = talk.joined(1), talk.joined(2)
    for tenth in range(1, 8):
        one.reports(0.1 * tenth, tenth, step_time_s=0.1)
        two.reports(0.1 * tenth, tenth, step_time_s=0.1)
    talk.fires(4.0)
    assert (talk.member(1).state, talk.core.view().alive) == ("suspect", 0)


def test_burst_of_delayed_reports_does_not_make_a_round_due():
    """(1) A round opens while a learner's reports are held up, (2) they arrive together, (3) counted as steps since the
    opening they would open the next round at once, without those who have just been asked."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=4))
    one, two = talk.joined(1), talk.joined(2)
    _rounds(talk, [one, two], range(1, 10))
    _rounds(talk, [one, two], range(10, 14), silent=two)
    version = talk.fragment(0).version
    assert talk.core.state.fragments[0].opened_at == 13.0
    for step in range(10, 18):
        two.reports(13.5, step)
        assert talk.bodies(Pull) == []
    assert talk.fragment(0).phase == "idle"
    _rounds(talk, [one], range(14, 18))
    assert talk.fragment(0).version == version + 1


def test_a_burst_of_messages_that_were_held_up_leaves_a_limit_of_four_steps():
    """Forty reports at one instant bring the gaps to nothing; the next message still takes a step to come."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=999))
    one = talk.joined(1)
    for step in range(1, 21):
        one.reports(float(step), step)
        talk.fires(float(step))
    for step in range(21, 61):
        one.reports(22.0, step)
    talk.fires(25.9)
    assert talk.member(1).state == "live"
    talk.fires(30.1)
    assert talk.member(1).state == "suspect"


def test_quick_steps_on_a_busy_machine_are_no_silence():
    """Steps of a millisecond, and a process that gets no processor for half a second: four least waits are a second."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=999))
    one = talk.joined(1)
    for step in range(1, 201):
        one.reports(0.001 * step, step, step_time_s=0.001)
        talk.fires(0.001 * step)
    talk.fires(1.1)
    assert talk.member(1).state == "live"
    talk.fires(1.5)
    assert talk.member(1).state == "suspect"


def test_a_learner_with_a_slow_link_is_in_every_second_merge():
    """Its contribution takes five steps and those of the others a fifth of one: it was late each time, and nothing that
    it trained was ever merged."""
    talk = SyncerTalk(RunConfig(fragments=1, every_steps=12, overlap_steps=2))
    voices = [talk.joined(i) for i in (1, 2, 3)]
    needs = {1: 0.2, 2: 0.25, 3: 5.2}
    answers: list[tuple[float, int, Contribution]] = []  # on their way: when they arrive, whose they are
    merged: list[tuple[int, ...]] = []

    def move(until: float) -> None:
        talk.fires(until)
        while sealed := [effect for effect in talk.awaited if isinstance(effect, MergeRound)]:
            merged.append(tuple(each.learner for each in sealed[0].contributions))
            talk.merges_and_persists(until)
            for voice in voices:
                voice.acknowledges(until)

    for step in range(1, 144):
        while answers and min(answers)[0] < step:
            at, learner, body = answers.pop(answers.index(min(answers)))
            move(at)
            talk.voices[learner].delivers(at, body)
            move(at)
        move(float(step))
        for voice in voices:
            voice.reports(float(step), step)
        for voice in voices:
            if voice.pulls:
                answers.append((step + needs[voice.id], voice.id, voice.contribution()))
                voice.pulls.clear()
    assert set(merged[-6:]) == {(1, 2), (1, 2, 3)}, merged
    assert merged[-6:].count((1, 2, 3)) == 3, merged
