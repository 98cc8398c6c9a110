"""Execute one setting: the program of its schedule on stacked tensors, all seeds together.

Rows of learner l (counted from 1) are [(l - 1) S, l S), one per seed. Tensors of a fragment at the syncer have one row
per seed.
"""

from __future__ import annotations

import functools
import math
import os
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.reference.data import Corpus, Sampler, assigned_samples
from atoll.reference.models import SIZES, build_model, lr_factor
from atoll.tensors.codecs import BlockCodec, get_codec
from atoll.tensors.merge import CANCELLATION_TOLERANCE
from atoll.tensors.plan import FragmentPlan, describe_tensors, make_plan
from benchmarks.quality_lab.schedule import Adopt, Contribute, Copy, LearnerStep, Merge, Steps, Timing, program_of
from benchmarks.quality_lab.setting import Setting
from benchmarks.quality_lab.stacked import AdamW, Layout, Muon, Stack

REPORTING_PACKAGES = ("jinja2", "networkx", "numpy", "sympy")
"""Packages that torch requires: their sources are on every machine that can train."""

TAIL = 0.1
"""Share of the run over which published versions are averaged for `loss_tail`."""

TAIL_EVERY = 8
"""Steps between two models of that average in data-parallel training."""


@functools.lru_cache(maxsize=2)
def text_of(name: str) -> Corpus:
    """Return `library` (the standard library, for tuning) or `packages` (other people's code, for reporting)."""
    if name == "library":
        return Corpus.load()
    root = Path(sysconfig.get_paths()["purelib"])
    documents = {}
    for package in REPORTING_PACKAGES:
        for folder, folders, files in os.walk(root / package):
            folders[:] = sorted(f for f in folders if f not in ("tests", "test", "__pycache__"))
            for file in sorted(files):
                path = Path(folder) / file
                if file.endswith(".py") and path.stat().st_size:
                    documents[str(path.relative_to(root))] = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    return Corpus.from_documents(documents, "sources of " + ", ".join(REPORTING_PACKAGES))


