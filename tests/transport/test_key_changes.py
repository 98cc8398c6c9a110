"""Keys that are renewed, revoked and replaced during a run, and replayed sessions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import KeysRefusedError, LearnerRefusedError
from atoll.learner.api import Learner
from atoll.transport.tls import find_key_files
from tests.chaos.relays import relay_to
from tests.learner.runs import LIMIT_S, Child, LearnerSpec, Run, endless
from tests.learner.small_models import BATCH, work
from tests.transport.key_rings import KeyRing, days_ago
from tests.transport.recorder import Recorder


def join_briefly(run: Run, **settings: Any) -> None:
    job = work()
    with Learner(job.model, job.optimizer, run.address, join_timeout_s=LIMIT_S, **settings):
        pass


def until_logged(run: Run, child: Child, words: str, count: int = 1) -> None:
    run.until(lambda _: len(run.log_lines(child, words)) >= count, words)


NEW_AT_THE_SYNCER = "the keys have changed: new connections use them"
NEW_AT_THE_LEARNER = "the key files have changed; connecting with the new keys"


def test_all_keys_and_authority_are_replaced_during_run(tmp_path):
    """Follow the order of docs/security.md. No process restarts. A learner with only an old key is refused."""
    ring = KeyRing(tmp_path / "keys")
    shutil.copytree(ring["one"], tmp_path / "old key")
    with Run(tmp_path / "run", endless(), keys=ring.syncer, planted="short-handshake-timeouts") as run:
        with relay_to(run.address) as relay:
            one, two = (run.start(LearnerSpec(n, keys=ring[k]), relay.address) for n, k in ((1, "one"), (2, "two")))
            for learner in (one, two):
                learner.expect("joined")
            run.go(one, two)

            def reconnect_with_new_keys(times: int) -> None:
                relay.reset()
                for learner in (one, two):
                    until_logged(run, learner, NEW_AT_THE_LEARNER, times)
                for number in (1, 2):
                    run.until(run.learner(number, standing="live", link="up", incarnation=1), "it has reconnected")
                run.until(run.merges(run.status()["merges"] + 3), "the run continues")

            old = ring.authority.issued[0].fingerprint
            ring.authority.renew_authority()
            until_logged(run, run.syncer, NEW_AT_THE_SYNCER)
            reconnect_with_new_keys(1)  # with keys of the old authority; both authorities are trusted
            for name in ("syncer", "one", "two"):
                ring.authority.renew(name)
            until_logged(run, run.syncer, NEW_AT_THE_SYNCER, 2)
            reconnect_with_new_keys(2)
            assert ring.authority.find_key("syncer").fingerprint != old
            assert ring.authority.retire_old_authorities() == 1
            until_logged(run, run.syncer, NEW_AT_THE_SYNCER, 3)
            reconnect_with_new_keys(3)
        with pytest.raises(KeysRefusedError, match="it does not trust the authority of this key"):
            join_briefly(run, keys=tmp_path / "old key", ca=ring["authority.pem"], learner=1)
        with pytest.raises(KeysRefusedError, match="authority that is not trusted here"):
            join_briefly(run, keys=tmp_path / "old key", learner=1)


@pytest.mark.long
def test_learner_with_revoked_key_reconnects_with_new_key(tmp_path):
    """The learner trains meanwhile, and logs why it has no link."""
    ring = KeyRing(tmp_path / "keys")
    with Run(tmp_path / "run", endless(), keys=ring.syncer, planted="short-handshake-timeouts") as run:
        one, two = run.joined(LearnerSpec(1, keys=ring["one"]), LearnerSpec(2, keys=ring["two"]))
        run.go(one, two)
        run.until(run.merges(3), "the run trains")
        ring.authority.revoke("two")
        until_logged(run, two, "the key of two is revoked")
        run.until(run.learner(2, link="down"), "its link is closed")
        until_logged(run, two, "cannot reach syncer at")
        assert run.log_lines(run.syncer, "was refused: the key of two is revoked")
        assert run.status()["refused"]["revoked"] >= 1
        run.until(run.merges(run.status()["merges"] + 3), "the other learner continues")
        assert run.until(run.learner(1), "learner 1 is shown")["link"] == "up"
        two.command("hold")
        two.expect("held")
        two.command("train", 20)
        assert two.expect("trained")["steps"] == 20
        ring.authority.add("two-again", (2,))
        for file in ("authority.pem", "key.pem", "certificate.pem"):
            shutil.copy(ring["two-again"] / file, ring["two"] / file)
        two.command("go")
        run.until(run.learner(2, standing="live", link="up", incarnation=1), "it has reconnected with its new key")
        run.end()
        run.assert_same(run.finish(one, two), 1, 2)


def test_unusable_keys_do_not_replace_usable_ones(tmp_path):
    ring = KeyRing(tmp_path / "keys")
    with Run(tmp_path / "run", endless(), keys=ring.syncer, planted="short-handshake-timeouts") as run:
        (one,) = run.joined(LearnerSpec(1, keys=ring["one"]))
        run.go(one)
        run.keys = find_key_files(Path(shutil.copytree(ring["syncer"], tmp_path / "as it was")))
        shutil.copy(ring["two"] / "certificate.pem", tmp_path / "other.pem")
        # Atomic: a partial file would also count as a change.
        (tmp_path / "other.pem").replace(ring["syncer"] / "certificate.pem")
        until_logged(run, run.syncer, "cannot be used, the previous ones stay in use")
        run.until(run.merges(run.status()["merges"] + 2), "new connections are accepted and the run continues")
        assert len(run.log_lines(run.syncer, "cannot be used")) == 1, "it is logged once"


@pytest.mark.long
def test_expiring_key_closes_its_link(tmp_path):
    ring = KeyRing(tmp_path / "keys")
    with Run(tmp_path / "run", endless(), keys=ring.syncer, planted="short-handshake-timeouts") as run:
        (one,) = run.joined(LearnerSpec(1, keys=ring["one"]))
        with days_ago(1 - 5 / 86400):
            ring.authority.add("brief", (3,), days=1)  # expires in a few seconds
        brief = run.start(LearnerSpec(3, keys=ring["brief"]))
        brief.expect("joined")
        run.go(one, brief)
        until_logged(run, run.syncer, "was refused: the key of brief expired on")
        run.until(run.learner(3, link="down"), "its link is closed")
        assert run.status()["refused"]["expired"] >= 1
        until_logged(run, brief, "the key of brief expired on")
        with pytest.raises(LearnerRefusedError, match="the key of brief expired"):
            join_briefly(run, keys=ring["brief"], learner=3)
        assert run.until(run.learner(1), "learner 1 is shown")["link"] == "up"


# --------------------------------------------------------------------------------------------------------------------
# Replay


def merged_by(run: Run, status: dict[str, Any]) -> list[Any]:
    return [line["merged"] for line in status["ledger"]]


def test_replayed_tls_session_has_no_effect(tmp_path):
    """Replay every connection of a session twice: no request is accepted, nothing is merged."""
    ring = KeyRing(tmp_path / "keys")
    with Run(tmp_path / "run", endless(), keys=ring.syncer) as run, Recorder(run.address) as recorder:
        one = run.start(LearnerSpec(1, keys=ring["one"]), recorder.address)
        one.expect("joined")
        one.command("go")
        run.until(run.merges(5), "merges are recorded")
        one.command("break")
        one.expect("ended")
        run.until(run.learner(1, link="down"), "it has left")
        before = run.status()
        records = [bytes(record) for record in recorder.sent if record]
        assert sum(map(len, records)) > 5_000
        for record in records * 2:
            answer = recorder.replay(record)
            assert b"HTTP" not in answer, "a request was processed"
        after = run.status()
        for name in ("merges", "trained", "learners", "ledger", "bytes"):
            assert after[name] == before[name]
        assert after["refused"].get("handshake", 0) >= len(records), "each replay fails in its handshake"


@pytest.mark.long
def test_replayed_plain_session_changes_nothing(tmp_path):
    """Loopback traffic is plain text, and a replay is accepted. Incarnations and sessions make it harmless."""
    with Run(tmp_path, endless()) as run, Recorder(run.address) as recorder:
        one = run.start(LearnerSpec(1, pace_s=0.01), recorder.address)
        one.expect("joined")
        one.command("go")
        run.until(run.merges(5), "merges are recorded")
        recorder.disconnect()
        until_logged(run, one, "connection closed: ")
        run.until(run.learner(1, standing="live", link="up"), "its second session")
        records = [bytes(record) for record in recorder.sent if b"GET /v1/run" not in record and record]
        old = [record for record in records if b"/v1/contribution" in record or b"/v1/link" in record][:3]
        assert len(old) >= 2
        one.command("hold")
        steps = one.expect("held")
        run.until(lambda status: status["rounds_in_flight"] == 0 or None, "no round is open")
        before = run.status()
        for record in old:
            recorder.replay(record)
        after = run.status()
        assert (after["merges"], merged_by(run, after)) == (before["merges"], merged_by(run, before))
        # The report of its last step may have arrived meanwhile. Tokens that it has not trained must not be counted.
        assert before["trained"] <= after["trained"] <= steps * BATCH
        shown = run.until(run.learner(1), "learner 1 is shown")
        assert (shown["link"], shown["incarnation"]) == ("up", 1)
        assert shown["standing"] in ("live", "suspect"), "it does not train, and may be suspected for that"
        assert run.log_lines(one, "WARNING") == [], "the live link is not affected"
        one.command("go")
        run.until(run.merges(before["merges"] + 3), "the run continues")
        run.end()
        run.assert_same(run.finish(one), 1)
        run.verdict()


def test_key_directory_works_after_copy(tmp_path):
    """A learner needs only its own key directory."""
    ring = KeyRing(tmp_path / "keys")
    island: Path = shutil.copytree(ring["one"], tmp_path / "elsewhere")
    assert sorted(path.name for path in island.iterdir()) == ["authority.pem", "certificate.pem", "key.pem"]
    with Run(tmp_path / "run", keys=ring.syncer) as run:
        learners = run.joined(LearnerSpec(1, keys=island))
        run.go(*learners)
        run.assert_same(run.finish(*learners), 1)
