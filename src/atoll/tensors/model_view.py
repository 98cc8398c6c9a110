"""Read the fragments of a plan from a model's parameters, and adopt published values into them.

Flat fragments are f32 tensors in host memory. Parameters may have any dtype, strides and device. Arithmetic is in f32
(in f64 for f64 parameters) and rounded once.

On CUDA no step boundary waits for a copy. Reading makes a copy on the device, in the order of the training stream, and
a side stream copies that to the host. `stage` copies values to the device in advance.
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
"""Elements per adoption step that needs temporaries, so that these fit into the cache."""


class StagedFragment(NamedTuple):
    """A flat fragment on the devices of its parameters, piece by piece."""

    pieces: tuple[Tensor, ...]  # f32, in the shapes of the model's pieces


class _BoundPiece(NamedTuple):
    """Piece of a fragment in the model.

    `local` shares the memory of the parameter. For a sharded parameter it is this rank's shard of the piece, which may
    be empty.
    """

    local: Tensor
    begin: int  # range of the piece in the flat fragment
    end: int
    window: ShardWindow | None  # position of `local` in a whole flat fragment; None if `local` is all of [begin, end)

    def select(self, flat: Tensor) -> Tensor:
        """Return the view of a flat fragment that belongs to `local`."""
        return flat[self.begin : self.end].view(self.local.shape) if self.window is None else self.window.view(flat)


class ModelView:
    """Parameters and buffers of a model, by fragment.

    >>> model = nn.Linear(2, 1)
    >>> view = ModelView(model, make_plan(describe_tensors(model), 1, "balanced"))
    >>> view.write(0, torch.tensor([0.5, 1.0, 2.0]))  # the bias comes first: pieces are sorted by name
    >>> model.weight.tolist()
    [[1.0, 2.0]]

    Parameters may be sharded (DTensor). Flat fragments are whole nevertheless, and only this rank's part is read and
    written. With `packed`, flat fragments contain only this rank's part.
    """

    def __init__(self, model: nn.Module, plan: FragmentPlan, packed: bool = False) -> None:
        _check_matches_plan(describe_tensors(model), plan)
        self.plan = plan
        self.packed = packed
        self.boxes = local_boxes(model)
        self._tensor_getters = _tensor_getters(model)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._windows = [shard_windows(plan, p, self.boxes) for p in range(len(plan.fragments))] if self.boxes else []
        # Number of synchronized values that this rank holds.
        self.local_numel = sum(each[-1].packed_end for each in self._windows) if self.boxes else plan.total_numel

    def _bound_pieces(self, fragment: int) -> list[_BoundPiece]:
        """Look up the tensors again at each use, because modules may move to another device or replace a buffer."""
        if self.boxes:
            return self._bound_sharded_pieces(fragment)
        bound = []
        for piece, begin, end in self.plan.spans(fragment):
            rows = self._local_tensor(piece.tensor)[piece.start : piece.stop]
            bound.append(_BoundPiece(rows, begin, end, None))
        return bound

    def _local_tensor(self, name: str) -> Tensor:
        # to_local before detach: detaching a DTensor costs 20 us of dispatch.
        tensor = local_tensor(self._tensor_getters[name]()).detach()
        return tensor if tensor.dim() else tensor.unsqueeze(0)

    def _bound_sharded_pieces(self, fragment: int) -> list[_BoundPiece]:
        bound = []
        for window in self._windows[fragment]:
            local = self._local_tensor(window.piece.tensor)[window.local_rows]
            if self.packed:
                bound.append(_BoundPiece(local, window.packed_begin, window.packed_end, None))
            else:
                local = local if local.numel() else local.reshape(window.part_shape)
                bound.append(_BoundPiece(local, window.begin, window.end, window))
        return bound

    def numel(self, fragment: int) -> int:
        """Return the number of values of the flat fragment."""
        if self.packed and self.boxes:
            return self._windows[fragment][-1].packed_end
        return self.plan.numel(fragment)

    def device_bytes(self, fragment: int) -> int:
        """Return the device memory for reading and adopting: a copy, a value and a reference. 0 on the CPU."""
        return sum(
            3 * 4 * piece_view.local.numel() for piece_view in self._bound_pieces(fragment) if piece_view.local.is_cuda
        )

    def buffer(self, fragment: int) -> Tensor:
        """Allocate an uninitialized flat fragment in host memory, pinned if parameters are on CUDA."""
        pinned = any(piece_view.local.is_cuda for piece_view in self._bound_pieces(fragment))
        return torch.empty(self.numel(fragment), dtype=torch.float32, pin_memory=pinned)

    # -------------------------------------------------------------------------------------------------------- reading

    @torch.no_grad()
    def read(self, fragment: int, out: Tensor) -> None:
        """Copy the current values of the fragment into `out`, synchronously."""
        self.begin_read(fragment, out)()

    @torch.no_grad()
    def begin_read(self, fragment: int, out: Tensor) -> Callable[[], None]:
        """Start a copy of the current values into `out`. Call the returned function to wait for its completion.

        The returned function may be called from any thread. The next training step may start at once: it does not
        change the copy.
        """
        self._check_flat(fragment, out)
        on_cuda: set[torch.device] = set()
        for piece_view in self._bound_pieces(fragment):
            local, target = piece_view.local, piece_view.select(out)
            if local.is_cuda:
                snapshot = local.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
                stream = self._stream(local.device)
                stream.wait_stream(torch.cuda.current_stream(local.device))
                with torch.cuda.stream(stream):
                    target.copy_(snapshot, non_blocking=True)
                snapshot.record_stream(stream)
                on_cuda.add(local.device)
            else:
                target.copy_(local)
        events = [self._stream(device).record_event() for device in on_cuda]
        return lambda: _wait(events)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the side stream of a device. Thread-safe: concurrent calls return the same stream."""
        if device not in self._streams:
            self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        return self._streams[device]

    # -------------------------------------------------------------------------------------------------------- writing

    @torch.no_grad()
    def stage(self, fragment: int, flat: Tensor) -> StagedFragment:
        """Copy a flat fragment to the devices of its parameters, before the step boundary and from any thread.

        On the CPU the result is a view: `flat` must not change before it is adopted.
        """
        self._check_flat(fragment, flat)
        pieces, on_cuda = [], set()
        for piece_view in self._bound_pieces(fragment):
            local, source = piece_view.local, piece_view.select(flat)
            if local.is_cuda:
                with torch.cuda.stream(self._stream(local.device)):
                    pieces.append(source.to(local.device, non_blocking=True))
                on_cuda.add(local.device)
            else:
                pieces.append(source.to(local.device))
        _wait([self._stream(device).record_event() for device in on_cuda])
        return StagedFragment(tuple(pieces))

    def write(self, fragment: int, flat: Tensor | StagedFragment) -> None:
        """Set the parameters to these values, rounded to their dtype."""
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
        """Adopt a published value into the parameters theta. Buffers are always overwritten.

        overwrite: theta = value
        blend: theta = alpha theta + (1 - alpha) value
        carry: theta = value + (theta - reference), which is exactly value if theta equals the reference
        """
        if method not in ADOPT_METHODS:
            raise ValueError(f"unknown method {method!r} to adopt a fragment; use one of {', '.join(ADOPT_METHODS)}")
        if method == "carry" and reference is None:
            raise ValueError("carry needs the reference: the value that the unmerged steps started from")
        if self.plan.holds_buffers(fragment):
            method = "overwrite"
        values = self._get_staged_pieces(fragment, value)
        references = itertools.repeat(None) if reference is None else self._get_staged_pieces(fragment, reference)
        for piece_view, new, old in zip(self._bound_pieces(fragment), values, references, strict=False):
            local = piece_view.local
            if method == "overwrite":
                local.copy_(new)
            elif method == "blend":
                for theta, part in _chunks(local, new):
                    theta.copy_(alpha * _upcast(theta) + (1.0 - alpha) * part)
            else:
                assert old is not None
                _carry(local, new, old)

    def _get_staged_pieces(self, fragment: int, flat: Tensor | StagedFragment) -> tuple[Tensor, ...]:
        staged = flat if isinstance(flat, StagedFragment) else self.stage(fragment, flat)
        for piece_view, piece in zip(self._bound_pieces(fragment), staged.pieces, strict=True):
            if piece.is_cuda:  # allocated on another stream: keep its memory until the current stream is done with it
                piece.record_stream(torch.cuda.current_stream(piece_view.local.device))
        return staged.pieces

    # ------------------------------------------------------------------------------------------------------- rounding

    def is_f32_exact(self, fragment: int) -> bool:
        """Return whether the parameters represent every f32 value exactly, so that `round_to_dtype` changes nothing."""
        return all(
            piece_view.local.dtype in (torch.float32, torch.float64) for piece_view in self._bound_pieces(fragment)
        )

    @torch.no_grad()
    def round_to_dtype(self, fragment: int, flat: Tensor, out: Tensor) -> None:
        """Copy the values that the parameters would hold after `write` into `out`, which may be `flat`.

        Deltas are computed against these values: the rounding of a published value to bf16 weights is not training.
        """
        self._check_flat(fragment, flat)
        self._check_flat(fragment, out)
        for local, begin, end, _ in self._bound_pieces(fragment):
            exact = local.dtype in (torch.float32, torch.float64)
            out[begin:end].copy_(flat[begin:end] if exact else flat[begin:end].to(local.dtype))

    def _check_flat(self, fragment: int, flat: Tensor) -> None:
        if flat.shape != (self.numel(fragment),) or flat.dtype != torch.float32 or not flat.is_contiguous():
            raise ValueError(
                f"fragment {fragment} is a flat f32 tensor of {self.numel(fragment)} elements, "
                f"not {str(flat.dtype).removeprefix('torch.')} of shape {tuple(flat.shape)}"
            )