class Batches:
    """Windows of text for many rows, each with the sampler of its seed."""

    def __init__(self, setting: Setting, text: Corpus) -> None:
        self.context = SIZES[setting.size].context
        self._samplers = [Sampler(text, seed, self.context) for seed in setting.seed_list]
        self._tokens = torch.from_numpy(np.ascontiguousarray(text.train))
        self._offsets = torch.arange(self.context + 1)

    def of(self, numbers: Sequence[range]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets [rows, windows, context]; rows are `numbers` by seeds."""
        starts = [[s.window(n) * self.context for n in each] for each in numbers for s in self._samplers]
        windows = self._tokens[torch.tensor(starts)[:, :, None] + self._offsets].long()
        return windows[..., :-1], windows[..., 1:]


def round_trip(values: Tensor, name: str) -> Tensor:
    """Return what a receiver decodes of each row. Blocks are counted from the first value of a row."""
    if name == "f32":
        return values
    if name == "bf16":
        return values.bfloat16().float()
    coder = get_codec(name)
    assert isinstance(coder, BlockCodec)
    rows, numel = values.shape
    padded = torch.nn.functional.pad(values, (0, -numel % coder.block_size)).contiguous()
    flat = padded.view(-1)
    return coder.decode(coder.encode(flat), flat.numel()).view(rows, -1)[:, :numel]


@dataclass
class LearnerFragment:
    """What a learner holds of one fragment."""

    anchor: Tensor | None = None
    copy: Tensor | None = None
    copied_at: int = 0
    moments: tuple[Tensor, Tensor] | None = None  # at the copy
    residual: Tensor | None = None
    pending: Tensor | None = None
    moment_residuals: dict[int, Tensor] = field(default_factory=dict)
    clock: float = 0.0  # accumulated inner learning rate at the last copy
    clock_round: float = 0.0  # of the round that the copy ends


@dataclass
class Contribution:
    delta: Tensor
    moments: tuple[Tensor, Tensor] | None
    clock: float


class OuterState:
    """The precise value of one fragment and its outer optimizer."""

    def __init__(self, value: Tensor) -> None:
        self.value = value.clone()
        self.published = value.clone()
        self.momentum = torch.zeros_like(value)
        self.steps = 0
        self.last: Tensor | None = None  # the merged delta before
        rows = len(value)
        self.rho = torch.zeros(rows, 1)
        self.size = torch.zeros(rows, 1)  # of recent outer steps
        self.moment_residuals: dict[int, Tensor] = {}


class Run:
    """One setting on stacked tensors."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.seeds = setting.seed_list
        self.rows = len(self.seeds)  # of one learner
        self.config = SIZES[setting.size]
        self.text = text_of(setting.text)
        self.batches = Batches(setting, self.text)
        founders = [build_model(self.config, seed) for seed in self.seeds]
        self.plan: FragmentPlan = make_plan(describe_tensors(founders[0]), setting.p, "balanced")
        self.layout = Layout(founders[0], self.plan)
        self.initial = torch.stack([self.layout.row_of(founder) for founder in founders])
        self.bytes = 0
        self.tail = torch.zeros_like(self.initial, dtype=torch.float64)
        self.tail_counts = torch.zeros(self.layout.numel)
        self.train_losses: list[float] = []
        self.cosines: list[list[float]] = [[] for _ in range(5)]  # of successive merged deltas, by fifths of the run
        self.max_ratio = 0.0  # largest outer step by mean norm of contributions, over the run

    # -------------------------------------------------------------------------------------------------- inner steps

    def optimizer(self, stack: Stack) -> AdamW:
        s = self.setting
        if s.inner == "muon":
            return Muon(stack, 0.9, s.beta2, s.weight_decay, 0.95, s.adamw_ratio)
        return AdamW(stack, 0.9, s.beta2, s.weight_decay)

    def rate(self, progress: float) -> float:
        return lr_factor(progress, self.setting.warmup, self.setting.floor)

    def data_parallel(self, share: float = 1.0) -> tuple[Stack, int]:
        """Train one row per seed on the batches of all learners for a share of the tokens."""
        s = self.setting
        stack = Stack(self.config, self.layout, self.initial.clone(), s.mixed)
        optimizer = self.optimizer(stack)
        windows = s.learners * s.windows
        total = s.tokens // (windows * self.config.context)
        steps = int(total * share)
        for step in range(steps):
            x, y = self.batches.of([assigned_samples(step, 1, 1, windows)])
            found, gradient = stack.gradients([(0, self.rows)], x, y, s.clip)
            optimizer.step(0, self.rows, gradient, step + 1, max(s.lr * self.rate(step / total), 1e-8))
            self.note(found, step / total)
            if step / total >= 1 - TAIL and step % TAIL_EVERY == 0:
                self.tail += stack.values
                self.tail_counts += 1
        return stack, steps

    def note(self, found: Tensor, progress: float) -> None:
        if progress >= 1 - TAIL:
            self.train_losses.append(float(found.mean()))

    # -------------------------------------------------------------------------------------------------- the protocol

    def timing(self) -> Timing:
        s = self.setting
        return Timing(
            s.method,
            len(self.plan.fragments),
            s.learners,
            s.windows * self.config.context,
            s.tokens - int(s.tokens * s.start),
            s.h,
            s.tau,
            s.k,
            s.grace,
            s.adopt,
            s.alpha,
            tuple(float(speed) for speed in s.speeds.split(":")),
            s.delay,
            s.bulk,
            s.draw,
        )

    def protocol(self) -> dict[str, Any]:
        s, learners = self.setting, self.setting.learners
        started, first_step = self.data_parallel(s.start) if s.start else (None, 0)
        initial = self.initial if started is None else started.values
        self.tail.zero_()
        self.tail_counts.zero_()
        program = program_of(self.timing())
        stack = self.stack = Stack(self.config, self.layout, initial.repeat(learners, 1), s.mixed)
        if started is not None:
            stack.first.copy_(started.first.repeat(learners, 1))
            stack.second.copy_(started.second.repeat(learners, 1))
        optimizer = self.optimizer(stack)
        self.first_decay, self.second_decay = self._moment_decays()
        self.outer = [OuterState(initial[:, begin:end]) for begin, end in self.layout.fragments]
        self.held: dict[int, list[LearnerFragment]] = {
            learner: [LearnerFragment() for _ in self.outer] for learner in range(1, learners + 1)
        }
        self.versions: dict[tuple[int, int], Tensor] = {
            (p, 0): state.published.clone() for p, state in enumerate(self.outer)
        }
        self.moments: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.contributions: dict[tuple[int, Any], Contribution] = {}
        self.adoptions = program.adoptions.copy()
        self.numbers = dict.fromkeys(self.held, 0)
        self.clocks: dict[int, float] = dict.fromkeys(self.held, 0.0)
        self.progress = s.start
        handlers: dict[type, Callable[[Any], None]] = {
            Copy: self._copy,
            Contribute: self._contribute,
            Merge: self._merge,
            Adopt: self._adopt,
        }
        for operation in program.operations:
            if type(operation) is Steps:
                self._steps(operation.steps, stack, optimizer, first_step)
            else:
                handlers[type(operation)](operation)
        return {
            "trained": program.tokens + (s.tokens - self.timing().budget if s.start else 0),
            "merges": program.merges,
            "contributions_per_merge": program.contributions / program.merges,
            "bytes_per_token": self.bytes / program.tokens,
            "cosines": [round(sum(each) / len(each), 4) if each else None for each in self.cosines],
            "max_step_ratio": round(self.max_ratio, 3),
        }

    def _moment_decays(self) -> tuple[Tensor, Tensor]:
        first = torch.full((self.layout.numel,), 0.9)
        if self.setting.inner == "muon":
            for name in self.layout.matrices:
                begin, end = self.layout.columns[name]
                first[begin:end] = 0.95
        return first, torch.full((self.layout.numel,), self.setting.beta2)

    def _range(self, learner: int) -> tuple[int, int]:
        return (learner - 1) * self.rows, learner * self.rows

    def _steps(self, steps: tuple[LearnerStep, ...], stack: Stack, optimizer: AdamW, first_step: int) -> None:
        s = self.setting
        steps = tuple(sorted(steps, key=lambda step: step.learner))
        numbers = [assigned_samples(first_step + step.number, step.learner, s.learners, s.windows) for step in steps]
        x, y = self.batches.of(numbers)
        found, gradient = stack.gradients([self._range(step.learner) for step in steps], x, y, s.clip)
        for place, step in enumerate(steps):
            progress = s.start + (1 - s.start) * step.progress
            rate = self.rate(progress) * step.lr_scale
            begin, end = self._range(step.learner)
            part = gradient[place * self.rows : (place + 1) * self.rows]
            optimizer.step(begin, end, part, first_step + step.number + 1, max(s.lr * rate, 1e-8))
            self.clocks[step.learner] += rate
            self.numbers[step.learner] = step.number + 1
            self.progress = max(self.progress, progress)
        self.note(found, self.progress)

    def _slices(self, learner: int, p: int, tensor: Tensor) -> Tensor:
        rows, columns = self._range(learner), self.layout.fragments[p]
        return tensor[rows[0] : rows[1], columns[0] : columns[1]]

    def _copy(self, op: Copy) -> None:
        held = self.held[op.learner][op.fragment]
        held.copy = self._slices(op.learner, op.fragment, self.stack.values).clone()
        held.copied_at = self.numbers[op.learner]
        held.clock_round, held.clock = self.clocks[op.learner] - held.clock, self.clocks[op.learner]
        if self.setting.moments != "none":
            first = self._slices(op.learner, op.fragment, self.stack.first).clone()
            held.moments = first, self._slices(op.learner, op.fragment, self.stack.second).clone()

    def _contribute(self, op: Contribute) -> None:
        s, held = self.setting, self.held[op.learner][op.round.fragment]
        assert held.anchor is not None
        assert held.copy is not None
        delta = held.anchor - held.copy
        if s.up != "f32":
            wanted = delta if held.residual is None else delta + held.residual
            delta = round_trip(wanted, s.up)
            held.pending = wanted - delta
        self._count(delta, s.up)
        moments = None
        if held.moments is not None and (op.round.base + 1) % s.moments_every == 0:
            moments = self._sent_moments(held.moments, held.moment_residuals)
        self.contributions[op.learner, op.round] = Contribution(delta, moments, held.clock_round)

    def _count(self, values: Tensor, name: str) -> None:
        self.bytes += get_codec(name).encoded_size(values.shape[1])

    def _sent_moments(self, moments: tuple[Tensor, Tensor], residuals: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Second moments travel as their roots, which need half the range."""
        s = self.setting
        found = []
        for place, moment in enumerate(moments):
            if s.moments not in ("both", ("first", "second")[place]):
                found.append(moment)
                continue
            value = moment if place == 0 else moment.sqrt()
            if s.moments_codec != "f32":
                wanted = value + residuals[place] if s.moments_feedback and place in residuals else value
                value = round_trip(wanted, s.moments_codec)
                residuals[place] = wanted - value
            self._count(value, s.moments_codec)
            found.append(value if place == 0 else value.clamp(min=0.0).square())
        return found[0], found[1]

    def _adopt(self, op: Adopt) -> None:
        s, held = self.setting, self.held[op.learner][op.fragment]
        key = (op.fragment, op.version)
        value = self.versions[key]
        values = self._slices(op.learner, op.fragment, self.stack.values)
        reference = held.copy if op.merged_copy else held.anchor
        if op.how == "overwrite" or reference is None:
            values.copy_(value)
        elif op.how == "blend":
            values.copy_(s.alpha * values + (1.0 - s.alpha) * value)
        else:
            values.add_(value - reference)
        held.anchor = value
        if op.version:
            self._count(value, s.down)
        if op.merged_copy and held.pending is not None:
            held.residual = held.pending
        held.pending = None
        if op.merged_copy and key in self.moments:
            self._adopt_moments(op, held)
        self.adoptions[key] -= 1
        if not self.adoptions[key] and op.version:
            self.moments.pop(key, None)
            if op.version < self.versions_merged(op.fragment):
                self.versions.pop(key, None)

    def versions_merged(self, p: int) -> int:
        return self.outer[p].steps

    def _adopt_moments(self, op: Adopt, held: LearnerFragment) -> None:
        assert held.moments is not None
        begin, end = self.layout.fragments[op.fragment]
        age = self.numbers[op.learner] - held.copied_at
        averages = self.moments[op.fragment, op.version]
        stacks = (self.stack.first, self.stack.second)
        decays = (self.first_decay, self.second_decay)
        for place in range(2):
            if self.setting.moments not in ("both", ("first", "second")[place]):
                continue
            now = self._slices(op.learner, op.fragment, stacks[place])
            if self.setting.moments_adopt == "overwrite":
                now.copy_(averages[place])
            else:  # moments are linear in what they were: as if the average had been there at the copy
                now.addcmul_(decays[place][begin:end].pow(age), averages[place] - held.moments[place])
            if place == 1:
                now.clamp_(min=0.0)
            self._count(averages[place], self.setting.moments_codec)

    # -------------------------------------------------------------------------------------------------- the syncer

    def _merge(self, op: Merge) -> None:
        s, p = self.setting, op.round.fragment
        state = self.outer[p]
        found = [self.contributions.pop((learner, op.round)) for learner in op.learners]
        deltas = torch.stack([each.delta for each in found])  # [k, S, n]
        weights = torch.tensor(op.weights)
        share = weights / weights.sum()
        merged = merge_deltas(self.plan, p, s.merge, deltas, share)
        sizes = (deltas.norm(dim=2) * share[:, None]).sum(0)[:, None]  # mean norm of the contributions
        clock = float(sum(each.clock * w for each, w in zip(found, share.tolist(), strict=True))) / s.h
        self._outer_step(state, merged * op.breadth if s.breadth and op.breadth < 1.0 else merged, sizes, clock)
        if s.down == "f32":
            state.published = state.value.clone()
        else:
            state.published = state.published + round_trip(state.value - state.published, s.down)
        self.versions[p, op.version] = state.published
        before = (p, op.version - 1)
        if op.version > 1 and not self.adoptions[before]:
            self.versions.pop(before, None)
        if found[0].moments is not None:
            self._merge_moments(state, (p, op.version), found, share)
        if self.progress >= 1 - TAIL:
            begin, end = self.layout.fragments[p]
            self.tail[:, begin:end] += state.published
            self.tail_counts[begin:end] += 1

    def _merge_moments(self, state: OuterState, key: tuple[int, int], found: list[Contribution], share: Tensor) -> None:
        averages = []
        for place in range(2):
            each = torch.stack([c.moments[place] for c in found if c.moments is not None])
            averages.append(torch.einsum("k,ksn->sn", share, each))
        before = self.bytes
        self.moments[key] = self._sent_moments((averages[0], averages[1]), state.moment_residuals)
        self.bytes = before  # counted where they are adopted

    def _outer_step(self, state: OuterState, merged: Tensor, sizes: Tensor, clock: float) -> None:
        s = self.setting
        state.steps += 1
        share = min(1.0, state.steps / s.outer_ramp) if s.outer_ramp else 1.0
        mu = s.outer_momentum * share
        eta: Tensor | float = 1.0 + (s.outer_lr - 1.0) * share
        if state.last is not None:
            cosine = torch.nn.functional.cosine_similarity(merged, state.last, dim=1)[:, None]
            state.rho = s.rho_decay * state.rho + (1 - s.rho_decay) * cosine
            self.cosines[min(int(self.progress * len(self.cosines)), len(self.cosines) - 1)].append(
                float(cosine.mean())
            )
        state.last = merged
        if s.gain:
            rho = state.rho / (1 - s.rho_decay ** (state.steps - 1)) if state.steps > 1 else state.rho
            amplified = 1.0 + mu / (1.0 - mu * rho.clamp(0.0, 0.99))
            target = 1.0 + (s.gain - 1.0) * share
            eta = target / amplified
        if s.clock:
            part = min(max(clock, 1e-3), 4.0)
            mu_now = mu**part if mu else 0.0
            unit = merged / part
            state.momentum.mul_(mu_now).add_(unit)
            step = eta * part * (unit + mu_now * state.momentum)
        else:
            state.momentum.mul_(mu).add_(merged)
            step = eta * (merged + mu * state.momentum)
        norms = step.norm(dim=1, keepdim=True)
        factor = torch.ones_like(norms)
        if s.outer_cap:
            factor = torch.minimum(factor, s.outer_cap * sizes / norms.clamp(min=1e-30))
        if s.outer_clip:
            if state.steps > 3:
                factor = torch.minimum(factor, s.outer_clip * state.size / norms.clamp(min=1e-30))
            kept = norms * factor
            state.size = kept if state.steps == 1 else 0.8 * state.size + 0.2 * kept
        state.value.sub_(step * factor)
        if state.steps > s.outer_ramp:
            self.max_ratio = max(self.max_ratio, float((norms / sizes.clamp(min=1e-30)).max()))

    # -------------------------------------------------------------------------------------------------- the end

    def execute(self, windows: int = 4096) -> dict[str, Any]:
        torch.set_num_threads(1)
        began, used = time.perf_counter(), time.process_time()
        held_out = list(self.text.held_out_batches(self.config.context, 16, windows))
        result: dict[str, Any] = {}
        if self.setting.method == "data-parallel":
            stack, steps = self.data_parallel()
            result["trained"] = steps * self.setting.learners * self.setting.windows * self.config.context
            final = stack.values
        else:
            result |= self.protocol()
            stack = self.stack
            final = torch.cat([state.published for state in self.outer], 1)
            mean = stack.values.view(self.setting.learners, self.rows, -1).mean(0)
            result["losses_mean"] = stack.evaluate(mean, held_out)
        result["losses"] = stack.evaluate(final, held_out)
        if bool((self.tail_counts > 0).all()):
            result["losses_tail"] = stack.evaluate((self.tail / self.tail_counts).float(), held_out)
        late = self.train_losses
        result["train_loss"] = sum(late) / len(late) if late else math.nan
        result["wall_s"] = round(time.perf_counter() - began, 1)
        result["cpu_s"] = round(time.process_time() - used, 1)
        result["parameters"] = self.layout.numel
        result["text_digest"] = self.text.digest
        return result


def merge_deltas(plan: FragmentPlan, p: int, how: str, deltas: Tensor, share: Tensor) -> Tensor:
    """Return the merged delta of one fragment [S, n] from [k, S, n], as `atoll.tensors.merge` does for one model."""
    average = torch.einsum("k,ksn->sn", share, deltas)
    if how == "average":
        return average
    shapes = {tensor.name: tensor.shape for tensor in plan.tensors}
    for piece, begin, end in plan.spans(p):
        if piece.kind != "weight":
            continue
        part = deltas[:, :, begin:end]
        if how == "radial":
            norms = part.norm(dim=2, keepdim=True)
            directions = (share[:, None, None] * part / norms.clamp(min=1e-38)).sum(0)
            length = directions.norm(dim=1, keepdim=True)
            mean = (share[:, None, None] * norms).sum(0)
            is_cancelled = length <= CANCELLATION_TOLERANCE
            average[:, begin:end] = torch.where(is_cancelled, 0.0, directions * (mean / length.clamp(min=1e-38)))
        elif how == "iso" and len(shapes[piece.tensor]) == 2:
            matrices = average[:, begin:end].reshape(-1, *shapes[piece.tensor])
            u, values, v = torch.linalg.svd(matrices, full_matrices=False)
            flat = (u @ v) * values.mean(1)[:, None, None]
            average[:, begin:end] = flat.reshape(len(matrices), -1)
    return average
