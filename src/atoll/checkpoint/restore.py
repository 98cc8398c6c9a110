"""Restore: start a new run from a snapshot of another one, with its values, optimizer states and token count.

The other run is not changed and may continue. The new run gets:

| in the snapshot | in the new run |
|---|---|
| value, precise value, outer state and typical norm of every fragment | version 1; version 0 is the same value |
| tokens that were merged into it | tokens that count as trained, in the budget and in the ledger |
| parts of learners | parts of the new run: a learner that finds no peer loads the part of any learner |

Unmerged work is not restored: it is in the parts of the old run, but in no published value.

The new run keeps its initial state in `beginning`, as hard links. A replay needs it after the store and the
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
    settings = read_run_settings(run) if run.is_dir() else None
    if settings is None or settings.plan is None or not (run / CONFIG_FILE).is_file():
        raise ValueError(f"--restore {run}: this is not a run of atoll train or atoll syncer, or it has no model yet")
    snapshots = list_snapshots(run)
    if not snapshots:
        raise ValueError(f"{run} has no snapshot; take one while it trains: atoll snapshot {run}")
    selected = int(number) if number else snapshots[-1].number
    info = next((each for each in snapshots if each.number == selected), None)
    if info is None:
        available = ", ".join(str(each.number) for each in snapshots)
        raise ValueError(f"{run} has no snapshot {selected}; it has {available}")
    if info.record is None:
        raise ValueError(f"{info.problem}; choose an older one, see atoll snapshot {run} --list")
    return RestoreSource(run, info, settings)


def restore_run(source: RestoreSource, run: Path, settings: RunSettings, log: Callable[[str], None]) -> int:
    """Make the directory of the new run and return its number of trained tokens. Remove it on failure.

    Args:
        settings: Settings of the new run; `extra` has the settings of its job.
    """
    check_is_new_run(run)
    fragments = (
        [_read_fragment(source, p) for p in range(len(source.info.record.versions))] if source.info.record else []
    )
    trained_tokens = max((record.merged_tokens for record, _ in fragments if record is not None), default=0)
    tokens = settings.config.budget_tokens
    if tokens is not None and trained_tokens >= tokens:
        raise ValueError(
            f"the snapshot has {trained_tokens:,} of {tokens:,} tokens already, so nothing is left to train;"
            " increase --tokens"
        )
    existed = run.exists()
    try:
        run.mkdir(parents=True, exist_ok=True)
        _write_store(source, run, settings, fragments, trained_tokens)
        parts = _write_parts(source, run, settings.config.run_id, log)
        write_text(run / CONFIG_FILE, json.dumps(dict(settings.extra), indent=2) + "\n")
    except BaseException:
        shutil.rmtree(run, ignore_errors=True)
        if existed:
            run.mkdir()
        raise
    state = f"optimizer state of {len(parts)} learners" if parts else "learners start with fresh optimizer state"
    log(f"restored from snapshot {source.info.number} of {source.run}: {trained_tokens:,} tokens are trained, {state}")
    return trained_tokens


def _read_fragment(source: RestoreSource, p: FragmentId) -> tuple[VersionRecord | None, dict[str, Tensor]]:
    path = snapshot_version_path(source.run, source.info.number, p)
    try:
        text, tensors = read_tensors(path)
        record = format.decode(text) if text else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error_reason(error)}; choose another snapshot") from None
    assert source.info.record is not None
    if record is not None and not isinstance(record, VersionRecord):
        raise ValueError(f"{path} contains {type(record).__name__}, not a version; choose another snapshot")
    if (record.version if record is not None else 0) != source.info.record.versions[p]:
        raise ValueError(f"{path} does not contain the version that the snapshot lists; choose another snapshot")
    return record, tensors


def _write_store(
    source: RestoreSource,
    run: Path,
    settings: RunSettings,
    fragments: list[tuple[VersionRecord | None, dict[str, Tensor]]],
    trained_tokens: int,
) -> None:
    plan = source.settings.plan
    assert plan is not None
    config = replace(settings.config, fragments=len(plan.fragments), fingerprint=plan.fingerprint())
    new_settings, shards = replace(settings, config=config, plan=plan), settings.shards
    for k in range(shards):
        with Store.open(run / SHARDS_FOLDER / str(k) / STORE_FOLDER) as store:
            for p in range(k, len(fragments), shards):
                _write_fragment(store, p, *fragments[p], initial_fragment_path(run, p))
            store.write_settings(new_settings.to_json())
    with Store.open(run / STORE_FOLDER) as store:
        for p in range(len(fragments) if not shards else 0):
            _write_fragment(store, p, *fragments[p], initial_fragment_path(run, p))
        store.write(MembersRecord(1, (), (), trained_tokens))
        snapshot = source.info.record
        if snapshot is not None and snapshot.next_sample:
            # Samples trained after the snapshot are not in this model: lease them again, with all unmerged samples.
            unmerged = sum(end - begin for begin, end in snapshot.unmerged)
            store.write(LeaseRecord(1, snapshot.next_sample, snapshot.unmerged, (), snapshot.next_sample - unmerged))
        store.write_settings(new_settings.to_json())


def _write_fragment(
    store: Store, p: FragmentId, record: VersionRecord | None, tensors: dict[str, Tensor], initial_path: Path
) -> None:
    store.write_initial(p, {"published": tensors["published"]})
    if record is not None:
        round_id = RoundId(p, 0, store.epoch, 1)
        store.write(VersionRecord(p, 1, round_id, (), (), record.merged_tokens), tensors)
    make_folder(initial_path.parent)
    link_or_copy(store.version_path(p, 0 if record is None else 1), initial_path)


def _write_parts(source: RestoreSource, run: Path, run_id: str, log: Callable[[str], None]) -> list[int]:
    """Copy the parts of learners and return their numbers. Log and skip parts that are missing or damaged."""
    assert source.info.record is not None
    parts_by_learner = list_parts(source.run)
    learners = []
    for learner, _ in source.info.record.parts:
        # The part of this snapshot, or else the newest one before it. It may belong to a snapshot that failed.
        numbers = [number for number in parts_by_learner.get(learner, []) if number <= source.info.number]
        for number in reversed(numbers):
            path = part_path(source.run, learner, number)
            try:
                part = read_part(path)
                _copy_shards(part, run, learner)
            except (OSError, ValueError) as error:
                log(f"{path}: {error}; trying an older one")
                continue
            target, initial = part_path(run, learner, number), part_path(run / INITIAL_FOLDER, learner, number)
            make_folder(target.parent)
            make_folder(initial.parent)
            metadata = json.dumps({**part.metadata, "run": run_id}, separators=(",", ":"))
            write_file(target, encode_tensor_file(metadata, part.tensors))
            link_or_copy(target, initial)
            learners.append(learner)
            break
        else:
            log(f"learner {learner} has no part of snapshot {source.info.number} in {source.run}")
    return learners


def _copy_shards(part: LearnerPart, run: Path, learner: int) -> None:
    """Link the shard files of a part, if there are any, into the new run and its initial state."""
    if part.shards is None:
        return
    from atoll.store.sharded_parts import link_shard_files

    for folder in (run, run / INITIAL_FOLDER):
        target = shards_path(part_path(folder, learner, part.snapshot))
        make_folder(target.parent)
        link_shard_files(part.shards, target)


def initial_fragment_path(run: Path, p: FragmentId) -> Path:
    return run / INITIAL_FOLDER / f"{p:03d}.safetensors"
