"""Tests of the tape executor: faults, joins and restarts, and the same bits in every execution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from atoll.core.protocol import LeaveRequested, MergeRound, Persisted, PublishAck, Send
from atoll.core.reasons import Reason
from atoll.core.types import AcceptedContribution, RoundId, RunConfig
from atoll.reference.tape_executor import (
    ReplayLearner,
    StepInfo,
    SyncerTensors,
    TapeExecutor,
    initial_values,
    load_values,
)
from atoll.sim.scenarios import draw_scenario
from atoll.sim.world import SwarmWorld
from atoll.tape.format import Actor, Entry
from atoll.tensors.codecs import ErrorFeedback, get_codec
from atoll.tensors.plan import tensor_digest
from atoll.tensors.settings import Numerics
from atoll.tensors.syncer_fragment import SyncerFragment
from tests.reference import tiny
from tests.reference.lockstep import Lockstep, Paced, mean_of_learners

INT8 = Numerics(outer_lr=0.4, outer_momentum=0.9, up="int8", down="int8")

SEEDS = (27, 66, 67, 88, 89, 173, 233, 396)
"""Seeds of small worlds in which the syncer restarts and a learner receives the optimizer state of a peer."""


SHARDED = {"shard-recovered": (8, 130), "shard-version-lost": (13, 78), "both": (149,)}
"""Seeds of small worlds in which a shard restarts with or without the version that it was writing."""


def run_world(seed: int) -> tuple[SwarmWorld, TapeExecutor, list[Entry], list[Any]]:
    """Run a world with faults and real tensors. Digests are compared at every version that a learner receives."""
    scenario = draw_scenario(seed, small=True)
    plan = tiny.tiny_plan(scenario.config.fragments)
    executor = tiny.make_executor(scenario.config, INT8, plan, make=make_light_learner, history=8, check_digests=True)
    entries: list[Entry] = []
    starts: list[Any] = []

    def on_entry(entry: Entry) -> None:
        entries.append(entry)
        executor.apply(entry)

    def on_start(actor, restored) -> None:
        starts.append((len(entries), actor, restored))
        executor.start_process(actor, restored)

    world = SwarmWorld(scenario, on_entry=on_entry, on_start=on_start)
    world.run()
    return world, executor, entries, starts


def make_light_learner(actor: Actor) -> ReplayLearner:
    """Make a learner with random gradients, because a world has too many steps for real training."""
    model = tiny.new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(actor.learner * 100 + actor.generation)

    def take_step(info: StepInfo) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    return ReplayLearner(model, optimizer, take_step)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_learner_has_the_published_bits_in_a_world_with_faults(seed):
    world, executor, _, starts = run_world(seed)
    assert any(restored is not None and restored.versions for _, _, restored in starts)
    assert world.coverage()[1]["state-from-peer"] > 0
    assert executor.compared_digests > 10
    assert executor.contributions > 0
    assert world.driver.syncer is not None
    assert [f.version for f in world.driver.syncer.core.state.fragments.values()] == executor.syncer.versions


@pytest.mark.parametrize(("seed", "what"), [(seed, what) for what, seeds in SHARDED.items() for seed in seeds])
def test_every_learner_has_the_published_bits_in_a_world_with_lost_shards(seed, what):
    """A restarted shard may report that its version is durable, or the version is merged a second time."""
    world, executor, _, _ = run_world(seed)
    reason_counts = world.coverage()[1]
    assert all(
        reason_counts[code] for code in (("shard-recovered", "shard-version-lost") if what == "both" else (what,))
    )
    assert executor.compared_digests > 10
    assert world.driver.syncer is not None
    assert [f.version for f in world.driver.syncer.core.state.fragments.values()] == executor.syncer.versions


@pytest.mark.parametrize("before", [0, 2])
def test_outer_step_that_is_lost_with_a_shard_has_no_effect(before):
    """It must not change the value, the momentum, the breadth or the usual norms, on which later steps depend."""
    plan = tiny.tiny_plan(2)
    up, generator = get_codec("int8"), torch.Generator().manual_seed(3)
    deltas = [torch.randn(plan.numel(0), generator=generator) for _ in range(before + 2)]

    def merged(rounds: list[int], lost: int | None) -> str:
        values = initial_values(tiny.new_model(), plan)
        tensors = SyncerTensors([SyncerFragment(plan, p, INT8, 0, value) for p, value in enumerate(values)])
        version = 0
        for i in rounds:
            round_id = RoundId(0, version, 1, i + 1)
            accepted = AcceptedContribution(1, 1, 2, 2, 100 * (i + 1), 200, 0, 1.0 + i)
            data = ErrorFeedback(up, plan.numel(0)).encode(deltas[i])
            tensors.fragments[0].accumulate(round_id, accepted, data, up.name)
            tensors.merging[round_id] = MergeRound(round_id, (accepted,), Reason("round-merged"))
            tensors.merge(round_id)
            if i == lost:
                tensors.discard(round_id)
            else:
                version += 1
                tensors.publish(0)
        assert tensors.versions[0] == version
        return tensor_digest(torch.cat([tensors.fragments[0].served.value, tensors.fragments[0].outer_optimizer.value]))

    all_rounds = list(range(before + 2))
    without = [i for i in all_rounds if i != before]
    assert merged(all_rounds, lost=before) == merged(without, lost=None)
    assert merged(all_rounds, lost=before) != merged(all_rounds, lost=None)


def test_same_entries_give_the_same_bits():
    _, executor, entries, starts = run_world(SEEDS[0])
    again = tiny.make_executor(
        executor.config, INT8, executor.plan, make=make_light_learner, history=8, check_digests=True
    )
    for i, entry in enumerate(entries):
        for _, actor, restored in (s for s in starts if s[0] == i):
            again.start_process(actor, restored)
        again.apply(entry)
    assert [tensor_digest(v) for v in again.published()] == [tensor_digest(v) for v in executor.published()]
    assert again.digests == executor.digests
    for actor, learner in executor.learners.items():
        theirs = again.learners[actor].replay.model.state_dict()
        assert all(torch.equal(v, theirs[n]) for n, v in learner.replay.model.state_dict().items())


@pytest.mark.parametrize("seed", [27, 67, 88])
def test_samples_of_every_step_follow_from_the_tape(seed):
    """Leases may arrive twice, late or on an old session."""
    scenario = draw_scenario(seed, small=True)
    assert scenario.config.lease_samples
    taken: dict[Actor, list[tuple[int, ...]]] = {}

    def make(actor: Actor) -> ReplayLearner:
        steps = taken.setdefault(actor, [])
        return ReplayLearner(
            tiny.new_model(), None, lambda info: steps.append(info.samples), scenario.samples_per_step[actor.learner]
        )

    executor = tiny.make_executor(
        scenario.config, INT8, tiny.tiny_plan(scenario.config.fragments), make=make, history=8
    )
    world = SwarmWorld(scenario, on_entry=executor.apply, on_start=executor.start_process)
    world.run()
    processes = {Actor(*key): proc.core for key, proc in world.driver.processes_by_actor.items()}
    assert processes
    for actor, core in processes.items():
        batch, steps = scenario.samples_per_step[actor.learner], taken[actor]
        assert all(len(step) == batch for step in steps)
        line = [n for _, (b, e) in sorted(executor.learners[actor].leases.items()) for n in range(b, e)]
        assert list(dict.fromkeys(n for step in steps for n in step)) == line[: core.state.consumed_samples]
        assert len(steps) == core.state.step
    assert world.coverage()[1]["leases-returned"] + sum(core.state.repeated for core in processes.values()) > 0


def paced(config: RunConfig, executor: TapeExecutor, starts: dict[int, float] | None = None) -> Paced:
    scenario = Paced.make_scenario(config, tiny.tokens_by_learner(3), {1: 1.0, 2: 0.9, 3: 0.5}, seed=1)
    if starts is not None:
        scenario = replace(scenario, start_times_s=starts)
    driver = Paced(scenario, on_entry=executor.apply, on_start=executor.start_process)
    driver.run()
    return driver


CONFIG = RunConfig(fragments=3, every_steps=4, budget_tokens=70 * tiny.TOKENS)


def test_joining_learner_continues_with_the_optimizer_state_of_a_peer():
    counted: dict[int, float] = {}  # Adam's step count before the first step, by learner

    def make(actor: Actor) -> ReplayLearner:
        learner = tiny.make_learner(actor)
        train = learner.take_step

        def take_step(info: StepInfo) -> float | None:
            if info.step == 0:
                assert learner.optimizer is not None
                states = list(learner.optimizer.state.values())
                counted[actor.learner] = max((float(s["step"]) for s in states), default=0.0)
            return train(info)

        return ReplayLearner(learner.model, learner.optimizer, take_step)

    executor = tiny.make_executor(CONFIG, Numerics(), tiny.tiny_plan(3), make=make, check_digests=True)
    paced(CONFIG, executor, starts={1: 0.0, 2: 0.1, 3: 12.0})
    assert counted[1] == counted[2] == 0
    assert counted[3] > 5


def test_progress_counts_the_tokens_of_all_learners():
    seen: list[tuple[int, StepInfo]] = []

    def make(actor: Actor) -> ReplayLearner:
        model = tiny.new_model()
        return ReplayLearner(model, None, lambda info: seen.append((actor.learner, info)))

    executor = tiny.make_executor(CONFIG, Numerics(), tiny.tiny_plan(3), make=make)
    paced(CONFIG, executor)
    shares = [info.progress for _, info in seen]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[70] == 1.0
    assert all(info.known_progress <= info.progress for _, info in seen)
    assert [info.step for learner, info in seen if learner == 3] == list(range(executor.learners[Actor(3, 1)].step))


def test_version_is_published_only_when_it_is_durable():
    plan = tiny.tiny_plan(1)
    config = tiny.lockstep_config(plan, learners=2, every=3)
    executor = tiny.make_executor(config, tiny.EXACT, plan)
    values = []

    def on_entry(entry: Entry) -> None:
        before = executor.published()[0] if executor.syncers else None
        executor.apply(entry)
        if before is not None and executor.published()[0] is not before:
            assert type(entry.event) is Persisted
            values.append(before.clone())

    run = Lockstep(config, tiny.tokens_by_learner(2), on_entry)
    for _ in range(8):
        run.step()
    assert len(values) == run.syncer.state.merges == 3
    assert not torch.equal(values[1], values[2])


def test_version_that_arrives_after_the_learner_has_left_is_ignored():
    """The core still acknowledges the version, although the base of the update was released."""
    plan = tiny.tiny_plan(1)
    config = tiny.lockstep_config(plan, learners=2, every=3)
    executor = tiny.make_executor(config, tiny.EXACT, plan)
    leaving = Actor(2, 1)
    acknowledged: list[PublishAck] = []

    def on_entry(entry: Entry) -> None:
        executor.apply(entry)
        if entry.actor == leaving and executor.learners[leaving].is_stopped:
            sent = [effect.envelope.body for effect in entry.effects if type(effect) is Send]
            acknowledged.extend(body for body in sent if type(body) is PublishAck)

    run = Lockstep(config, tiny.tokens_by_learner(2), on_entry, overlap=2)
    while run.syncer.state.merges < 2:
        run.step()
    run.driver.handle_event(run.driver.learners[leaving.learner], LeaveRequested("enough"))
    for _ in range(3):
        run.step()
    assert acknowledged == [PublishAck(0, 2)], "no version arrived after the learner had left"
    assert executor.learners[leaving].values == {}


def test_mean_of_learners_is_loaded_into_a_model():
    plan = tiny.tiny_plan(2)
    config = tiny.lockstep_config(plan, learners=3, every=5)
    executor = tiny.make_executor(config, tiny.EXACT, plan)
    run = Lockstep(config, tiny.tokens_by_learner(3), executor.apply)
    for _ in range(4):
        run.step()
    model = tiny.new_model()
    load_values(model, plan, mean_of_learners(executor))
    learners = [dict(tensors.replay.model.named_parameters()) for tensors in executor.learners.values()]
    for name, parameter in model.named_parameters():
        mean = torch.stack([learner[name].detach() for learner in learners]).mean(0)
        assert torch.equal(parameter.detach(), mean)


def test_finished_lockstep_run_has_merged_all_tokens():
    plan = tiny.tiny_plan(3)
    config = tiny.lockstep_config(plan, learners=2, every=6, overlap_steps=2)
    executor = tiny.make_executor(config, Numerics(), plan)
    run = Lockstep(config, tiny.tokens_by_learner(2), executor.apply, overlap=2)
    for _ in range(14):  # no fragment is merged at this step
        run.step()
    run.finish()
    assert run.steps == 14
    assert all(learner.is_stopped for learner in executor.learners.values())
    assert all(run.syncer.state.ledger.merged(p) == executor.tokens for p in range(3))


def test_bytes_are_counted_in_encoded_size():
    plan = tiny.tiny_plan(1)
    config = tiny.lockstep_config(plan, learners=2, every=4)
    executor = tiny.make_executor(config, Numerics(up="int4", down="bf16"), plan)
    run = Lockstep(config, tiny.tokens_by_learner(2), executor.apply)
    for _ in range(9):
        run.step()
    assert run.syncer.state.merges == 3
    assert executor.bytes_up == 2 * 3 * get_codec(executor.numerics.upload_codecs[0]).encoded_size(plan.numel(0))
    assert executor.bytes_down == 2 * 4 * plan.numel(0) + 2 * 3 * 2 * plan.numel(0)


def test_config_with_another_number_of_fragments_is_refused():
    plan = tiny.tiny_plan(2)
    with pytest.raises(ValueError, match="make all three from one plan"):
        TapeExecutor(
            RunConfig(fragments=3), Numerics(), plan, initial_values(tiny.new_model(), plan), tiny.make_learner
        )
