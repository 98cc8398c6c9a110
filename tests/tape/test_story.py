"""Stories: ordered sentences about one subject, for every important event."""

from __future__ import annotations

import json

import pytest

from atoll.cli.main import main
from atoll.core.protocol import (
    AdoptFragment,
    CloseConnection,
    Contribution,
    CopyFragment,
    DialFailed,
    Envelope,
    Halt,
    Hello,
    LogReason,
    MessageArrived,
    OptimizerState,
    Persisted,
    ProvideState,
    Published,
    Pull,
    RecordInFlight,
    RecordKey,
    Refuse,
    RefuseContribution,
    Resync,
    SaveSnapshot,
    Send,
    SnapshotSaved,
    Started,
    Stop,
    TimerFired,
)
from atoll.core.reasons import Reason
from atoll.core.types import RoundId, RunConfig
from atoll.tape.format import Actor, Entry
from atoll.tape.story import RUN, build_story
from tests.tiny_run import TinyRun, eventful_run

SYNCER, THREE = Actor(0, 1), Actor(3, 1)
L3, L4, F7 = ("learner", 3), ("learner", 4), ("fragment", 7)
ROUND = RoundId(7, 3, 1, 1)


def sentences(subject, *entries, config=None) -> list[str]:
    return [line.sentence for line in build_story(entries, subject, config)]


def by_syncer(*effects, event=TimerFired(), tick=1) -> Entry:  # noqa: B008 - frozen
    return Entry(12.4, SYNCER, tick, event, effects)


def by_learner(*effects, event=TimerFired(), tick=1) -> Entry:  # noqa: B008 - frozen
    return Entry(12.4, THREE, tick, event, effects)


def to(learner: int, body) -> Send:
    return Send(Envelope(learner, 1, 1, 1, 1, 0, 0, body))


def test_line_has_time_subject_and_sentence():
    opening = by_syncer(*(to(learner, Pull(ROUND)) for learner in (1, 2, 3, 4)))
    (line,) = build_story([opening], ("fragment", 7), RunConfig(quorum=2))
    assert str(line) == "12.400 s  fragment 7: opened on version 3: 4 learners pulled, quorum 2"
    assert (line.actor, line.tick, line.subject) == (SYNCER, 1, ("fragment", 7))


def test_opening_and_retry_are_described_for_pulled_learners():
    opening = by_syncer(to(1, Pull(ROUND)), to(3, Pull(ROUND)))
    again = by_syncer(to(3, Pull(ROUND)), tick=2)
    assert sentences(("learner", 3), opening, again) == [
        "opened on version 3: 2 learners pulled",
        "version 3: pulled again from learner 3",
    ]
    assert sentences(("learner", 1), opening, again) == ["opened on version 3: 2 learners pulled"]
    assert sentences(("learner", 2), opening, again) == []


