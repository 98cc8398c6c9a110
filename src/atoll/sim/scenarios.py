"""Scenarios of the swarm. A seed determines the settings, the learners, their links and all faults."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from atoll.core.types import Limits, RunConfig

DRAWN_FAULTS = (
    "kill learner",
    "pause learner",
    "second start",
    "reset link",
    "cut both ways",
    "cut uplink",
    "cut downlink",
    "cut bulk",
    "kill syncer",
    "second syncer",
    "pause syncer",
    "fail disk",
    "slow disk",
    "jump clock",
    "poison",
    "join",
    "leave",
    "invalid hello",
    "snapshot",
    "fail merge",
    "slow down",
)
OPERATOR_REQUESTS = ("pause run", "drain", "quorum", "grace")
"""Requests by operators. They are not faults, but are injected in the same way."""

FAULT_KINDS = (*DRAWN_FAULTS, "die", *OPERATOR_REQUESTS, "lose shard", "preempt")


@dataclass(frozen=True, slots=True)
class SwarmFault:
    at_s: float
    kind: str
    learner: int  # learner or shard
    duration_s: float
    magnitude: float  # depends on the kind: seconds of a clock jump, factor of a slow-down


@dataclass(frozen=True, slots=True)
class LinkConditions:
    delay_s: float
    bulk_delay_s: float  # additional delay of fragments and optimizer state
    loss_rate: float
    duplicate_rate: float


@dataclass(frozen=True, slots=True)
class SwarmScenario:
    """Settings and faults of one simulated world."""

    seed: int
    config: RunConfig
    step_times_s: dict[int, float]
    tokens_per_step: dict[int, int]
    links: dict[int, LinkConditions]
    start_times_s: dict[int, float]
    faults: tuple[SwarmFault, ...]
    fault_phase_s: float
    merge_s: float
    disk_s: float
    samples_per_step: dict[int, int] = field(default_factory=dict)  # by learner; only in a run with leases
    ends_paused: bool = False  # the finish request arrives while the run is paused
    shards: int = 0  # shard processes, which own fragment p at p % shards; 0: none
    shard_lost_at_end: int | None = None  # shard that is lost during the last merges


def draw_scenario(seed: int, small: bool = False) -> SwarmScenario:
    """Draw the scenario of a seed. Most scenarios are small and short, because most bugs need few learners."""
    rng = Random(seed)
    roll = rng.random()
    if small or roll < 0.6:
        learners, fragments, faulty_s = rng.randint(1, 4), rng.randint(1, 3), rng.uniform(10, 30)
    elif roll < 0.93:
        learners, fragments, faulty_s = rng.randint(2, 8), rng.randint(1, 6), rng.uniform(20, 60)
    else:
        learners, fragments, faulty_s = rng.randint(6, 16), rng.choice((4, 8, 24)), rng.uniform(20, 50)
    every = rng.choice((1, 2, 3, 4, 6, 8))
    quorum = 1 if rng.random() < 0.5 else rng.randint(1, learners)
    config = RunConfig(
        run_id=f"seed-{seed}",
        fragments=fragments,
        every_steps=every,
        overlap_steps=rng.randint(1, 3),
        quorum=quorum,
        grace_margin=rng.choice((0.0, 0.5, 0.5, 0.9)),
        adopt=rng.choice(("carry", "carry", "overwrite", "blend")),
        budget_merges=rng.randint(2, 12) * fragments if rng.random() < 0.1 else None,
        budget_tokens=rng.randint(1000, 40000) if rng.random() < 0.1 else None,
        snapshot_every_merges=rng.choice((0, 0, 3, 7)) * fragments,
        warmup_steps=rng.choice((0, 10)),
        rounds_in_flight=rng.choice((None, None, 1, 4)),
        fingerprint=("embedding 8x8 f32", "head 8x8 f32"),
        limits=Limits(initial_wait_s=rng.choice((3.0, 10.0)), max_wait_s=60.0, max_backoff_s=8.0),
    )
    ids = range(1, learners + 1)
    spread = rng.choice((1.0, 2.0, 20.0))
    tight = rng.random() < 0.3  # links without loss: short rounds and many races
    starts = rng.choice((0.0, 0.0, 5.0, 20.0))
    plan_links = {i: _draw_link(rng, tight) for i in (*ids, learners + 1, learners + 2)}
    plan = SwarmScenario(
        seed=seed,
        config=config,
        step_times_s={i: 0.5 * spread ** rng.random() for i in (*ids, learners + 1, learners + 2)},
        tokens_per_step={i: rng.choice((8, 100, 1000)) for i in (*ids, learners + 1, learners + 2)},
        links=plan_links,
        start_times_s={i: rng.uniform(0, starts) for i in ids},
        faults=_draw_faults(rng, learners, quorum, faulty_s),
        fault_phase_s=faulty_s,
        merge_s=rng.choice((0.0, 0.01, 0.3)),
        disk_s=rng.choice((0.0, 0.01, 0.3, 1.0)),
    )
    if seed % 8 < 5:
        plan = _with_leases(plan)
    if seed % 8 in (1, 4, 6):
        plan = _with_deaths(plan)
    return _with_preemptions(_with_shards(_with_controls(plan)))


def _with_faults(plan: SwarmScenario, faults: list[SwarmFault]) -> SwarmScenario:
    return replace(plan, faults=tuple(sorted((*plan.faults, *faults), key=lambda f: f.at_s)))


def _with_leases(plan: SwarmScenario) -> SwarmScenario:
    """Add leases of samples. A separate generator leaves scenarios without leases unchanged."""
    rng = Random(plan.seed ^ 0x1EA5E)
    lease_samples, ahead = rng.choice((3, 5, 12, 40)), rng.choice((1, 2, 4, 16))
    batches = [batch for batch in (1, 3, 8) if batch <= lease_samples * ahead]  # a larger batch could never be leased
    config = replace(plan.config, lease_samples=lease_samples, leases_ahead=ahead)
    return replace(plan, config=config, samples_per_step={i: rng.choice(batches) for i in plan.step_times_s})


def _with_deaths(plan: SwarmScenario) -> SwarmScenario:
    """Add permanent crashes of learners and short timeouts for lost learners. The generator is separate."""
    rng = Random(plan.seed ^ 0xDEAD)
    leave = {fault.learner for fault in plan.faults if fault.kind == "leave"}
    may_die = [i for i in plan.start_times_s if i not in leave]
    max_deaths = max(0, len(may_die) - plan.config.quorum)  # enough learners for a quorum must remain
    deaths = [
        SwarmFault(rng.uniform(0, plan.fault_phase_s), "die", learner, 0.0, rng.choice((2.0, 10.0)))
        for learner in rng.sample(may_die, rng.randint(0, max_deaths))
    ]
    limits = replace(plan.config.limits, lost_after_s=rng.choice((2.0, 8.0, 30.0)))
    return _with_faults(replace(plan, config=replace(plan.config, limits=limits)), deaths)


def _with_controls(plan: SwarmScenario) -> SwarmScenario:
    """Add requests by operators to some scenarios: pause, drain, quorum, grace. The generator is separate."""
    rng = Random(plan.seed ^ 0xC0DEA5)  # this constant keeps the scenarios of the seeds in tests
    if rng.random() < 0.7:
        return plan
    out = {fault.learner for fault in plan.faults if fault.kind in ("leave", "die")}
    staying = [i for i in plan.start_times_s if i not in out]
    requests: list[SwarmFault] = []

    def add_request(kind: str, learner: int = 0, size: float = 0.0) -> None:
        duration_s = rng.choice((0.05, 1.0, 5.0, 20.0, 60.0)) * rng.random()
        requests.append(SwarmFault(rng.uniform(0, plan.fault_phase_s), kind, learner, duration_s, size))

    if len(staying) > plan.config.quorum and rng.random() < 0.4:  # enough learners for a quorum must remain
        add_request("drain", staying.pop(rng.randrange(len(staying))))
    for _ in range(rng.randint(0, 3)):
        add_request("pause run")
    for _ in range(rng.randint(0, 2)):
        add_request("quorum", size=rng.randint(1, max(1, len(staying))))
    for _ in range(rng.randint(0, 1)):
        add_request("grace", size=rng.choice((0.0, 0.5, 0.9)))
    return _with_faults(replace(plan, ends_paused=rng.random() < 0.3), requests)


def _with_shards(plan: SwarmScenario) -> SwarmScenario:
    """Add shard processes that fail temporarily to some scenarios. The generator is separate."""
    rng = Random(plan.seed ^ 0x2676E)  # this constant keeps the scenarios of the seeds in tests
    if rng.random() < 0.6:
        return plan
    shards = rng.randint(1, min(4, plan.config.fragments))
    lost = [
        SwarmFault(
            rng.uniform(0, plan.fault_phase_s),
            "lose shard",
            rng.randrange(shards),
            rng.choice((0.05, 1.0, 5.0, 20.0, 60.0)) * rng.random(),
            0.0,
        )
        for _ in range(rng.randint(0, 5))
    ]
    lost_at_end = rng.randrange(shards) if rng.random() < 0.4 else None
    return _with_faults(replace(plan, shards=shards, shard_lost_at_end=lost_at_end), lost)


def _with_preemptions(plan: SwarmScenario) -> SwarmScenario:
    """Add preemptions with a notice to some scenarios; many learners return. The generator is separate."""
    rng = Random(plan.seed ^ 0x4071CE)
    if rng.random() < 0.6:
        return plan
    out = {fault.learner for fault in plan.faults if fault.kind in ("leave", "die", "drain")}
    staying = [i for i in plan.start_times_s if i not in out]
    quorum = max([plan.config.quorum, *(int(f.magnitude) for f in plan.faults if f.kind == "quorum")])
    spare = len(staying) - quorum  # learners that may leave for good
    preemptions: list[SwarmFault] = []
    at_s = rng.uniform(0, plan.fault_phase_s)
    for learner in rng.sample(staying, rng.randint(1, max(1, min(3, len(staying))))) if staying else ():
        at_s = at_s if rng.random() < 0.5 else rng.uniform(0, plan.fault_phase_s)  # several at once
        comes_back = spare <= 0 or rng.random() < 0.5
        spare -= not comes_back
        duration_s = rng.choice((0.5, 10.0, 60.0, 120.0)) * rng.random()
        preemptions.append(SwarmFault(at_s, "preempt", learner, duration_s, 10.0 if comes_back else 2.0))
    return _with_faults(plan, preemptions)


def _draw_link(rng: Random, tight: bool) -> LinkConditions:
    if tight:
        return LinkConditions(rng.choice((0.0, 0.01)), rng.choice((0.0, 0.05)), 0.0, 0.0)
    return LinkConditions(
        delay_s=rng.choice((0.01, 0.1, 0.5, 1.5)) * rng.random(),
        bulk_delay_s=rng.choice((0.0, 0.2, 2.0)) * rng.random(),
        loss_rate=rng.choice((0.0, 0.0, 0.01, 0.1)),
        duplicate_rate=rng.choice((0.0, 0.0, 0.1)),
    )


def _draw_faults(rng: Random, learners: int, quorum: int, faulty_s: float) -> tuple[SwarmFault, ...]:
    """Draw faults of a few kinds. Repeated faults of few kinds find more bugs than single faults of all kinds."""
    kinds = rng.sample(DRAWN_FAULTS, rng.randint(0, 6))
    faults: list[SwarmFault] = []
    leavers = max(0, learners - quorum)  # a quorum must stay after healing
    for _ in range(rng.randint(0, 12) if kinds else 0):
        kind = rng.choice(kinds)
        learner = rng.randint(1, learners)
        if kind == "leave":
            if leavers == 0:
                continue
            leavers -= 1
            learner = learners - leavers  # each learner leaves at most once
        if kind == "join":
            learner = learners + rng.randint(1, 2)
        size = rng.choice((0.1, 3.0, 30.0, 200.0, -50.0)) if kind == "jump clock" else rng.choice((2.0, 10.0))
        faults.append(
            SwarmFault(
                rng.uniform(0, faulty_s), kind, learner, rng.choice((0.05, 1.0, 5.0, 20.0, 60.0)) * rng.random(), size
            )
        )
    return tuple(sorted(faults, key=lambda f: f.at_s))
