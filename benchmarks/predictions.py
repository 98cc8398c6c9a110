"""What `atoll.sim.bandwidth` says of the methods of `atoll train` on thin links, to compare with what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.sim.bandwidth import (
    BACKWARD_SHARE,
    ExchangePattern,
    Workload,
    diloco,
    effective_period_steps,
    ring_delays,
    step_time_s,
    streaming,
    wire_bits,
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a run here should show: compare it with what was measured."""

    method: str
    step_s: float
    utilisation: float
    period_steps: float  # between two exchanges of the same part of the model
    sent_bit_s: float  # by one site, on average


def predict_steps(
    method: str,
    load: Workload,
    rate_bit_s: float,
    *,
    codec: str = "bf16",
    every_steps: int = 24,
    fragments: int = 24,
    tau_steps: float = 2,
    work_s: float | None = None,
) -> Prediction:
    """What `atoll train --method METHOD` does on links of this rate: `ddp`, `diloco`, `streaming` or `decoupled`.

    The baselines here sum f32 over gloo, whatever the codec. `work_s` is the real work of a step whose pace is kept by
    waiting: a paced step hides all that fits between its work and its pace. Without it the step is all work, and
    gradients hide under its backward pass. A decoupled learner never waits; its links decide how often a fragment comes
    round.

    >>> thin = Load(params=10e6, sites=4, step_s=0.5, delay_s=0.02)
    >>> ddp = predict("ddp", thin, 48e6, work_s=0.1)
    >>> round(ddp.step_s / predict("decoupled", thin, 48e6, codec="int4").step_s, 1)
    20.4
    """
    if method == "decoupled":
        every = effective_period_steps(codec, load, every_steps, rate_bit_s)
        sent = load.params * wire_bits(codec) * load.traffic_factor / (every * load.step_s) if rate_bit_s > 0.0 else 0.0
        return Prediction(method, load.step_s, 1.0, every, sent)
    if method == "ddp":
        hidden = BACKWARD_SHARE if work_s is None else max(0.0, 1.0 - work_s / load.step_s)
        exchange, period = ExchangePattern(32.0, 1.0, 1.0, hidden, sequential_delays=ring_delays(load.sites)), 1.0
    elif method == "diloco":
        exchange, period = diloco(load.sites, "f32", every_steps), float(every_steps)
    elif method == "streaming":
        exchange, period = streaming(load.sites, "f32", every_steps, fragments, tau_steps), float(every_steps)
    else:
        raise ValueError(f"there is no method {method!r}; give ddp, diloco, streaming or decoupled")
    step_s = step_time_s(exchange, load, rate_bit_s)
    sent = load.params * exchange.bits_per_step * load.traffic_factor / step_s
    return Prediction(method, step_s, load.step_s / step_s, period, sent)