@pytest.mark.parametrize(
    ("entry", "subjects", "sentence"),
    [
        (by_syncer(LogReason(F7, Reason("persisting", (4,)))), [F7], "merged; making version 4 durable"),
        (by_syncer(LogReason(L3, Reason("member-left", ("tired",)))), [L3, RUN], "left: tired"),
        (by_syncer(to(3, RefuseContribution(ROUND, Reason("contribution-late")))), [F7, L3],
         "contribution of learner 3 refused: the round is sealed; the learner keeps its progress"),
        (by_syncer(event=MessageArrived(Envelope(3, 1, 1, 1, 1, 0, 0, Contribution(ROUND, 9, 1, 1, 1, 0)))),
         [F7, L3], "a contribution of learner 3 to attempt 1 on version 3 was ignored"),
        (by_syncer(event=MessageArrived(Envelope(3, 1, 5, 1, 1, 0, 0, Hello("run", (), (), 0, 0, False)))),
         [L3], "a hello of incarnation 1 on connection 5 got no reply"),
        (by_syncer(to(3, Published(7, 4, None, None, 0.0)), to(4, Published(7, 4, None, None, 0.0)),
                   event=Persisted(RecordKey("version", 7, 4))), [F7], "version 4 is durable and sent to 2 learners"),
        (by_syncer(to(3, Published(7, 4, None, None, 0.0))), [F7, L3], "version 4 sent to learner 3"),
        (by_syncer(CloseConnection(3, 1, 5, Reason("member-timed-out", (8.0,))),
                   LogReason(L3, Reason("member-timed-out", (8.0,)))),
         [L3, RUN], "the syncer closes connection 5: no message for 8 s; marked as lost"),
        (by_syncer(to(3, Refuse(Reason("refused-finished"), 1, True))), [L3], "refused: the run is finished"),
        (by_syncer(to(3, ProvideState(4, 1, ()))), [L3, L4], "its optimizer state is requested for learner 4"),
        (by_syncer(RecordInFlight(5, 3, ROUND)), [F7, L3, RUN],
         "the contribution of learner 3 was in flight at snapshot 5 and is stored"),
        (by_syncer(Halt(Reason("finish-done", (3, 4)))), [RUN, L3, F7],
         "syncer epoch 1 halts: finished: 3 of 4 learners acknowledged"),
        (by_syncer(LogReason(RUN, Reason("a-code-of-tomorrow", (1, "x")))), [RUN], "a-code-of-tomorrow 1 x"),
        (by_learner(CopyFragment(ROUND, 40)), [L3, F7],
         "copied fragment 7 at step 40 for attempt 1 on version 3; not sent, without a connection"),
        (by_learner(to(3, Contribution(ROUND, 40, 24, 2400, 4000, 0))), [L3, F7],
         "sent its copy of fragment 7 for attempt 1 on version 3 again"),
        (by_learner(AdoptFragment(7, 4, "overwrite", False, 1, 20, 0)), [L3, F7],
         "adopted version 4 of fragment 7 (overwrite): 1 token merged, 0 pending, 20 dropped"),
        (by_learner(to(3, Resync(7, 2))), [L3, F7],
         "received an update of fragment 7 that does not fit version 2; requests the value"),
        (by_learner(to(3, OptimizerState(3, 4, 1, 9, ()))), [L3, L4], "sends its optimizer state to learner 4"),
        (by_learner(SaveSnapshot(5, 40)), [L3], "saves its part of snapshot 5 at step 40"),
        (by_learner(event=SnapshotSaved(5)), [L3], "its part of snapshot 5 is saved"),
        (by_learner(event=DialFailed("no route")), [L3], "cannot connect: no route"),
        (by_learner(Stop(Reason("learner-left", ("done",)))), [L3, RUN], "stops: left: done"),
    ],
)  # fmt: skip
def test_event_is_described_for_its_subjects(entry, subjects, sentence):
    for subject in [L3, L4, F7, ("fragment", 8), ("learner", 9), RUN]:
        if subject in subjects:
            assert sentences(subject, entry) == [sentence]
        elif not isinstance(entry.effects[0] if entry.effects else None, Halt):
            assert sentences(subject, entry) == []


def test_killed_process_is_described_at_next_start():
    entries = [
        Entry(1.0, Actor(3, 1), 1, Started(), ()),
        Entry(2.5, Actor(3, 1), 2, TimerFired(), ()),
        Entry(9.0, Actor(3, 2), 1, Started(), ()),
        Entry(9.5, Actor(3, 2), 2, TimerFired(), (Stop(Reason("learner-left", ("done",))),)),
        Entry(11.0, Actor(3, 3), 1, Started(), ()),
    ]
    assert sentences(("learner", 3), *entries) == [
        "incarnation 1 started",
        "incarnation 2 started; incarnation 1 ended without a stop, last entry at 2.500 s",
        "stops: left: done",
        "incarnation 3 started",
    ]


