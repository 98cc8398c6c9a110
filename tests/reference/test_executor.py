"""Tensors that follow a tape: through faults, joins and restarts, and to the same bits each time."""

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
"""Small worlds in which a syncer is started again, and a learner takes the optimizer state of a peer."""


SHARDED = {"shard-recovered": (8, 130), "shard-version-lost": (13, 78), "both": (149,)}
"""Small worlds in which a shard comes back with the version that it was writing, or without."""


def run_world(seed: int) -> tuple[SwarmWorld, TapeExecutor, list[Entry], list[Any]]:
    """A hostile world with real tensors in it. Digests are compared at every version that anybody receives."""
    drawn = draw_scenario(seed, small=True)
    plan = tiny.tiny_plan(drawn.config.fragments)
    execution = tiny.execute(drawn.config, INT8, plan, make=light_trainee, history=8, check_digests=True)
    entries: list[Entry] = []
    starts: list[Any] = []

    def on_entry(entry: Entry) -> None:
        entries.append(entry)
        execution.apply(entry)

    def on_start(actor, restored) -> None:
        starts.append((len(entries), actor, restored))
        execution.start_process(actor, restored)

    world = SwarmWorld(drawn, on_entry=on_entry, on_start=on_start)
    world.run()
    return world, execution, entries, starts


def light_trainee(actor: Actor) -> ReplayLearner:
    """Parameters that move by themselves: a world has many steps."""
    model = tiny.new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(actor.learner * 100 + actor.generation)

    def take_step(info: StepInfo) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    return ReplayLearner(model, optimizer, take_step)


@pytest.mark.parametrize("seed", SEEDS)
def test_in_a_hostile_world_every_learner_holds_the_published_bits(seed):
    world, execution, _, starts = run_world(seed)
    assert any(restored is not None and restored.versions for _, _, restored in starts)
    assert world.coverage()[1]["state-from-peer"] > 0
    assert execution.compared_digests > 10
    assert execution.contributions > 0
    assert world.driver.syncer is not None
    assert [f.version for f in world.driver.syncer.core.state.fragments.values()] == execution.syncer.versions


@pytest.mark.parametrize(("seed", "what"), [(seed, what) for what, seeds in SHARDED.items() for seed in seeds])
def test_in_a_world_of_shards_every_learner_holds_the_published_bits(seed, what):
    """A version may be published by the word of a shard that is back, or be merged a second time."""
    world, execution, _, _ = run_world(seed)
    said = world.coverage()[1]
    assert all(said[code] for code in (("shard-recovered", "shard-version-lost") if what == "both" else (what,)))
    assert execution.compared_digests > 10
    assert world.driver.syncer is not None
    assert [f.version for f in world.driver.syncer.core.state.fragments.values()] == execution.syncer.versions


@pytest.mark.parametrize("before", [0, 2])
def test_a_step_that_was_lost_with_a_shard_leaves_no_trace(before):
    """Neither in the value nor in momentum, breadth and usual sizes: what follows is as if it had never been made."""
    plan = tiny.tiny_plan(2)
    up, generator = get_codec("int8"), torch.Generator().manual_seed(3)
    deltas = [torch.randn(plan.numel(0), generator=generator) for _ in range(before + 2)]

    def merged(rounds: list[int], lost: int | None) -> str:
        values = initial_values(tiny.new_model(), plan)
        tensors = SyncerTensors([SyncerFragment(plan, p, INT8, 0, value) for p, value in enumerate(values)])
        version = 0
        for place in rounds:
            round_id = RoundId(0, version, 1, place + 1)
            accepted = AcceptedContribution(1, 1, 2, 2, 100 * (place + 1), 200, 0, 1.0 + place)
            data = ErrorFeedback(up, plan.numel(0)).encode(deltas[place])
            tensors.fragments[0].accumulate(round_id, accepted, data, up.name)
            tensors.merging[round_id] = MergeRound(round_id, (accepted,), Reason("round-merged"))
            tensors.merge(round_id)
            if place == lost:
                tensors.discard(round_id)
            else:
                version += 1
                tensors.publish(0)
        assert tensors.versions[0] == version
        return tensor_digest(torch.cat([tensors.fragments[0].served.value, tensors.fragments[0].outer_optimizer.value]))

    every = list(range(before + 2))
    without = [place for place in every if place != before]
    assert merged(every, lost=before) == merged(without, lost=None)
    assert merged(every, lost=before) != merged(every, lost=None)


