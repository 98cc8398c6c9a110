"""Restore: start a new run from a snapshot of another one, with its values, optimizer states and token count.

The other run is not changed and may continue. The new run gets:

| in the snapshot | in the new run |
|---|---|
| value, precise value, outer state and usual size of every fragment | version 1; version 0 is the same value |
| tokens that were merged into it | tokens that are already done, in the budget and in the ledger |
| parts of learners | parts of the new run: a learner without a peer starts from one, of any learner |

Work that was in flight or not merged is not restored: it is in the parts of the old run and in no published value.

The new run keeps its initial state in `beginning`, under second names. A replay needs it after the store and the
learners have deleted theirs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from atoll.checkpoint.published_model import read_run_settings
from atoll.core.protocol import LeaseRecord, MembersRecord, VersionRecord
from atoll.core.types import FragmentId, RoundId
from atoll.files import link_or_copy, make_folder, write_file, write_text
from atoll.store.learner_parts import LearnerPart, list_parts, part_path, read_part, shards_path
from atoll.store.run_settings import CONFIG_FILE, RunSettings, check_is_new_run
from atoll.store.snapshots import SHARDS_FOLDER, STORE_FOLDER, SnapshotInfo, list_snapshots, snapshot_version_path
from atoll.store.tensor_file import encode_tensor_file, error_reason, read_tensors
from atoll.store.version_store import Store
from atoll.tape import format

INITIAL_FOLDER = "beginning"
"""Folder in the directory of a restored run with its initial state."""


class RestoreSource(NamedTuple):
    """A snapshot of a run, named as RUN or RUN@N."""

    run: Path
    info: SnapshotInfo
    settings: RunSettings


def parse_restore_source(text: str) -> RestoreSource:
    """Find the snapshot that `--restore` names. Raise ValueError if it does not exist."""
    name, at, number = text.rpartition("@")
    if not at or Path(text).is_dir():
        name, number = text, ""
    run = Path(name)
    if number and not number.isdigit():
        raise ValueError(f"--restore {text}: the @ needs a snapshot number; see atoll snapshot {run} --list")
    kept = read_run_settings(run) if run.is_dir() else None
    if kept is None or kept.plan is None or not (run / CONFIG_FILE).is_file():
        raise ValueError(f"--restore {run}: no run of atoll train or atoll syncer is there, or it has no model yet")
    found = list_snapshots(run)
    if not found:
        raise ValueError(f"{run} has no snapshot; take one while it trains: atoll snapshot {run}")
    wanted = int(number) if number else found[-1].number
    info = next((each for each in found if each.number == wanted), None)
    if info is None:
        there = ", ".join(str(each.number) for each in found)
        raise ValueError(f"{run} has no snapshot {wanted}; it has {there}")
    if info.record is None:
        raise ValueError(f"{info.problem}; choose an older one, see atoll snapshot {run} --list")
    return RestoreSource(run, info, kept)


def restore_run(source: RestoreSource, run: Path, settings: RunSettings, log: Callable[[str], None]) -> int:
    """Make the directory of the new run and return its number of tokens already done. Remove it on failure.

    Args:
        settings: Settings of the new run; `extra` has the settings of its job.
    """
    check_is_new_run(run)
    fragments = (
        [_read_fragment(source, p) for p in range(len(source.info.record.versions))] if source.info.record else []
    )
    done = max((record.merged_tokens for record, _ in fragments if record is not None), default=0)
    tokens = settings.config.budget_tokens
    if tokens is not None and done >= tokens:
        raise ValueError(
            f"the snapshot has {done:,} of {tokens:,} tokens already: nothing would be left to train;"
            " give more with --tokens"
        )
    was_there = run.exists()
    try:
        run.mkdir(parents=True, exist_ok=True)
        _write_store(source, run, settings, fragments, done)
        parts = _write_parts(source, run, settings.config.run_id, log)
        write_text(run / CONFIG_FILE, json.dumps(dict(settings.extra), indent=2) + "\n")
    except BaseException:
        shutil.rmtree(run, ignore_errors=True)
        if was_there:
            run.mkdir()
        raise
    inner = (
        f"optimizer state of {len(parts)} learners is there" if parts else "learners start with fresh optimizer state"
    )
    log(f"restored from snapshot {source.info.number} of {source.run}: {done:,} tokens are done, {inner}")
    return done


def _read_fragment(source: RestoreSource, p: FragmentId) -> tuple[VersionRecord | None, dict[str, Tensor]]:
    path = snapshot_version_path(source.run, source.info.number, p)
    try:
        note, tensors = read_tensors(path)
        record = format.decode(note) if note else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error_reason(error)}; choose another snapshot") from None
    assert source.info.record is not None
    if record is not None and not isinstance(record, VersionRecord):
        raise ValueError(f"{path} holds {type(record).__name__}, no version; choose another snapshot")
    if (record.version if record is not None else 0) != source.info.record.versions[p]:
        raise ValueError(f"{path} holds another version than the snapshot says; choose another snapshot")
    return record, tensors


def _write_store(
    source: RestoreSource,
    run: Path,
    settings: RunSettings,
    fragments: list[tuple[VersionRecord | None, dict[str, Tensor]]],
    done: int,
) -> None:
    plan = source.settings.plan
    assert plan is not None
    config = replace(settings.config, fragments=len(plan.fragments), fingerprint=plan.fingerprint())
    made, shards = replace(settings, config=config, plan=plan), settings.shards
    for k in range(shards):
        with Store.open(run / SHARDS_FOLDER / str(k) / STORE_FOLDER) as store:
            for p in range(k, len(fragments), shards):
                _write_fragment(store, p, *fragments[p], initial_fragment_path(run, p))
            store.write_settings(made.to_json())
    with Store.open(run / STORE_FOLDER) as store:
        for p in range(len(fragments) if not shards else 0):
            _write_fragment(store, p, *fragments[p], initial_fragment_path(run, p))
        store.write(MembersRecord(1, (), (), done))
        cut = source.info.record
        if cut is not None and cut.next_sample:
            # Samples trained after the cut are not in this model: lease them again, with all unmerged samples.
            left = sum(end - begin for begin, end in cut.unmerged)
            store.write(LeaseRecord(1, cut.next_sample, cut.unmerged, (), cut.next_sample - left))
        store.write_settings(made.to_json())


def _write_fragment(
    store: Store, p: FragmentId, record: VersionRecord | None, tensors: dict[str, Tensor], kept: Path
) -> None:
    store.write_initial(p, {"published": tensors["published"]})
    if record is not None:
        round_id = RoundId(p, 0, store.epoch, 1)
        store.write(VersionRecord(p, 1, round_id, (), (), record.merged_tokens), tensors)
    make_folder(kept.parent)
    link_or_copy(store.version_path(p, 0 if record is None else 1), kept)


def _write_parts(source: RestoreSource, run: Path, run_id: str, log: Callable[[str], None]) -> list[int]:
    """Copy the parts of learners and return their numbers. Log and skip parts that are missing or damaged."""
    assert source.info.record is not None
    there = list_parts(source.run)
    taken = []
    for learner, _ in source.info.record.parts:
        # That part, or the newest one before it: some parts are of snapshots that failed.
        numbers = [number for number in there.get(learner, []) if number <= source.info.number]
        for number in reversed(numbers):
            path = part_path(source.run, learner, number)
            try:
                part = read_part(path)
                _copy_shards(part, run, learner)
            except (OSError, ValueError) as error:
                log(f"{path}: {error}; trying an older one")
                continue
            target, kept = part_path(run, learner, number), part_path(run / INITIAL_FOLDER, learner, number)
            make_folder(target.parent)
            make_folder(kept.parent)
            note = json.dumps({**part.note, "run": run_id}, separators=(",", ":"))
            write_file(target, encode_tensor_file(note, part.tensors))
            link_or_copy(target, kept)
            taken.append(learner)
            break
        else:
            log(f"learner {learner} has no part of snapshot {source.info.number} in {source.run}")
    return taken


def _copy_shards(part: LearnerPart, run: Path, learner: int) -> None:
    """Link the shard files of a part, if there are any, into the new run and its initial state."""
    if part.shards is None:
        return
    from atoll.store.sharded_parts import link_shard_files

    for place in (run, run / INITIAL_FOLDER):
        target = shards_path(part_path(place, learner, part.snapshot))
        make_folder(target.parent)
        link_shard_files(part.shards, target)


def initial_fragment_path(run: Path, p: FragmentId) -> Path:
    return run / INITIAL_FOLDER / f"{p:03d}.safetensors"
