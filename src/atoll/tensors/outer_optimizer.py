"""The outer optimizer of one fragment at the syncer, and the fragment's published value.

Nesterov, with D the merged delta: b <- mu b + D; Theta <- Theta - eta (D + mu b). With a ramp of R the n-th step has
eta_n = 1 + (eta - 1) min(1, n / R) and mu_n = mu min(1, n / R). At first all learners move in the same direction, and
their average is the step. Later they differ by noise, which the outer optimizer has to compensate.

The breadth of a merge is the share of learners that took part in it, weighted by their usual tokens per inner step.
A merge without some learners carries less information and follows the last one sooner (in tokens), so D is multiplied
by its breadth. With all learners, or a single one, the factor is exactly 1, even if tokens per step vary.

Optimizers are those of torch.optim, on flat parameters that share memory with the value. Only elementwise optimizers
are allowed: a fragment is a sequence of pieces of many tensors, and the cuts must not change the result. A trial run
decides which optimizers are elementwise.
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
"""Key of the step count in the stored state of an optimizer with a ramp."""

MOMENTUM_KEYS = ("momentum_buffer", "exp_avg")
"""Names in torch's optimizers for the mean of past gradients."""

PARTICIPATION_KEY = "breadth"
PARTICIPATION_WINDOW = 16
"""Merges that `ParticipationTracker` remembers. After a learner has left for good, the next 15 outer steps are
smaller."""

ERROR_SAMPLE_INTERVAL = 4
"""The quantization error of an update is measured in every fourth chunk: it costs more than other statistics."""

VECTOR_LANES = 64
"""A multiple of the vector width of every CPU. Torch's fused kernels round the values after the last full register
differently (in f64). Therefore every parameter is a multiple of this, and the tail is stepped in padded memory."""


