"""Make the fragment plan: which tensors of a model are synchronized, and in which fragment.

The plan is a pure function of names, shapes and dtypes. Every learner makes it from its own model, with the same result
for any order of registration. The first learner to join uploads its plan along with the initial values.

Torch is imported only by functions that inspect a model: a plan is read from a file without it.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

TENSOR_KINDS = ("weight", "embedding", "buffer", "frozen")
PLAN_METHODS = ("balanced", "layers", "rows")

MAX_ROWS_IMBALANCE = 1.1
"""Largest fragment of the plan `rows`, relative to the mean, unless single rows are larger."""

MAX_FRAGMENTS = 4096
MAX_TENSORS = 1_000_000
MAX_NUMEL = 2**48
"""Limits for a plan from another process."""

_SYNCED_DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that torch converts to f32 and back, and that every supported version of safetensors can write."""


class TensorInfo(NamedTuple):
    """Tensor of a model. `digest` is that of a frozen tensor's bytes, which must be equal at all learners."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name: float32, bfloat16
    kind: str  # weight, embedding, buffer or frozen; frozen tensors are not synchronized
    digest: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Size of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def is_synced(self) -> bool:
        return self.kind != "frozen" and self.numel > 0

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.name} {shape} {self.dtype} {self.kind}{' ' if self.digest else ''}{self.digest}"


class Piece(NamedTuple):
    """Rows `start` up to `stop` of a tensor. Each piece is merged, stepped and adopted separately."""

    tensor: str
    kind: str
    start: int
    stop: int
    numel: int


@dataclass(frozen=True)
class FragmentPlan:
    """Disjoint fragments that cover the synchronized tensors. A flat fragment is the concatenation of its pieces.

    A fragment has parameters or buffers, never both: buffers have their own rules for merging, encoding and adopting.
    """

    method: str
    tensors: tuple[TensorInfo, ...]  # sorted by name
    fragments: tuple[tuple[Piece, ...], ...]  # each sorted by tensor and row

    def __post_init__(self) -> None:
        _check_plan(self)

    def numel(self, fragment: int) -> int:
        return self._numels[fragment]

    def spans(self, fragment: int) -> tuple[tuple[Piece, int, int], ...]:
        """Return the pieces of a fragment, each with its begin and end in the flat fragment."""
        return self._spans[fragment]

    def holds_buffers(self, fragment: int) -> bool:
        return self._of_buffers[fragment]

    def allowed_codecs(self, fragment: int, chosen: tuple[str, ...]) -> tuple[str, ...]:
        """Return the codecs that a fragment may use: those of the run, or f32 alone for buffers."""
        return ("f32",) if self.holds_buffers(fragment) else chosen

    @property
    def total_numel(self) -> int:
        return sum(self._numels)

    @property
    def imbalance(self) -> float:
        """Largest fragment relative to the mean: 1.0 is balanced."""
        return max(self._numels) * len(self.fragments) / self.total_numel

    @cached_property
    def by_name(self) -> dict[str, TensorInfo]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def _numels(self) -> tuple[int, ...]:
        return tuple(sum(piece.numel for piece in pieces) for pieces in self.fragments)

    @cached_property
    def _of_buffers(self) -> tuple[bool, ...]:
        kinds = [{piece.kind == "buffer" for piece in pieces} for pieces in self.fragments]
        mixed = [fragment for fragment, present in enumerate(kinds) if len(present) > 1]
        if mixed:
            raise ValueError(
                f"fragment {mixed[0]} holds parameters and buffers: an earlier version of Atoll created this run;"
                " export its model (atoll export) and start a new run from it (atoll syncer --init)"
            )
        return tuple(True in present for present in kinds)

    @cached_property
    def _spans(self) -> tuple[tuple[tuple[Piece, int, int], ...], ...]:
        made = []
        for pieces in self.fragments:
            begin, spans = 0, []
            for piece in pieces:
                spans.append((piece, begin, begin + piece.numel))
                begin += piece.numel
            made.append(tuple(spans))
        return tuple(made)

    def fingerprint(self) -> tuple[str, ...]:
        """Return a line per tensor and one for the plan. They must be equal at all learners."""
        buffers = sum(self._of_buffers)
        suffix = f" buffers {buffers}" if buffers else ""
        return (*map(str, self.tensors), f"plan {self.method} {len(self.fragments)}{suffix}")

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON. A piece is the index of its tensor in the list of tensors, and its rows."""
        places = {tensor.name: place for place, tensor in enumerate(self.tensors)}
        return {
            "how": self.method,
            "tensors": [[each.name, list(each.shape), each.dtype, each.kind, each.digest] for each in self.tensors],
            "fragments": [
                [[places[piece.tensor], piece.start, piece.stop] for piece in pieces] for pieces in self.fragments
            ],
        }

    @classmethod
    def from_json(cls, raw: object) -> FragmentPlan:
        """Read the result of `to_json`. Raise ValueError unless it covers its tensors exactly once."""
        if not isinstance(raw, Mapping) or set(raw) != {"how", "tensors", "fragments"}:
            raise ValueError("a fragment plan must be an object with the keys how, tensors and fragments")
        if not isinstance(raw["how"], str) or raw["how"] not in PLAN_METHODS:
            raise ValueError(f"unknown fragment plan {str(raw['how'])[:40]!r}; give one of {', '.join(PLAN_METHODS)}")
        tensors = tuple(_read_tensor(each) for each in _check_list(raw["tensors"], MAX_TENSORS, "tensors"))
        fragments = tuple(
            tuple(_read_piece(each, tensors) for each in _check_list(pieces, MAX_TENSORS, "pieces of a fragment"))
            for pieces in _check_list(raw["fragments"], MAX_FRAGMENTS, "fragments")
        )
        return cls(raw["how"], tensors, fragments)


