"""The outer optimizer of one fragment at the syncer, and what of its value has been published.

Nesterov, with D the merged delta: b <- mu b + D; Theta <- Theta - eta (D + mu b). With a ramp of R the n-th step has
eta_n = 1 + (eta - 1) min(1, n / R) and mu_n = mu min(1, n / R): at first all learners go the same way and their average
is the step; only later, when what they differ in is noise, the outer optimizer has to make up for it.

The breadth of a merge is the share of the learners that took part in it, weighted by their usual tokens per inner step.
A merge from which learners are missing says less and comes sooner after the last one (in tokens), so D is multiplied by
its breadth. All learners present, or one alone: the factor is exactly 1, however much tokens per step vary.

Optimizers are those of torch.optim, on flat parameters that share their memory with the value. Only elementwise ones
will do: a fragment is a run of pieces of many tensors, and what it is cut into must not change the result. That is
tried out, not listed.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import deque
from collections.abc import Mapping
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn

from atoll.tensors.codecs import CHUNK_NUMEL, Codec, Scratch, chunk_ranges, ensure_aligned
from atoll.tensors.merge import square_norm
from atoll.tensors.plan import FragmentPlan
from atoll.tensors.settings import Numerics

OUTER_ALIASES = {"nesterov": "SGD", "sgd": "SGD", "adam": "Adam"}

STEP_COUNT_KEY = "steps"
"""Name of the count in the state of an optimizer with a ramp."""

MOMENTUM_KEYS = ("momentum_buffer", "exp_avg")
"""Names of torch's optimizers for the mean of past gradients."""

PARTICIPATION_KEY = "breadth"
PARTICIPATION_WINDOW = 16
"""Merges that `ParticipationTracker` keeps: after a learner has left for good, one less than this many outer steps are
smaller."""

ERROR_SAMPLE_INTERVAL = 4
"""What rounding leaves out of an update is measured in every so many-th chunk: it costs more than other figures."""

VECTOR_LANES = 64
"""Values that fill the vector registers of every CPU evenly. Torch's fused kernels round the values after the last full
register in another way (in f64), so no parameter here has such: the rest of a run is stepped in padded memory."""