def _carry(theta: Tensor, value: Tensor, reference: Tensor) -> None:
    """Compute value - (reference - theta). This form is exact for theta = reference: x - (+0) is x, also for x = -0."""
    if theta.dtype == torch.float32:
        torch.sub(reference, theta, out=theta)
        torch.sub(value, theta, out=theta)
        return
    for chunk, new, old in _chunks(theta, value, reference):
        chunk.copy_(new - (old - _upcast(chunk)))


def _upcast(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def _chunks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split tensors of one shape into chunks of the same elements, if they are contiguous and large."""
    first = tensors[0]
    if first.numel() <= ADOPT_CHUNK_NUMEL or first.is_cuda or not all(each.is_contiguous() for each in tensors):
        return [tensors]
    return zip(*(torch.split(each.view(-1), ADOPT_CHUNK_NUMEL) for each in tensors), strict=True)


def _wait(events: Iterable[torch.cuda.Event]) -> None:
    for event in events:
        event.synchronize()


def _tensor_getters(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Return a getter for each tensor of a model. Buffers are looked up in their module, which may replace them."""
    owners = {
        id(buffer): (module, name)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    }
    getters: dict[str, Callable[[], Tensor]] = {}
    for name, tensor in named_tensors(model).items():
        getters[name] = partial(getattr, *owners[id(tensor)]) if id(tensor) in owners else partial(_same, tensor)
    return getters


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _check_matches_plan(tensors: tuple[TensorInfo, ...], plan: FragmentPlan) -> None:
    """Raise ValueError at the first difference. The plan decides which weights are embeddings, so ignore that."""
    mine, theirs = {tensor.name: tensor for tensor in tensors}, plan.by_name
    for name in sorted({*mine, *theirs}):
        if name not in theirs:
            raise ValueError(f"the model has {mine[name]}, which the plan lacks; build the model of the run")
        if name not in mine:
            raise ValueError(f"the plan has {theirs[name]}, which the model lacks; build the model of the run")
        if _without_embedding(mine[name]) != _without_embedding(theirs[name]):
            raise ValueError(f"the model has {mine[name]}, the plan {theirs[name]}; build the model of the run")


def _without_embedding(tensor: TensorInfo) -> TensorInfo:
    return tensor._replace(kind="weight") if tensor.kind == "embedding" else tensor