def test_the_same_entries_give_the_same_bits():
    _, execution, entries, starts = run_world(SEEDS[0])
    again = tiny.execute(execution.config, INT8, execution.plan, make=light_trainee, history=8, check_digests=True)
    for place, entry in enumerate(entries):
        for _, actor, restored in (s for s in starts if s[0] == place):
            again.start_process(actor, restored)
        again.apply(entry)
    assert [tensor_digest(v) for v in again.published()] == [tensor_digest(v) for v in execution.published()]
    assert again.digests == execution.digests
    for actor, learner in execution.learners.items():
        theirs = again.learners[actor].replay.model.state_dict()
        assert all(torch.equal(v, theirs[n]) for n, v in learner.replay.model.state_dict().items())


@pytest.mark.parametrize("seed", [27, 67, 88])
def test_the_samples_of_every_step_follow_from_the_tape(seed):
    """Leases as they arrived, and how many were taken: a lease that comes twice, late or on an old link included."""
    drawn = draw_scenario(seed, small=True)
    assert drawn.config.lease_samples
    taken: dict[Actor, list[tuple[int, ...]]] = {}

    def make(actor: Actor) -> ReplayLearner:
        steps = taken.setdefault(actor, [])
        return ReplayLearner(
            tiny.new_model(), None, lambda info: steps.append(info.samples), drawn.samples_per_step[actor.learner]
        )

    execution = tiny.execute(drawn.config, INT8, tiny.tiny_plan(drawn.config.fragments), make=make, history=8)
    world = SwarmWorld(drawn, on_entry=execution.apply, on_start=execution.start_process)
    world.run()
    processes = {Actor(*key): proc.core for key, proc in world.driver.processes_by_actor.items()}
    assert processes
    for actor, core in processes.items():
        batch, steps = drawn.samples_per_step[actor.learner], taken[actor]
        assert all(len(step) == batch for step in steps)
        line = [n for _, (b, e) in sorted(execution.learners[actor].leases.items()) for n in range(b, e)]
        assert list(dict.fromkeys(n for step in steps for n in step)) == line[: core.state.consumed_samples]
        assert len(steps) == core.state.step
    assert world.coverage()[1]["leases-returned"] + sum(core.state.repeated for core in processes.values()) > 0


def paced(config: RunConfig, execution: TapeExecutor, starts: dict[int, float] | None = None) -> Paced:
    drawn = Paced.drawn(config, tiny.tokens_of(3), {1: 1.0, 2: 0.9, 3: 0.5}, seed=1)
    if starts is not None:
        drawn = replace(drawn, start_times_s=starts)
    driver = Paced(drawn, on_entry=execution.apply, on_start=execution.start_process)
    driver.run()
    return driver


CONFIG = RunConfig(fragments=3, every_steps=4, budget_tokens=70 * tiny.TOKENS)


def test_a_learner_that_joins_goes_on_with_a_peers_moments():
    counted: dict[int, float] = {}  # Adam's own count of steps, before the learner's first

    def make(actor: Actor) -> ReplayLearner:
        trainee = tiny.trainee(actor)
        train = trainee.take_step

        def take_step(info: StepInfo) -> float | None:
            if info.step == 0:
                assert trainee.optimizer is not None
                states = list(trainee.optimizer.state.values())
                counted[actor.learner] = max((float(s["step"]) for s in states), default=0.0)
            return train(info)

        return ReplayLearner(trainee.model, trainee.optimizer, take_step)

    execution = tiny.execute(CONFIG, Numerics(), tiny.tiny_plan(3), make=make, check_digests=True)
    paced(CONFIG, execution, starts={1: 0.0, 2: 0.1, 3: 12.0})
    assert counted[1] == counted[2] == 0
    assert counted[3] > 5


def test_progress_is_that_of_all_learners():
    seen: list[tuple[int, StepInfo]] = []

    def make(actor: Actor) -> ReplayLearner:
        model = tiny.new_model()
        return ReplayLearner(model, None, lambda info: seen.append((actor.learner, info)))

    execution = tiny.execute(CONFIG, Numerics(), tiny.tiny_plan(3), make=make)
    paced(CONFIG, execution)
    shares = [info.progress for _, info in seen]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[70] == 1.0
    assert all(info.known_progress <= info.progress for _, info in seen)
    assert [info.step for learner, info in seen if learner == 3] == list(range(execution.learners[Actor(3, 1)].step))


