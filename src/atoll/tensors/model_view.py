"""A model cut by a plan: fragments are read from its parameters and adopted into them.

Flat fragments are f32 tensors in host memory. Parameters may have any dtype, any strides and any device. Arithmetic is
done in f32 (in f64 for f64 parameters, whose tails f32 would cut off) and rounded once.

On CUDA nothing waits for a copy at a step boundary. Reading takes a snapshot on the device, in the order of the
training stream, and a side stream brings it to the host; `stage` brings values to the device beforehand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atoll.tensors.plan import FragmentPlan, TensorInfo, describe_tensors, named_tensors
from atoll.tensors.sharding import ShardWindow, local_boxes, local_tensor, shard_windows

ADOPT_METHODS = ("carry", "overwrite", "blend")

ADOPT_CHUNK_NUMEL = 1 << 17
"""Elements that are adopted at a time where there are temporaries: these stay in the cache."""


class StagedFragment(NamedTuple):
    """A flat fragment that is where its parameters are, piece by piece."""

    pieces: tuple[Tensor, ...]  # f32, shaped as the pieces of the model


class _Place(NamedTuple):
    """One piece of a fragment in the model. `held` shares the memory of the parameter.

    Where a parameter is sharded, `held` is what this rank has of the piece, which may be nothing.
    """

    held: Tensor
    begin: int  # of the piece in the flat fragment
    end: int
    window: ShardWindow | None  # of what is held, in a whole flat fragment; None: it is all between begin and end

    def of(self, flat: Tensor) -> Tensor:
        """What of a flat fragment belongs here; it shares its memory."""
        return flat[self.begin : self.end].view(self.held.shape) if self.window is None else self.window.view(flat)


class ModelView:
    """The parameters and buffers of a model, by fragment.

    >>> model = nn.Linear(2, 1)
    >>> view = ModelView(model, make_plan(describe_tensors(model), 1, "balanced"))
    >>> view.write(0, torch.tensor([0.5, 1.0, 2.0]))  # the bias comes first: pieces are sorted by name
    >>> model.weight.tolist()
    [[1.0, 2.0]]

    Parameters may be sharded (DTensor). Flat fragments are whole all the same, and only what this rank holds is read
    and written; or, `packed`, they are what this rank holds and nothing else.
    """

    def __init__(self, model: nn.Module, plan: FragmentPlan, packed: bool = False) -> None:
        _check_fit(describe_tensors(model), plan)
        self.plan = plan
        self.packed = packed
        self.boxes = local_boxes(model)
        self._sources = _sources(model)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._windows = [shard_windows(plan, p, self.boxes) for p in range(len(plan.fragments))] if self.boxes else []
        # Of everything that travels, what this rank holds.
        self.local_numel = sum(each[-1].packed_end for each in self._windows) if self.boxes else plan.total_numel

    def _places(self, fragment: int) -> list[_Place]:
        """Looked up at each use: a module may have been moved, or have put a new tensor in the place of a buffer."""
        if self.boxes:
            return self._sharded_places(fragment)
        places = []
        for piece, begin, end in self.plan.spans(fragment):
            rows = self._held(piece.tensor)[piece.start : piece.stop]
            places.append(_Place(rows, begin, end, None))
        return places

    def _held(self, name: str) -> Tensor:
        tensor = local_tensor(
            self._sources[name]()
        ).detach()  # in this order: to detach a DTensor is dispatched, at 20 us
        return tensor if tensor.dim() else tensor.unsqueeze(0)

    def _sharded_places(self, fragment: int) -> list[_Place]:
        places = []
        for window in self._windows[fragment]:
            held = self._held(window.piece.tensor)[window.local_rows]
            if self.packed:
                places.append(_Place(held, window.packed_begin, window.packed_end, None))
            else:
                held = held if held.numel() else held.reshape(window.part_shape)
                places.append(_Place(held, window.begin, window.end, window))
        return places

    def numel(self, fragment: int) -> int:
        """Of the flat fragment."""
        if self.packed and self.boxes:
            return self._windows[fragment][-1].packed_end
        return self.plan.numel(fragment)

    def device_bytes(self, fragment: int) -> int:
        """What reading and adopting takes on a device: a snapshot, a value and a reference. Nothing on the host."""
        return sum(3 * 4 * place.held.numel() for place in self._places(fragment) if place.held.is_cuda)

    def buffer(self, fragment: int) -> Tensor:
        """A flat fragment in host memory, pinned where that makes copies faster. Not filled."""
        pinned = any(place.held.is_cuda for place in self._places(fragment))
        return torch.empty(self.numel(fragment), dtype=torch.float32, pin_memory=pinned)

    # -------------------------------------------------------------------------------------------------------- reading

    @torch.no_grad()
    def read(self, fragment: int, out: Tensor) -> None:
        """The fragment as it stands, into `out`. Done when this returns."""
        self.begin_read(fragment, out)()

    @torch.no_grad()
    def begin_read(self, fragment: int, out: Tensor) -> Callable[[], None]:
        """Take the fragment as it stands now. `out` holds it after the returned function, from any thread, has run.

        The next step may begin at once: it does not change what was taken.
        """
        self._check_flat(fragment, out)
        on_cuda: set[torch.device] = set()
        for place in self._places(fragment):
            held, target = place.held, place.of(out)
            if held.is_cuda:
                snapshot = held.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
                stream = self._stream(held.device)
                stream.wait_stream(torch.cuda.current_stream(held.device))
                with torch.cuda.stream(stream):
                    target.copy_(snapshot, non_blocking=True)
                snapshot.record_stream(stream)
                on_cuda.add(held.device)
            else:
                target.copy_(held)
        events = [self._stream(device).record_event() for device in on_cuda]
        return lambda: _wait(events)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """One side stream per device. Two threads may ask for it at the same moment: both get the one that is kept."""
        if device not in self._streams:
            self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        return self._streams[device]

    # -------------------------------------------------------------------------------------------------------- writing

    @torch.no_grad()
    def stage(self, fragment: int, flat: Tensor) -> StagedFragment:
        """Bring a flat fragment to where its parameters are, before the step boundary and from any thread.

        On the CPU these are views: `flat` must not change before it was adopted.
        """
        self._check_flat(fragment, flat)
        pieces, on_cuda = [], set()
        for place in self._places(fragment):
            held, source = place.held, place.of(flat)
            if held.is_cuda:
                with torch.cuda.stream(self._stream(held.device)):
                    pieces.append(source.to(held.device, non_blocking=True))
                on_cuda.add(held.device)
            else:
                pieces.append(source.to(held.device))
        _wait([self._stream(device).record_event() for device in on_cuda])
        return StagedFragment(tuple(pieces))

    def write(self, fragment: int, flat: Tensor | StagedFragment) -> None:
        """The parameters become these values, rounded to their dtype."""
        self.adopt(fragment, "overwrite", flat, None, 0.0)

    @torch.no_grad()
    def adopt(
        self,
        fragment: int,
        method: str,
        value: Tensor | StagedFragment,
        reference: Tensor | StagedFragment | None,
        alpha: float = 0.0,
    ) -> None:
        """Take a published value into the parameters theta. Buffers are overwritten, however parameters are adopted.

        overwrite: theta = value
        blend: theta = alpha theta + (1 - alpha) value
        carry: theta = value + (theta - reference), which is exactly value where theta is the reference
        """
        if method not in ADOPT_METHODS:
            raise ValueError(f"there is no way {method!r} to adopt a fragment; give one of {', '.join(ADOPT_METHODS)}")
        if method == "carry" and reference is None:
            raise ValueError("carry needs the reference: what the steps since are measured against")
        if self.plan.holds_buffers(fragment):
            method = "overwrite"
        values = self._staged(fragment, value)
        references = itertools.repeat(None) if reference is None else self._staged(fragment, reference)
        for place, new, old in zip(self._places(fragment), values, references, strict=False):
            held = place.held
            if method == "overwrite":
                held.copy_(new)
            elif method == "blend":
                for theta, part in _chunks(held, new):
                    theta.copy_(alpha * _wide(theta) + (1.0 - alpha) * part)
            else:
                assert old is not None
                _carry(held, new, old)

    def _staged(self, fragment: int, flat: Tensor | StagedFragment) -> tuple[Tensor, ...]:
        staged = flat if isinstance(flat, StagedFragment) else self.stage(fragment, flat)
        for place, piece in zip(self._places(fragment), staged.pieces, strict=True):
            if piece.is_cuda:  # it was made on another stream; its memory must not be given away before ours is done
                piece.record_stream(torch.cuda.current_stream(place.held.device))
        return staged.pieces

    # ------------------------------------------------------------------------------------------------------- rounding

    def is_f32_exact(self, fragment: int) -> bool:
        """Whether the parameters hold any f32 value as it is, so that `round_to_dtype` changes nothing."""
        return all(place.held.dtype in (torch.float32, torch.float64) for place in self._places(fragment))

    @torch.no_grad()
    def round_to_dtype(self, fragment: int, flat: Tensor, out: Tensor) -> None:
        """What the parameters hold after `write`, into `out` (which may be `flat`).

        Deltas are taken against this: the rounding of a published value to bf16 weights is nobody's training.
        """
        self._check_flat(fragment, flat)
        self._check_flat(fragment, out)
        for held, begin, end, _ in self._places(fragment):
            exact = held.dtype in (torch.float32, torch.float64)
            out[begin:end].copy_(flat[begin:end] if exact else flat[begin:end].to(held.dtype))

    def _check_flat(self, fragment: int, flat: Tensor) -> None:
        if flat.shape != (self.numel(fragment),) or flat.dtype != torch.float32 or not flat.is_contiguous():
            raise ValueError(
                f"fragment {fragment} is a flat f32 tensor of {self.numel(fragment)} elements, "
                f"not {str(flat.dtype).removeprefix('torch.')} of shape {tuple(flat.shape)}"
            )


def _carry(theta: Tensor, value: Tensor, reference: Tensor) -> None:
    """Written as value - (reference - theta): subtracting +0 leaves every value as it is, also -0."""
    if theta.dtype == torch.float32:
        torch.sub(reference, theta, out=theta)
        torch.sub(value, theta, out=theta)
        return
    for held, new, old in _chunks(theta, value, reference):
        held.copy_(new - (old - _wide(held)))


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def _chunks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """The same elements of tensors of one shape, a chunk at a time where they lie in a row."""
    first = tensors[0]
    if first.numel() <= ADOPT_CHUNK_NUMEL or first.is_cuda or not all(each.is_contiguous() for each in tensors):
        return [tensors]
    return zip(*(torch.split(each.view(-1), ADOPT_CHUNK_NUMEL) for each in tensors), strict=True)


def _wait(events: Iterable[torch.cuda.Event]) -> None:
    for event in events:
        event.synchronize()


def _sources(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """How to get at the tensors of a model: parameters stay the same objects, buffers are asked of their module."""
    owners = {
        id(buffer): (module, name)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    }
    made: dict[str, Callable[[], Tensor]] = {}
    for name, tensor in named_tensors(model).items():
        made[name] = partial(getattr, *owners[id(tensor)]) if id(tensor) in owners else partial(_same, tensor)
    return made


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _check_fit(tensors: tuple[TensorInfo, ...], plan: FragmentPlan) -> None:
    """Raise at the first difference. Which weights are embeddings is for the plan to say, so it is not compared."""
    mine, theirs = {tensor.name: tensor for tensor in tensors}, plan.by_name
    for name in sorted({*mine, *theirs}):
        if name not in theirs:
            raise ValueError(f"the model has {mine[name]}, which the plan does not know; build the model of the run")
        if name not in mine:
            raise ValueError(f"the plan has {theirs[name]}, which the model lacks; build the model of the run")
        if _without_embedding(mine[name]) != _without_embedding(theirs[name]):
            raise ValueError(f"the model has {mine[name]}, the plan {theirs[name]}; build the model of the run")


def _without_embedding(tensor: TensorInfo) -> TensorInfo:
    return tensor._replace(kind="weight") if tensor.kind == "embedding" else tensor