def test_story_of_round():
    run = TinyRun().run_until(6.0)
    lines = sentences(("fragment", 1), *run.entries, config=run.config)
    opened = lines.index("opened on version 0: 3 learners pulled, quorum 2")
    assert [line.split("; waiting 0.")[0] for line in lines[opened : opened + 11]] == [
        "opened on version 0: 3 learners pulled, quorum 2",
        "copied fragment 1 at step 3 for attempt 1 on version 0 and sent 3 steps, 300 tokens",
        "copied fragment 1 at step 3 for attempt 1 on version 0 and sent 3 steps, 300 tokens",
        "copied fragment 1 at step 3 for attempt 1 on version 0 and sent 3 steps, 300 tokens",
        "contribution of learner 1 accepted: 3 steps, 300 tokens",
        "contribution of learner 2 accepted: 3 steps, 300 tokens",
        "quorum 2 of 2",
        "contribution of learner 3 accepted: 3 steps, 300 tokens",
        "sealed: all 3 pulled learners have contributed",
        "merged; making version 1 durable",
        "version 1 is durable and sent to 3 learners",
    ]


def test_story_of_run_has_starts_and_stops():
    run = eventful_run()
    lines = sentences(RUN, *run.entries)
    for expected in [
        "syncer epoch 1 started",
        "connection closed: connection reset by peer",
        "incarnation 1 is replaced by 2",
        "starts to train: optimizer state from learner 1",
        "syncer epoch 2 started; epoch 1 ended without a stop, last entry at",
        "incarnation 2 has reconnected",
        "the end of the run was requested; merging every fragment once more",
        "stops: the run is finished; every final version is adopted",
        "syncer epoch 2 halts: finished: 3 of 3 learners acknowledged",
    ]:
        assert any(line.startswith(expected) for line in lines), expected


# --------------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    return eventful_run().save(tmp_path_factory.mktemp("run"))


def test_command_prints_story_of_fragment(saved_run, capsys):
    assert main(["story", str(saved_run), "--fragment", "1", "--since", "2", "--until", "3.0"]) == 0
    assert capsys.readouterr() == ("       2.320 s  fragment 1: opened on version 0: 3 learners pulled, quorum 2\n", "")


def test_command_prints_last_lines_as_json(saved_run, capsys):
    assert main(["story", str(saved_run), "--run", "--until", "65", "--last", "2", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["subject"] == ["run", 0]
    assert [line["sentence"] for line in out["lines"]] == [
        "stops: the run is finished; every final version is adopted",
        "syncer epoch 2 halts: finished: 3 of 3 learners acknowledged",
    ]
    assert out["lines"][1]["actor"] == "syncer epoch 2"


def test_command_reports_empty_interval(saved_run, capsys):
    assert main(["story", str(saved_run), "--learner", "2", "--since", "1000"]) == 0
    assert capsys.readouterr() == ("", "atoll: nothing happened in that time\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learner", "9"], "no learner 9 in this run: it has 1 to 3"),
        (["--learner", "0"], "no learner 0 in this run: it has 1 to 3"),
        (["--fragment", "3"], "no fragment 3 in this run: it has 0 to 2"),
        ([], "the story needs one subject; give exactly one of --learner 3, --fragment 7 and --run"),
        (
            ["--run", "--learner", "1"],
            "the story needs one subject; give exactly one of --learner 3, --fragment 7 and --run",
        ),
    ],
)
def test_invalid_subject_prints_one_line(saved_run, capsys, arguments, message):
    assert main(["story", str(saved_run), *arguments]) == 2
    assert capsys.readouterr() == ("", f"atoll: {message}\n")


def test_learner_without_tape_has_story_from_syncer(tmp_path, capsys):
    TinyRun().run_until(6.0).save(tmp_path)
    (tmp_path / "tapes/learner-2-i1.tape").unlink()
    assert main(["story", str(tmp_path), "--learner", "2"]) == 0
    assert "contribution of learner 2 accepted" in capsys.readouterr().out