# ------------------------------------------------------------------------------------------------------ making a plan


def make_plan(tensors: Iterable[TensorInfo], fragments: int, method: str) -> FragmentPlan:
    """Distribute the synchronized tensors over at most `fragments` fragments; fewer if there are fewer pieces.

    balanced: by size descending, each tensor into the smallest fragment so far; at most 4/3 of the best possible.
    layers: layer i into fragment i mod P, so that each fragment has layers from all depths; the rest as above.
    rows: as balanced, with tensors cut by rows so that no fragment exceeds 1.1 times the mean, unless rows are larger.

    Parameters and buffers are distributed separately. Buffers get fragments in proportion to their size, at least one,
    after those of the parameters. A model with both has at least two fragments.
    """
    if method not in PLAN_METHODS:
        raise ValueError(f"unknown fragment plan {method!r}; give one of {', '.join(PLAN_METHODS)}")
    if not 1 <= fragments <= MAX_FRAGMENTS:
        raise ValueError(f"a model is cut into 1 to {MAX_FRAGMENTS} fragments, not {fragments}")
    ordered = tuple(sorted(tensors))
    parameters = [tensor for tensor in ordered if tensor.is_synced and tensor.kind != "buffer"]
    buffers = [tensor for tensor in ordered if tensor.is_synced and tensor.kind == "buffer"]
    if not parameters and not buffers:
        raise ValueError(
            "this model has nothing to synchronize: it has no trainable parameter and no floating-point buffer"
        )
    buffer_fragments = fragments if not parameters else _count_buffer_fragments(parameters, buffers, fragments)
    distributed = _distribute(parameters, max(1, fragments - buffer_fragments), method) + _distribute(
        buffers, buffer_fragments, method
    )
    return FragmentPlan(method, ordered, tuple(tuple(_merge_adjacent(sorted(pieces))) for pieces in distributed))


def make_stable_plan(tensors: Sequence[TensorInfo], fragments: int, method: str) -> FragmentPlan:
    """Return a plan with at most `fragments` fragments that equals the plan for its own number of fragments.

    A learner that joins later knows only that number, and must make the same plan.
    """
    plan = make_plan(tensors, fragments, method)
    while plan != (again := make_plan(tensors, len(plan.fragments), method)):
        plan = again
    return plan


def _count_buffer_fragments(parameters: Sequence[TensorInfo], buffers: Sequence[TensorInfo], fragments: int) -> int:
    numel = sum(tensor.numel for tensor in buffers)
    total = numel + sum(tensor.numel for tensor in parameters)
    nearest = (2 * fragments * numel + total) // (2 * total)
    return max(1, min(nearest, fragments - 1)) if buffers else 0