def _build(numerics: Numerics, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Create the optimizer with the settings that it supports: lr, mu as `momentum` or first beta, and fused kernels.

    Fused kernels are four to eight times as fast on the CPU: one pass over memory, and no temporaries.
    """
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, OUTER_ALIASES.get(numerics.outer, numerics.outer))
    known = inspect.signature(kind).parameters
    settings: dict[str, Any] = {"lr": numerics.outer_lr}
    if "momentum" in known:
        settings["momentum"] = numerics.outer_momentum
    if "betas" in known:
        settings["betas"] = (numerics.outer_momentum, known["betas"].default[1])
    if numerics.outer == "nesterov":
        settings["nesterov"] = numerics.outer_momentum > 0.0  # without momentum it is plain gradient descent
    if "fused" in known:
        settings["fused"] = True
    return kind(parameters, **settings)


def _try_out(numerics: Numerics) -> dict[str, bool]:
    """Return the names of the state per parameter, and whether each has the shape of the parameter.

    Take three steps on the same values as one parameter and as two; raise ValueError if the results differ.
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


def _is_optimizer(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer


@functools.cache
def supported_outer_optimizers() -> tuple[str, ...]:
    """Return the values of `Numerics.outer` that work with the installed torch."""

    def works(name: str) -> bool:
        try:
            _try_out(Numerics(outer=name, outer_lr=0.1))
        except Exception:  # optimizers reject flat parameters with any exception
            return False
        return True

    classes = sorted(name for name, value in vars(torch.optim).items() if _is_optimizer(value))
    return tuple(filter(works, (*OUTER_ALIASES, *classes)))


@functools.cache
def outer_state_names(outer: str, momentum: float) -> dict[str, bool]:
    """Return the names of this optimizer's state, and whether each has one element per value.

    Raise ValueError, with the names that work, if it cannot step flat fragments.
    """
    if not _is_optimizer(getattr(torch.optim, OUTER_ALIASES.get(outer, outer), None)):
        raise ValueError(
            f"torch.optim has no optimizer {outer!r}; give one of {', '.join(supported_outer_optimizers())}"
        )
    try:
        return _try_out(Numerics(outer=outer, outer_lr=0.1, outer_momentum=momentum))
    except Exception as error:  # optimizers reject flat parameters with any exception
        why = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(
            f"{outer} cannot step flat fragments ({why}); give one of {', '.join(supported_outer_optimizers())}"
        ) from error


class _PaddedTail:
    """Values after the last full register: a padded copy, which is stepped like the others and copied back."""

    def __init__(self, value: Tensor, begin: int, end: int) -> None:
        self.begin, self.end, self.value = begin, end, value
        self.parameter = nn.Parameter(torch.zeros(VECTOR_LANES))
        self.gradient = torch.zeros(VECTOR_LANES)

    def load(self, delta: Tensor) -> None:
        self.parameter.data[: self.end - self.begin] = self.value[self.begin : self.end]
        self.gradient[: self.end - self.begin] = delta[self.begin : self.end]

    def store(self) -> None:
        self.value[self.begin : self.end] = self.parameter.data[: self.end - self.begin]


class ParticipationTracker:
    """Learners in the last merges of one fragment, with their tokens per inner step.

    The usual tokens per step of a learner are the median over its contributions to these merges, so that a single
    incorrect report or uneven steps have no effect. A learner outside the window is forgotten.

    >>> tracker = ParticipationTracker()
    >>> [tracker.record_merge({1: tokens, 2: 100.0}) for tokens in (48.0, 144.0, 1e6)]
    [1.0, 1.0, 1.0]
    >>> tracker.record_merge({1: 150.0})  # without learner 2; the median of learner 1 is 144
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
    """Precise value of one fragment, with its outer optimizer.

    `value` belongs to this object and is updated in place. Buffers have no momentum and no learning rate: they are
    replaced by the mean of the learners' values.

    The result does not depend on a value's position in the fragment: any plan gives the same bits. SGD with or without
    Nesterov gives those of torch.optim.SGD on the tensors themselves.
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
        self._tails = [
            _PaddedTail(self.value, end - (end - at) % VECTOR_LANES, end)
            for at, end in stepped
            if (end - at) % VECTOR_LANES
        ]
        self._parameters = [nn.Parameter(self.value[begin:end]) for begin, end in self._even]
        self._parameters += [tail.parameter for tail in self._tails]
        self._optimizer = _build(numerics, self._parameters) if self._parameters else None
        self._ramp = numerics.outer_ramp
        self._eta, self._mu = numerics.outer_lr, numerics.outer_momentum
        self._steps = 0  # number of steps, for the ramp
        self._by_breadth = numerics.outer_breadth
        self._breadth = ParticipationTracker()

    def step(self, delta: Tensor, rates: Mapping[int, float] | None = None) -> None:
        """Take one outer step with the merged delta D, or replace buffers by the merged ones. `delta` is not changed.

        Args:
            rates: Tokens per inner step of each learner in the merge; None or empty for a step of full size.
        """
        if delta.shape != self.value.shape or delta.dtype != torch.float32:
            raise ValueError(f"expected {self.value.numel()} f32 values, got {delta.dtype} {tuple(delta.shape)}")
        if self._optimizer is None:
            self.value.copy_(delta)
            return
        factor = self._breadth.record_merge(rates) if rates and self._by_breadth else 1.0
        if factor < 1.0:
            delta = delta * factor
        for tail in self._tails:
            tail.load(delta)
        gradients = [delta[begin:end] for begin, end in self._even] + [tail.gradient for tail in self._tails]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        if self._ramp:
            self._steps += 1
            self._set_ramp(min(1.0, self._steps / self._ramp))
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None  # the caller may reuse the delta
        for tail in self._tails:
            tail.store()

    def _set_ramp(self, share: float) -> None:
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            group["lr"] = 1.0 + (self._eta - 1.0) * share
            group["momentum"] = self._mu * share

    def momentum_norm(self) -> float | None:
        """Return |b|; None before the first step and for an optimizer without momentum. Reads the state once."""
        if self._optimizer is None:
            return None
        states = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters]
        moments = [state[name] for state in states for name in MOMENTUM_KEYS if isinstance(state.get(name), Tensor)]
        parts = (part[begin:end] for part in moments for begin, end in chunk_ranges(0, part.numel()))
        return math.sqrt(sum(map(square_norm, parts))) if moments else None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors by name, without copying; empty before the first step."""
        tensors: dict[str, Tensor] = {}
        for place, parameter in enumerate(self._parameters):
            state = self._optimizer.state.get(parameter, {}) if self._optimizer is not None else {}
            for name, value in state.items():
                if value is not None:
                    tensors[f"{place}.{name}"] = _tensor(value)
        if self._ramp and self._steps:
            tensors[STEP_COUNT_KEY] = torch.tensor(self._steps)
        breadth = self._breadth.state_tensor()
        if len(breadth):
            tensors[PARTICIPATION_KEY] = breadth
        return tensors

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load copies of the tensors from `state_dict`. Later steps are bit-identical to those without a restart."""
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
                f"expected {expected.get(name, 'nothing')}; start with the settings that the run was created with"
            )
        if self._optimizer is None:
            return
        self._steps = int(state[STEP_COUNT_KEY]) if STEP_COUNT_KEY in state else 0
        self._breadth = ParticipationTracker()
        if PARTICIPATION_KEY in state and state[PARTICIPATION_KEY].dim() == 2:  # earlier versions stored a scalar
            self._breadth.load_state_tensor(state[PARTICIPATION_KEY])
        self._optimizer.state.clear()
        for place, parameter in enumerate(self._parameters if got else ()):
            self._optimizer.state[parameter] = {
                name: state[f"{place}.{name}"].detach().clone() for name in self._state_names
            }