def _build(numerics: Numerics, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer with the settings that it knows: lr, mu as `momentum` or first beta, and torch's fused kernels.

    On the CPU those are four to eight times as fast: one pass over memory instead of several, and no temporaries.
    """
    found: type[torch.optim.Optimizer] = getattr(torch.optim, OUTER_ALIASES.get(numerics.outer, numerics.outer))
    known = inspect.signature(found).parameters
    settings: dict[str, Any] = {"lr": numerics.outer_lr}
    if "momentum" in known:
        settings["momentum"] = numerics.outer_momentum
    if "betas" in known:
        settings["betas"] = (numerics.outer_momentum, known["betas"].default[1])
    if numerics.outer == "nesterov":
        settings["nesterov"] = numerics.outer_momentum > 0.0  # without momentum it is plain gradient descent
    if "fused" in known:
        settings["fused"] = True
    return found(parameters, **settings)


def _try_out(numerics: Numerics) -> dict[str, bool]:
    """The names of the state per parameter, and whether it is as long as the parameter.

    Takes three steps on the same values in one parameter and in two, and raises ValueError where the results differ.
    """

    def steps(values: list[nn.Parameter]) -> tuple[Tensor, torch.optim.Optimizer]:
        optimizer = _build(numerics, values)
        for scale in (1.0, -0.25, 3.0):
            for parameter, part in zip(values, gradient.mul(scale).chunk(len(values)), strict=True):
                parameter.grad = part.clone()
            optimizer.step()
        return torch.cat([v.detach() for v in values]), optimizer

    start = torch.linspace(-1.0, 2.0, 2 * VECTOR_LANES)
    gradient = torch.linspace(4.0, -1.0, 2 * VECTOR_LANES)
    whole = nn.Parameter(start.clone())
    result, optimizer = steps([whole])
    halves, _ = steps([nn.Parameter(half.clone()) for half in start.chunk(2)])
    if not torch.equal(result, halves):
        raise ValueError("it is not elementwise: the step of one value depends on others")
    state = {name: _tensor(value) for name, value in optimizer.state[whole].items() if value is not None}
    return {name: value.shape == whole.shape for name, value in state.items()}


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _is_optimizer(found: object) -> bool:
    return inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer


@functools.cache
def supported_outer_optimizers() -> tuple[str, ...]:
    """What `Numerics.outer` may be with the torch that is installed."""

    def works(name: str) -> bool:
        try:
            _try_out(Numerics(outer=name, outer_lr=0.1))
        except Exception:  # whatever an optimizer has against flat parameters
            return False
        return True

    classes = sorted(name for name, found in vars(torch.optim).items() if _is_optimizer(found))
    return tuple(filter(works, (*OUTER_ALIASES, *classes)))


@functools.cache
def outer_state_names(outer: str, momentum: float) -> dict[str, bool]:
    """The names of the state that this optimizer keeps, and whether there is one number per value.

    ValueError, with the names that would work, where it cannot step flat fragments.
    """
    if not _is_optimizer(getattr(torch.optim, OUTER_ALIASES.get(outer, outer), None)):
        raise ValueError(
            f"torch.optim has no optimizer {outer!r}; give one of {', '.join(supported_outer_optimizers())}"
        )
    try:
        return _try_out(Numerics(outer=outer, outer_lr=0.1, outer_momentum=momentum))
    except Exception as error:  # whatever an optimizer has against flat parameters, it is the answer
        why = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(
            f"{outer} cannot step flat fragments ({why}); give one of {', '.join(supported_outer_optimizers())}"
        ) from error


class _Rest:
    """The values of a run after its last full register: a padded copy, stepped with the others and copied back."""

    def __init__(self, value: Tensor, begin: int, end: int) -> None:
        self.begin, self.end, self.value = begin, end, value
        self.parameter = nn.Parameter(torch.zeros(VECTOR_LANES))
        self.gradient = torch.zeros(VECTOR_LANES)

    def take(self, delta: Tensor) -> None:
        self.parameter.data[: self.end - self.begin] = self.value[self.begin : self.end]
        self.gradient[: self.end - self.begin] = delta[self.begin : self.end]

    def give(self) -> None:
        self.value[self.begin : self.end] = self.parameter.data[: self.end - self.begin]


class ParticipationTracker:
    """Which learners took part in the last merges of one fragment, with how many tokens per inner step.

    The usual tokens per step of a learner are the median over its contributions to these merges, so a single wrong
    report, or steps of uneven length, move nothing. A learner outside the window is forgotten.

    >>> breadth = Breadth()
    >>> breadth.add({1: 48.0, 2: 100.0}), breadth.add({1: 144.0, 2: 100.0}), breadth.add({1: 1e6, 2: 100.0})
    (1.0, 1.0, 1.0)
    >>> breadth.add({1: 150.0})  # without learner 2; the median of learner 1 is 144
    0.5901639344262295
    """

    def __init__(self) -> None:
        self._merges: deque[dict[int, float]] = deque(maxlen=PARTICIPATION_WINDOW)

    def record_merge(self, rates: Mapping[int, float]) -> float:
        """Record a merge with these tokens per step by learner; return the factor of its outer step."""
        self._merges.append(dict(rates))
        seen: dict[int, list[float]] = {}
        for merge in self._merges:
            for learner, rate in merge.items():
                seen.setdefault(learner, []).append(rate)
        usual = {learner: median_low(seen[learner]) for learner in sorted(seen)}  # sorted: a fixed order of the sums
        return sum(rate for learner, rate in usual.items() if learner in rates) / sum(usual.values())

    def state_tensor(self) -> Tensor:
        """Return one row per contribution: the merge, counted from the oldest, the learner and its tokens per step."""
        rows = [(at, learner, rate) for at, merge in enumerate(self._merges) for learner, rate in merge.items()]
        return torch.tensor(rows, dtype=torch.float64).view(-1, 3)

    def load_state_tensor(self, state: Tensor) -> None:
        merges: dict[float, dict[int, float]] = {}
        for at, learner, rate in state.tolist():
            merges.setdefault(at, {})[int(learner)] = rate
        self._merges = deque(merges.values(), maxlen=PARTICIPATION_WINDOW)


class OuterOptimizer:
    """One fragment's precise value and its outer optimizer.

    `value` belongs to this object and is stepped in place. Buffers have no momentum and no learning rate: they become
    what was merged, the mean of the learners' values.

    What a value becomes does not depend on its place in the fragment: any plan gives the same bits, and SGD with or
    without Nesterov those of torch.optim.SGD on the tensors themselves.
    """

    def __init__(self, plan: FragmentPlan, p: int, numerics: Numerics, value: Tensor) -> None:
        if value.shape != (plan.numel(p),) or value.dtype != torch.float32 or not value.is_contiguous():
            raise ValueError(
                f"fragment {p} has {plan.numel(p)} values in a flat f32 tensor, got {value.dtype} {tuple(value.shape)}"
            )
        self.value = value.detach()
        self._outer = numerics.outer
        self._state_names = outer_state_names(numerics.outer, numerics.outer_momentum)
        stepped = [] if plan.holds_buffers(p) else [(0, self.value.numel())]
        self._even = [
            (begin, end - (end - begin) % VECTOR_LANES) for begin, end in stepped if end - begin >= VECTOR_LANES
        ]
        self._rests = [
            _Rest(self.value, end - (end - at) % VECTOR_LANES, end) for at, end in stepped if (end - at) % VECTOR_LANES
        ]
        self._parameters = [nn.Parameter(self.value[begin:end]) for begin, end in self._even]
        self._parameters += [rest.parameter for rest in self._rests]
        self._optimizer = _build(numerics, self._parameters) if self._parameters else None
        self._ramp = numerics.outer_ramp
        self._eta, self._mu = numerics.outer_lr, numerics.outer_momentum
        self._steps = 0  # counted for the ramp
        self._by_breadth = numerics.outer_breadth
        self._breadth = ParticipationTracker()

    def step(self, delta: Tensor, rates: Mapping[int, float] | None = None) -> None:
        """Take one outer step with the merged delta D, or replace buffers by the merged ones. `delta` is not changed.

        `rates`: tokens per inner step of each learner in the merge; None or empty: a step of full size.
        """
        if delta.shape != self.value.shape or delta.dtype != torch.float32:
            raise ValueError(f"{self.value.numel()} f32 values are needed, got {delta.dtype} {tuple(delta.shape)}")
        if self._optimizer is None:
            self.value.copy_(delta)
            return
        factor = self._breadth.record_merge(rates) if rates and self._by_breadth else 1.0
        if factor < 1.0:
            delta = delta * factor
        for rest in self._rests:
            rest.take(delta)
        gradients = [delta[begin:end] for begin, end in self._even] + [rest.gradient for rest in self._rests]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        if self._ramp:
            self._steps += 1
            self._set_ramp(min(1.0, self._steps / self._ramp))
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None  # the delta is the caller's again
        for rest in self._rests:
            rest.give()

    def _set_ramp(self, share: float) -> None:
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            group["lr"] = 1.0 + (self._eta - 1.0) * share
            group["momentum"] = self._mu * share

    def momentum_norm(self) -> float | None:
        """|b|; None before the first step, and of an optimizer without momentum. One pass that reads."""
        if self._optimizer is None:
            return None
        states = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters]
        found = [state[name] for state in states for name in MOMENTUM_KEYS if isinstance(state.get(name), Tensor)]
        parts = (part[begin:end] for part in found for begin, end in chunk_ranges(0, part.numel()))
        return math.sqrt(sum(map(square_norm, parts))) if found else None

    def state_dict(self) -> dict[str, Tensor]:
        """The optimizer's own tensors, not copies, by name; empty before the first step. With `value` it is all."""
        found: dict[str, Tensor] = {}
        for place, parameter in enumerate(self._parameters):
            state = self._optimizer.state.get(parameter, {}) if self._optimizer is not None else {}
            for name, value in state.items():
                if value is not None:
                    found[f"{place}.{name}"] = _tensor(value)
        if self._ramp and self._steps:
            found[STEP_COUNT_KEY] = torch.tensor(self._steps)
        breadth = self._breadth.state_tensor()
        if len(breadth):
            found[PARTICIPATION_KEY] = breadth
        return found

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues from what `state` gave; the steps that follow give the same bits. Takes copies."""
        expected = {
            f"{place}.{name}": tuple(parameter.shape) if long else ()
            for place, parameter in enumerate(self._parameters)
            for name, long in self._state_names.items()
        }
        if self._ramp and self._optimizer is not None:
            expected[STEP_COUNT_KEY] = ()
        got = {name: tuple(value.shape) for name, value in state.items() if name != PARTICIPATION_KEY}
        if got and got != expected:
            name = min(name for name in {*got, *expected} if got.get(name) != expected.get(name))
            raise ValueError(
                f"the stored state of {self._outer} does not fit: {name} has shape {got.get(name, 'nothing')}, "
                f"expected {expected.get(name, 'nothing')}; start with the settings that the run was founded with"
            )
        if self._optimizer is None:
            return
        self._steps = int(state[STEP_COUNT_KEY]) if STEP_COUNT_KEY in state else 0
        self._breadth = ParticipationTracker()
        if (
            PARTICIPATION_KEY in state and state[PARTICIPATION_KEY].dim() == 2
        ):  # earlier versions stored a scalar: begin anew
            self._breadth.load_state_tensor(state[PARTICIPATION_KEY])
        self._optimizer.state.clear()
        for place, parameter in enumerate(self._parameters if got else ()):
            self._optimizer.state[parameter] = {
                name: state[f"{place}.{name}"].detach().clone() for name in self._state_names
            }


class PublishedValue:
    """What of a fragment's value every learner holds.

    By definition the old published value plus the decoded update, so that all hold the same bits. What rounding left
    out is still in the precise value and goes out with the next update: the way down needs no other error feedback.
    """

    def __init__(self, codec: Codec, value: Tensor) -> None:
        self.codec = codec
        self.value = value
        self.step_norm = 0.0  # of the last update as it is published
        self.quantization_error = 0.0  # |precise - published| after it, as a share of that

    def advance(self, precise: Tensor, out: Tensor | None = None) -> Tensor:
        """Moves the published value towards `precise`; returns the update that does the same at a learner."""
        codec, value, numel = self.codec, self.value, self.value.numel()
        if precise.shape != value.shape or precise.dtype != torch.float32:
            raise ValueError(f"{numel} f32 values are needed, got {precise.dtype} {tuple(precise.shape)}")
        out = codec.allocate(numel, out)
        target = ensure_aligned(out)
        scratch = Scratch(numel)
        stepped = seen = left = 0.0  # squares; everything that they are taken of is in the cache
        for begin, end in chunk_ranges(0, numel):
            part, moved, goal = value[begin:end], scratch.values[: end - begin], precise[begin:end]
            torch.sub(goal, part, out=moved)
            if codec.is_lossless:  # the value itself travels
                stepped += square_norm(moved)
                codec.encode_chunk(goal, target, numel, begin, scratch)
                part.copy_(goal)
                continue
            codec.encode_chunk(moved, target, numel, begin, scratch)
            codec.decode_chunk(target, numel, begin, moved, scratch)
            part.add_(moved)
            square = square_norm(moved)
            stepped += square
            if begin // CHUNK_NUMEL % ERROR_SAMPLE_INTERVAL == 0:
                seen += square
                left += square_norm(torch.sub(goal, part, out=moved))
        self.step_norm = math.sqrt(stepped)
        self.quantization_error = math.sqrt(left / seen) if seen else 0.0
        return out if target is out else out.copy_(target)

    @staticmethod
    def apply(codec: Codec, old_value: Tensor, update: Tensor, out: Tensor) -> Tensor:
        """The new published value at a learner, in `out`, which may be `old_value` itself."""
        UpdateApplier(codec, old_value, update, out).advance(update.numel())
        return out


class UpdateApplier:
    """`PublishedValue.apply` while the update comes in: as far as its first bytes reach. `update` is filled meanwhile.

    Where the codec is f32 the value itself travels, and there need be no old one.
    """

    def __init__(self, codec: Codec, old_value: Tensor | None, update: Tensor, out: Tensor) -> None:
        self.numel = out.numel()
        is_whole = codec.is_lossless
        if out.dtype != torch.float32 or (old_value is not None and out.shape != old_value.shape):
            needed = old_value.numel() if old_value is not None else self.numel
            raise ValueError(f"{needed} f32 values are needed, got {out.dtype} {tuple(out.shape)}")
        codec.check_size(update, self.numel)
        if old_value is None and not is_whole:
            raise ValueError(f"an update in {codec.name} needs the value that it is added to")
        self._codec = codec
        self._old_value = None if is_whole else old_value
        self._update = update
        self._out = out
        self._scratch = Scratch(self.numel)
        self.applied = 0  # values

    def advance(self, first_bytes: int) -> tuple[int, int]:
        """So many bytes of the update are here, from the first on. Which values are new in `out`."""
        codec, begin = self._codec, self.applied
        self.applied = end = codec.decodable_values(self.numel, first_bytes)
        update = ensure_aligned(self._update)
        for b, e in chunk_ranges(begin, end):
            if self._old_value is None:
                codec.decode_chunk(update, self.numel, b, self._out[b:e], self._scratch)
                continue
            moved = self._scratch.values[: e - b]
            codec.decode_chunk(update, self.numel, b, moved, self._scratch)
            torch.add(self._old_value[b:e], moved, out=self._out[b:e])
        return begin, end