def _distribute(tensors: Sequence[TensorInfo], fragments: int, how: str) -> list[list[Piece]]:
    whole = [_make_piece(tensor, 0, tensor.rows) for tensor in tensors]
    if not whole:
        return []
    if how == "layers":
        return _distribute_layers(whole, fragments)
    if how == "rows":
        return _distribute_rows(tensors, fragments)
    return _distribute_by_size(whole, [[] for _ in range(min(fragments, len(whole)))])


def _make_piece(tensor: TensorInfo, start: int, stop: int) -> Piece:
    return Piece(tensor.name, tensor.kind, start, stop, tensor.numel // tensor.rows * (stop - start))


def _distribute_by_size(pieces: Iterable[Piece], into: list[list[Piece]]) -> list[list[Piece]]:
    """Assign each piece, largest first, to the smallest fragment so far."""
    heap = [(sum(piece.numel for piece in assigned), place) for place, assigned in enumerate(into)]
    heapq.heapify(heap)
    for piece in sorted(pieces, key=lambda piece: (-piece.numel, piece.tensor, piece.start)):
        size, place = heap[0]
        into[place].append(piece)
        heapq.heapreplace(heap, (size + piece.numel, place))
    return into


_LAYER = re.compile(r"(?P<stack>(?:[^.]+\.)*?)(?P<index>[0-9]+)(?:\.|$)")


def _distribute_layers(pieces: Sequence[Piece], fragments: int) -> list[list[Piece]]:
    """Assign layers in the order of their stacks and indices; then the pieces that belong to no layer."""
    layers: dict[tuple[str, int], list[Piece]] = {}
    others: list[Piece] = []
    for piece in pieces:
        match = _LAYER.match(piece.tensor)
        if match is None:
            others.append(piece)
        else:
            layers.setdefault((match["stack"], int(match["index"][:18])), []).append(piece)
    into: list[list[Piece]] = [[] for _ in range(min(fragments, len(layers) + len(others)))]
    for place, layer in enumerate(sorted(layers)):
        into[place % len(into)] += layers[layer]
    return _distribute_by_size(others, into)


def _distribute_rows(synced: Sequence[TensorInfo], fragments: int) -> list[list[Piece]]:
    """Like `_distribute_by_size`, but cut a tensor that would make the smallest fragment too large.

    The fragment gets the rows that fill it to the mean. The smallest fragment is below the mean while rows are left,
    so only a row larger than a tenth of the mean can make one too large.
    """
    mean = sum(tensor.numel for tensor in synced) / fragments
    into: list[list[Piece]] = [[] for _ in range(fragments)]
    heap = [(0, place) for place in range(fragments)]
    for tensor in sorted(synced, key=lambda tensor: (-tensor.numel, tensor.name)):
        per_row, start = tensor.numel // tensor.rows, 0
        while start < tensor.rows:
            size, place = heap[0]
            stop = tensor.rows
            if size + per_row * (stop - start) > MAX_ROWS_IMBALANCE * mean:
                stop = start + max(1, int((mean - size) / per_row))
            into[place].append(_make_piece(tensor, start, min(stop, tensor.rows)))
            heapq.heapreplace(heap, (size + into[place][-1].numel, place))
            start = stop
    return [pieces for pieces in into if pieces]


def _merge_adjacent(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge adjacent rows of a tensor in one fragment into one piece."""
    made: list[Piece] = []
    for piece in pieces:
        last = made[-1] if made else None
        if last is not None and (last.tensor, last.stop) == (piece.tensor, piece.start):
            made[-1] = last._replace(stop=piece.stop, numel=last.numel + piece.numel)
        else:
            made.append(piece)
    return made


# ---------------------------------------------------------------------------------------------------- looking at models


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent floating-point buffers, sorted by name. Tied ones appear once.

    A tied parameter has several names, in the order of registration; the alphabetically first one is used. Wrappers of
    DDP and torch.compile are ignored, so that learners may differ in them.
    """
    from torch.nn.parameter import is_lazy

    model = _unwrap_ddp(model)
    names: dict[int, tuple[str, Tensor]] = {}
    candidates: list[tuple[str, Tensor]] = list(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            is_persistent = name not in module._non_persistent_buffers_set
            if is_persistent and (buffer.is_floating_point() or buffer.is_complex()):
                candidates.append((f"{prefix}.{name}" if prefix else name, buffer))
    for name, tensor in candidates:
        if is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet; run the model once before you create the learner")
        plain = canonical_name(name)
        names[id(tensor)] = min(names.get(id(tensor), (plain, tensor)), (plain, tensor), key=lambda known: known[0])
    return dict(sorted(names.values(), key=lambda known: known[0]))


def _unwrap_ddp(model: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def canonical_name(name: str) -> str:
    """Return a parameter's name without the prefixes of torch.compile and activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def describe_tensors(model: nn.Module, embeddings: Sequence[str] = ()) -> tuple[TensorInfo, ...]:
    """Describe the tensors that a plan is made from: every parameter, and the synchronized buffers, sorted by name.

    - Parameters that do not require a gradient are frozen: they are not synchronized, only their digest is compared.
    - Weights of nn.Embedding and nn.EmbeddingBag are embeddings, also if a head is tied to them, and so are parameters
      that match a pattern in `embeddings`.
    - Persistent floating-point buffers are averaged. Other buffers (counters, masks) stay local, and so do buffers of a
      module whose own parameters are all frozen.
    - Tensors without elements are not synchronized. Complex tensors that would be synchronized are refused, because no
      published model could be saved with them.
    """
    from torch import nn

    model = _unwrap_ddp(model)
    tensors = named_tensors(model)
    _check_memory(tensors)
    embedding_ids = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters()
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatchcase(canonical_name(name), pattern) for pattern in embeddings):
            embedding_ids.add(id(parameter))
    local_buffers = {
        id(buffer) for module in model.modules() if _is_frozen(module) for buffer in module.buffers(recurse=False)
    }
    infos = []
    for name, tensor in tensors.items():
        if id(tensor) in local_buffers:
            continue
        kind, digest = "weight", ""
        if not isinstance(tensor, nn.Parameter):
            kind = "buffer"
        elif not tensor.requires_grad:
            kind, digest = "frozen", tensor_digest(tensor)
        elif id(tensor) in embedding_ids:
            kind = "embedding"
        dtype = str(tensor.dtype).removeprefix("torch.")
        if kind != "frozen" and dtype not in _SYNCED_DTYPES:
            raise ValueError(_describe_refused_dtype(name, dtype, kind))
        infos.append(TensorInfo(name, tuple(tensor.shape), dtype, kind, digest))
    if not any(info.is_synced for info in infos):
        raise ValueError(
            "this model has nothing to synchronize: it has no trainable parameter and no floating-point buffer"
        )
    return tuple(infos)


def _describe_refused_dtype(name: str, dtype: str, kind: str) -> str:
    synced = f"keep it in {', '.join(_SYNCED_DTYPES)}"
    if dtype.startswith("complex"):
        synced = "register torch.view_as_real of it, and use torch.view_as_complex of that in forward"
    local = "register it with persistent=False" if kind == "buffer" else "freeze it"
    return f"{name} is {dtype}, which cannot be merged and saved: {synced}; or {local}, and it stays local"


def _is_frozen(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    return bool(own) and not any(parameter.requires_grad for parameter in own)


def tensor_digest(tensor: Tensor) -> str:
    """Return the xxh3 of the bytes in index order, for any strides.

    For a sharded tensor it is the digest of the whole tensor, and a collective call on all of its ranks.
    """
    import torch
    import xxhash

    if hasattr(tensor, "full_tensor"):
        with torch.no_grad():
            tensor = tensor.full_tensor()
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return xxhash.xxh3_128_hexdigest(plain.view(torch.uint8).numpy().data)


def _check_memory(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that cannot be changed in place, and tensors that share memory, which would be updated twice."""
    import torch

    seen: dict[tuple[object, ...], str] = {}
    for name, named in tensors.items():
        tensor = named.to_local() if hasattr(named, "to_local") else named  # this process's part
        if tensor.is_meta or tensor.layout != torch.strided:
            raise ValueError(f"{name} is not a dense tensor with values; move the model to a device first")
        if tensor.numel() == 0 or (isinstance(named, torch.nn.Parameter) and not named.requires_grad):
            continue
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"{name} is a lazy conjugate or negative; call resolve_conj() and resolve_neg() on it")
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        if any(size > 1 and stride == 0 for size, stride in sizes):
            raise ValueError(f"{name} is an expanded tensor, which cannot be written to; call contiguous() on it")
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if place in seen:
            raise ValueError(
                f"{seen[place]} and {name} are two tensors in one memory; tie them by making them the same parameter"
            )
        seen[place] = name


# ----------------------------------------------------------------------------------------------- plans from elsewhere


def _check_plan(plan: FragmentPlan) -> None:
    """Raise ValueError unless the pieces match their tensors and cover every synchronized tensor exactly once."""
    names = [tensor.name for tensor in plan.tensors]
    if names != sorted(set(names)):
        raise ValueError("the tensors of a fragment plan are not sorted by name, or a name occurs twice")
    by_tensor: dict[str, list[Piece]] = {}
    for fragment, pieces in enumerate(plan.fragments):
        if not pieces:
            raise ValueError(f"fragment {fragment} of the plan is empty")
        if list(pieces) != sorted(pieces):
            raise ValueError(f"the pieces of fragment {fragment} are not sorted by tensor and row")
        for piece in pieces:
            by_tensor.setdefault(piece.tensor, []).append(piece)
    total = 0
    for tensor in plan.tensors:
        own_pieces = sorted(by_tensor.pop(tensor.name, []), key=lambda piece: piece.start)
        if not tensor.is_synced:
            if own_pieces:
                raise ValueError(f"{tensor.name} is frozen, yet a fragment holds it")
            continue
        at = 0
        for piece in own_pieces:
            if piece.start != at or piece.stop <= at or piece != _make_piece(tensor, piece.start, piece.stop):
                raise ValueError(f"row {at} of {tensor.name} is not in exactly one fragment")
            at = piece.stop
        if at != tensor.rows:
            raise ValueError(f"the fragments hold {at} of {tensor.rows} rows of {tensor.name}")
        total += tensor.numel
    if by_tensor:
        raise ValueError(f"a fragment contains the tensor {min(by_tensor)!r}, which the plan does not list")
    if total == 0:
        raise ValueError("the fragment plan is empty: it has no tensor to synchronize")
    if total > MAX_NUMEL:
        raise ValueError(f"the fragment plan has {total:,} values; the maximum is {MAX_NUMEL:,}")


def _check_list(raw: object, max_length: int, what: str) -> list[Any]:
    if not isinstance(raw, list) or len(raw) > max_length:
        raise ValueError(f"the {what} of a plan must be a list of at most {max_length:,}")
    return raw


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_NUMEL


def _read_tensor(raw: object) -> TensorInfo:
    if not isinstance(raw, list) or len(raw) != 5:
        raise ValueError("a tensor of a plan is a list of name, shape, dtype, kind and digest")
    name, shape, dtype, kind, digest = raw
    if not isinstance(name, str) or not 0 < len(name) <= 1000:
        raise ValueError("a tensor of a plan has no name, or one of more than 1000 letters")
    if not isinstance(shape, list) or len(shape) > 64 or not all(_is_size(size) for size in shape):
        raise ValueError(f"the shape of {name} is not a list of sizes from 0 to {MAX_NUMEL:,}")
    if not isinstance(kind, str) or kind not in TENSOR_KINDS:
        raise ValueError(f"{name} has no kind out of {', '.join(TENSOR_KINDS)}")
    if not isinstance(dtype, str) or not re.fullmatch(r"[a-z0-9_]{1,30}", dtype):
        raise ValueError(f"the dtype of {name} is not the name of one")
    if kind != "frozen" and dtype not in _SYNCED_DTYPES:
        raise ValueError(f"{name} has dtype {dtype}; only tensors of {', '.join(_SYNCED_DTYPES)} can be synchronized")
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{32}" if kind == "frozen" else "", digest):
        raise ValueError(f"invalid digest of {name} for a {kind} tensor")
    return TensorInfo(name, tuple(shape), dtype, kind, digest)


def _read_piece(raw: object, tensors: Sequence[TensorInfo]) -> Piece:
    if not isinstance(raw, list) or len(raw) != 3 or not all(_is_size(each) for each in raw):
        raise ValueError("a piece of a plan is a list of tensor, first row and end")
    place, start, stop = raw
    if place >= len(tensors) or not start < stop <= tensors[place].rows:
        raise ValueError("a piece of a plan names a tensor or rows that do not exist")
    return _make_piece(tensors[place], start, stop)