class PublishedValue:
    """Published value of a fragment: the same bits at every learner.

    It is the old published value plus the decoded update. The rounding error is still in the precise value and is part
    of the next update: downloads need no other error feedback.
    """

    def __init__(self, codec: Codec, value: Tensor) -> None:
        self.codec = codec
        self.value = value
        self.step_norm = 0.0  # norm of the last published update
        self.quantization_error = 0.0  # |precise - published| after it, relative to `step_norm`

    def advance(self, precise: Tensor, out: Tensor | None = None) -> Tensor:
        """Move the published value towards `precise` and return the encoded update for learners."""
        codec, value, numel = self.codec, self.value, self.value.numel()
        if precise.shape != value.shape or precise.dtype != torch.float32:
            raise ValueError(f"{numel} f32 values are needed, got {precise.dtype} {tuple(precise.shape)}")
        out = codec.allocate(numel, out)
        target = ensure_aligned(out)
        scratch = Scratch(numel)
        stepped = seen = left = 0.0  # sums of squares, of values that are in the cache
        for begin, end in chunk_ranges(0, numel):
            part, moved, goal = value[begin:end], scratch.values[: end - begin], precise[begin:end]
            torch.sub(goal, part, out=moved)
            if codec.is_lossless:  # the update is the value itself
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
        """Compute the new published value at a learner in `out`, which may be `old_value` itself."""
        UpdateApplier(codec, old_value, update, out).advance(update.numel())
        return out


class UpdateApplier:
    """Apply an update while it is downloaded, like `PublishedValue.apply`. `update` is filled meanwhile.

    In f32 the update is the value itself, and `old_value` may be None.
    """

    def __init__(self, codec: Codec, old_value: Tensor | None, update: Tensor, out: Tensor) -> None:
        self.numel = out.numel()
        is_full_value = codec.is_lossless
        if out.dtype != torch.float32 or (old_value is not None and out.shape != old_value.shape):
            needed = old_value.numel() if old_value is not None else self.numel
            raise ValueError(f"{needed} f32 values are needed, got {out.dtype} {tuple(out.shape)}")
        codec.check_size(update, self.numel)
        if old_value is None and not is_full_value:
            raise ValueError(f"an update in {codec.name} needs the value that it is added to")
        self._codec = codec
        self._old_value = None if is_full_value else old_value
        self._update = update
        self._out = out
        self._scratch = Scratch(self.numel)
        self.applied = 0  # number of values that are applied

    def advance(self, first_bytes: int) -> tuple[int, int]:
        """Apply the values in the first `first_bytes` bytes of the update. Return the range of new values in `out`."""
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