def test_a_version_is_published_when_it_is_durable_and_not_before():
    plan = tiny.tiny_plan(1)
    config = tiny.lockstep_config(plan, learners=2, every=3)
    execution = tiny.execute(config, tiny.EXACT, plan)
    values = []

    def on_entry(entry: Entry) -> None:
        before = execution.published()[0] if execution.syncers else None
        execution.apply(entry)
        if before is not None and execution.published()[0] is not before:
            assert type(entry.event) is Persisted
            values.append(before.clone())

    run = Lockstep(config, tiny.tokens_of(2), on_entry)
    for _ in range(8):
        run.step()
    assert len(values) == run.syncer.state.merges == 3
    assert not torch.equal(values[1], values[2])


def test_a_version_on_its_way_to_a_learner_that_has_left_is_for_nobody():
    """Its core acknowledges it still, although what the update refers to is gone with the learner."""
    plan = tiny.tiny_plan(1)
    config = tiny.lockstep_config(plan, learners=2, every=3)
    execution = tiny.execute(config, tiny.EXACT, plan)
    leaver = Actor(2, 1)
    acknowledged: list[PublishAck] = []

    def on_entry(entry: Entry) -> None:
        execution.apply(entry)
        if entry.actor == leaver and execution.learners[leaver].is_stopped:
            sent = [effect.envelope.body for effect in entry.effects if type(effect) is Send]
            acknowledged.extend(body for body in sent if type(body) is PublishAck)

    run = Lockstep(config, tiny.tokens_of(2), on_entry, overlap=2)
    while run.syncer.state.merges < 2:
        run.step()
    run.driver.handle_event(run.driver.learners[leaver.learner], LeaveRequested("enough"))
    for _ in range(3):
        run.step()
    assert acknowledged == [PublishAck(0, 2)], "the version arrived after it had left"
    assert execution.learners[leaver].values == {}


def test_the_mean_of_learners_is_what_its_name_says_and_values_go_back_into_a_model():
    plan = tiny.tiny_plan(2)
    config = tiny.lockstep_config(plan, learners=3, every=5)
    execution = tiny.execute(config, tiny.EXACT, plan)
    run = Lockstep(config, tiny.tokens_of(3), execution.apply)
    for _ in range(4):
        run.step()
    model = tiny.new_model()
    load_values(model, plan, mean_of_learners(execution))
    learners = [dict(tensors.replay.model.named_parameters()) for tensors in execution.learners.values()]
    for name, parameter in model.named_parameters():
        mean = torch.stack([learner[name].detach() for learner in learners]).mean(0)
        assert torch.equal(parameter.detach(), mean)


def test_a_lockstep_run_ends_with_everything_merged_and_everybody_at_the_published_model():
    plan = tiny.tiny_plan(3)
    config = tiny.lockstep_config(plan, learners=2, every=6, overlap_steps=2)
    execution = tiny.execute(config, Numerics(), plan)
    run = Lockstep(config, tiny.tokens_of(2), execution.apply, overlap=2)
    for _ in range(14):  # no fragment is merged at this step
        run.step()
    run.finish()
    assert run.steps == 14
    assert all(learner.is_stopped for learner in execution.learners.values())
    assert all(run.syncer.state.ledger.merged(p) == execution.tokens for p in range(3))


def test_bytes_are_counted_as_they_would_travel():
    plan = tiny.tiny_plan(1)
    config = tiny.lockstep_config(plan, learners=2, every=4)
    execution = tiny.execute(config, Numerics(up="int4", down="bf16"), plan)
    run = Lockstep(config, tiny.tokens_of(2), execution.apply)
    for _ in range(9):
        run.step()
    assert run.syncer.state.merges == 3
    assert execution.bytes_up == 2 * 3 * get_codec(execution.numerics.upload_codecs[0]).encoded_size(plan.numel(0))
    assert execution.bytes_down == 2 * 4 * plan.numel(0) + 2 * 3 * 2 * plan.numel(0)


def test_fragments_that_do_not_fit_are_refused():
    plan = tiny.tiny_plan(2)
    with pytest.raises(ValueError, match="make all three from one plan"):
        TapeExecutor(RunConfig(fragments=3), Numerics(), plan, initial_values(tiny.new_model(), plan), tiny.trainee)
