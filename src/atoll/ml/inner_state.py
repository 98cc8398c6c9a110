"""The state of an inner optimizer as bytes, by the names of the parameters.

A learner that joins takes it from a peer, whose parameter groups may be in another order. The bytes are a safetensors
file: tensors, and everything else as JSON in its metadata. Nothing is unpickled. Settings of parameter groups such as
the learning rate do not travel: they are the joining learner's own.

The metadata has one key, `atoll`:

| field | meaning |
|---|---|
| `format` | 1 |
| `optimizer` | name of the class |
| `parameters` | name to shape and dtype, and the settings that decide which state there is, such as `amsgrad` |
| `state` | name to key to value: a number, text or null as it is; else `{"tensor": n}`, `{"complex": n}` for pairs, |
|         | `{"list": [...]}`, `{"tuple": [...]}` or `{"dict": {...}}`, with n the name of a tensor of the file |

Shapes are those of whole tensors. Each rank of an island takes what it holds of them; one rank puts them together and
packs them (`whole`), and whoever loads them takes its part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.ml.plan import named_tensors
from atoll.ml.shares import Box, as_sharded, box_of, cut_out, is_sharded, local_of

FORMAT = 1
MOST_HEADER_BYTES = 64 << 20

_DECIDES = ("amsgrad", "centered", "momentum")
"""Settings that decide which state an optimizer keeps: with others it would look for what the giver never had."""

_SHAPED = {
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
}
"""Optimizers of torch whose every state tensor is one of the counters below or has the shape of its parameter."""

_COUNTERS = {"eta", "mu", "mu_product", "step"}


class Taken(NamedTuple):
    """The state of an optimizer at one step boundary, shared with nothing that still moves."""

    about: dict[str, Any]  # the metadata
    tensors: dict[str, Tensor]  # on whatever device they were
    events: list[torch.cuda.Event]  # after which the copies are done
    parts: dict[str, Part] = {}  # of the tensors that are dealt out to ranks  # noqa: RUF012 - never changed
    beside: dict[str, Tensor] = {}  # what else the other ranks of the island gave  # noqa: RUF012
    gather: Callable[[Taken, Rooms], Taken] | None = None  # in an island of many ranks: how they come to be whole
    spread: Callable[[Taken, Path], list[Any] | None] | None = None  # and how each writes its own into a folder

    def wait(self) -> None:
        for event in self.events:
            event.synchronize()


Rooms: TypeAlias = Mapping[str, Tensor]
"""By the numbers of tensors: memory into which they are put together. One that is not here gets its own."""


class Part(NamedTuple):
    """Of a tensor of the state: what is here, of which sizes. Complex numbers are pairs."""

    box: Box
    sizes: tuple[int, ...]


@torch.no_grad()
def take(optimizer: Optimizer, model: nn.Module) -> Taken:
    """A copy at the step boundary, on the devices where the state is. `pack_taken` may run later, in any thread."""
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, Any] = {}
    state: dict[str, Any] = {}
    parts: dict[str, Part] = {}
    for name, (parameter, group) in _named(optimizer, model).items():
        parameters[name] = _about(parameter, group)
        held = optimizer.state.get(parameter)
        if held:
            state[name] = {key: _written(held[key], tensors, parts, f"{key} of {name}") for key in sorted(held)}
            if is_sharded(parameter):
                _check_sharded(held, name)
    about = {"format": FORMAT, "optimizer": type(optimizer).__name__, "parameters": parameters, "state": state}
    devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
    return Taken(about, tensors, [torch.cuda.current_stream(device).record_event() for device in devices], parts)


def whole(taken: Taken, rooms: Rooms | None = None) -> Taken:
    """The same, with whole tensors. In an island of many ranks it waits for the others."""
    taken.wait()
    return taken.gather(taken, rooms or {}) if taken.gather is not None else taken


def pack_taken(taken: Taken) -> bytes:
    """The bytes of a copy. Large models take seconds: not for the training thread."""
    taken = whole(taken)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in taken.tensors.items()}
    return safetensors.torch.save(tensors, {"atoll": json.dumps(taken.about, separators=(",", ":"))})


def pack(optimizer: Optimizer, model: nn.Module) -> bytes:
    return pack_taken(take(optimizer, model))


def unpack(data: bytes | bytearray | memoryview, optimizer: Optimizer, model: nn.Module) -> None:
    """Give an optimizer the state in `data`; what it had is gone. Trusts nothing, and changes nothing if it raises."""
    prepare(*read(data), optimizer, model).install()


class Prepared(NamedTuple):
    """State that fits an optimizer, in memory of its own."""

    optimizer: Optimizer
    parameters: list[Tensor]
    made: dict[Tensor, dict[str, Any]]

    def install(self) -> None:
        for parameter in self.parameters:
            self.optimizer.state.pop(parameter, None)
        self.optimizer.state.update(self.made)


@torch.no_grad()
def prepare(
    about: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    optimizer: Optimizer,
    model: nn.Module,
    cut: bool = False,
) -> Prepared:
    """The metadata and tensors of a `Taken`, checked against an optimizer, which stays as it is.

    `cut`: of what is as large as its parameter only this rank's part is here (`part_for`).
    """
    if about.get("format") != FORMAT:
        raise ValueError(f"inner state has format {str(about.get('format'))[:20]}, not {FORMAT}; run the same version")
    if about.get("optimizer") != type(optimizer).__name__:
        raise ValueError(
            f"the inner state is of {str(about.get('optimizer'))[:100]}, the optimizer here is "
            f"{type(optimizer).__name__}; use the same class on every island"
        )
    parameters, state = about.get("parameters"), about.get("state")
    if not isinstance(parameters, dict) or not isinstance(state, dict):
        raise ValueError("the inner state has no list of parameters or none of states")
    ours = _named(optimizer, model)
    _check_parameters(ours, parameters)
    made: dict[Tensor, dict[str, Any]] = {}
    for name, entries in state.items():
        if name not in ours or not isinstance(entries, dict):
            raise ValueError(f"the inner state has an entry {name[:200]!r}, which is no parameter of this optimizer")
        parameter, group = ours[name]
        made[parameter] = {}
        for key, value in entries.items():
            place = _Placer(key, name, parameter, group, optimizer, cut)
            made[parameter][key] = _loaded(value, tensors, place)
    return Prepared(optimizer, [parameter for parameter, _ in ours.values()], made)


class Named(NamedTuple):
    """To which parameter a tensor of the state belongs."""

    parameter: str
    is_complex: bool


def named_numbers(about: Mapping[str, Any]) -> dict[str, Named]:
    """By the number of a tensor of the state."""
    found: dict[str, Named] = {}

    def look(value: Any, name: str) -> None:
        if not isinstance(value, dict):
            return
        for kind, inner in value.items():
            if kind in ("tensor", "complex"):
                found[inner] = Named(name, kind == "complex")
            elif kind in ("list", "tuple", "dict"):
                for each in inner.values() if kind == "dict" else inner:
                    look(each, name)

    for name, entries in about["state"].items():
        for value in entries.values():
            look(value, name)
    return found


def part_for(tensor: Tensor, is_complex: bool, sizes: tuple[int, ...], box: Box | None) -> Tensor:
    """Of a whole tensor of the state, what a rank needs that holds this box of a parameter of these sizes."""
    wanted = box_for(tuple(tensor.shape), is_complex, sizes, box)
    return tensor if wanted is None else cut_out(tensor, wanted)


def box_for(shape: tuple[int, ...], is_complex: bool, sizes: tuple[int, ...], box: Box | None) -> Box | None:
    """Which box that is, of a tensor of this shape; None: all of it."""
    more = (2,) if is_complex else ()
    if box is None or not sizes or shape != (*sizes, *more):
        return None
    return Box((*box.offset, *(0 for _ in more)), (*box.shape, *more))


# ------------------------------------------------------------------------------------------------------------- naming


def _named(optimizer: Optimizer, model: nn.Module) -> dict[str, tuple[Tensor, Mapping[str, Any]]]:
    """What the optimizer updates, sorted by name, each with its parameter group."""
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    made = {}
    for place, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"parameter group {place} of the optimizer has a tensor of shape {tuple(parameter.shape)} that is "
                    "no parameter of the model; give the learner the model that the optimizer trains"
                )
            made[names[id(parameter)]] = (parameter, group)
    return dict(sorted(made.items()))


def _about(parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "shape": list(parameter.shape),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        **{name: bool(group[name]) for name in _DECIDES if name in group},
    }


def _check_parameters(ours: Mapping[str, tuple[Tensor, Mapping[str, Any]]], theirs: Mapping[str, Any]) -> None:
    for name in sorted({*ours, *theirs}):
        if name not in theirs:
            raise ValueError(f"the inner state lacks {name!r}, which the optimizer here updates; use the same setup")
        if name not in ours:
            raise ValueError(f"the inner state has {name[:200]!r}, which the optimizer here does not update")
        mine = _about(*ours[name])
        if mine != theirs[name]:
            raise ValueError(f"{name} differs: the inner state has {str(theirs[name])[:300]}, the optimizer {mine}")


# ------------------------------------------------------------------------------------------------------------- values


def _written(value: object, tensors: dict[str, Tensor], parts: dict[str, Part], what: str) -> Any:
    """A value as JSON; tensors are copied and put aside under a number."""
    if isinstance(value, Tensor):
        sizes, box = tuple(value.shape), box_of(value)
        if box is None and is_sharded(value):
            box = Box((0,) * len(sizes), sizes)  # here is all of it, and elsewhere perhaps nothing
        value = local_of(value)
        if value.layout != torch.strided or value.is_meta:
            raise ValueError(f"{what} is not a dense tensor; the state of this optimizer cannot travel")
        number = str(len(tensors))
        pairs = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
        tensors[number] = pairs.clone(memory_format=torch.contiguous_format)
        if box is not None:
            more = (2,) if value.is_complex() else ()
            parts[number] = Part(Box((*box.offset, *(0 for _ in more)), (*box.shape, *more)), (*sizes, *more))
        return {"complex" if value.is_complex() else "tensor": number}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_written(each, tensors, parts, what) for each in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _written(value[key], tensors, parts, what) for key in value}}
    raise ValueError(f"{what} is a {type(value).__name__}; the state of this optimizer cannot travel")


def _check_sharded(held: Mapping[str, Any], name: str) -> None:
    """Beside a sharded parameter only counters may be plain: nobody could tell whose rows another tensor has."""
    for key, value in held.items():
        if isinstance(value, Tensor) and value.dim() and not is_sharded(value):
            raise ValueError(f"{key} of {name} is not sharded as {name} is; the state of this optimizer cannot travel")


class _Placer(NamedTuple):
    """Checks a tensor of the state and brings it to where the optimizer wants it."""

    key: str
    name: str
    parameter: Tensor
    group: Mapping[str, Any]
    optimizer: Optimizer
    cut: bool

    def __call__(self, tensor: Tensor) -> Tensor:
        known = self.optimizer.state.get(self.parameter, {}).get(self.key)
        wanted = tensor.shape
        if isinstance(known, Tensor):
            wanted = known.shape
        elif type(self.optimizer).__name__ in _SHAPED:
            wanted = torch.Size() if self.key in _COUNTERS else self.parameter.shape
        elif self.cut and tensor.shape == local_of(self.parameter).shape:
            wanted = self.parameter.shape
        if is_sharded(self.parameter) and wanted == self.parameter.shape and self.parameter.dim():
            return self._sharded(tensor)
        if tensor.shape != wanted:
            raise ValueError(
                f"{self.key} of {self.name} has shape {tuple(tensor.shape)} in the inner state, here {tuple(wanted)}"
            )
        if type(self.optimizer).__name__ in _SHAPED and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"{self.key} of {self.name} has dtype {tensor.dtype} in the inner state")
        return tensor.to(self._device(tensor, known), copy=True)

    def _sharded(self, tensor: Tensor) -> Tensor:
        """The part of this rank, lying as the parameter does."""
        local = local_of(self.parameter)
        wanted = local.shape if self.cut else self.parameter.shape
        if tensor.shape != wanted or not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"{self.key} of {self.name} has shape {tuple(tensor.shape)} in the inner state, here {tuple(wanted)}"
            )
        part = tensor.clone() if self.cut else cut_out(tensor, box_of(self.parameter))
        return as_sharded(part.to(local.device), self.parameter)

    def _device(self, tensor: Tensor, known: object) -> torch.device:
        """Counters of steps stay on the CPU, except where the optimizer reads them on the device."""
        if isinstance(known, Tensor):
            return known.device
        on_device = tensor.dim() > 0 or self.key != "step" or self.group.get("capturable") or self.group.get("fused")
        return self.parameter.device if on_device else torch.device("cpu")


def _loaded(value: Any, tensors: Mapping[str, Tensor], place: _Placer) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f"{place.key} of {place.name} is nothing that inner state holds")
    kind, inner = next(iter(value.items()))
    if kind in ("tensor", "complex") and isinstance(inner, str) and inner in tensors:
        tensor = tensors[inner]
        if kind == "complex":
            if tensor.dim() == 0 or tensor.shape[-1] != 2 or not tensor.is_floating_point():
                raise ValueError(f"{place.key} of {place.name} is not complex")
            tensor = torch.view_as_complex(tensor.contiguous())
        return place(tensor)
    turns: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple}
    if kind in turns and isinstance(inner, list):
        return turns[kind](_loaded(each, tensors, place) for each in inner)
    if kind == "dict" and isinstance(inner, dict):
        return {key: _loaded(each, tensors, place) for key, each in inner.items()}
    raise ValueError(f"{place.key} of {place.name} is nothing that inner state holds")


def read(data: bytes | bytearray | memoryview) -> tuple[dict[str, Any], dict[str, Tensor]]:
    raw = data if isinstance(data, bytes) else bytes(data)
    about = read_about(raw)
    try:
        return about, safetensors.torch.load(raw)
    except (ValueError, KeyError, TypeError, AssertionError, safetensors.SafetensorError) as wrong:
        raise ValueError(f"the inner state is no safetensors file of ours: {wrong}") from None


def read_about(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The metadata alone."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, MOST_HEADER_BYTES):
        raise ValueError("the inner state is cut short, or no safetensors file")
    try:
        about = json.loads(json.loads(bytes(data[8 : 8 + length]))["__metadata__"]["atoll"])
    except (ValueError, KeyError, TypeError, RecursionError) as wrong:
        raise ValueError(f"the inner state is no safetensors file of ours: {wrong}") from None
    if not isinstance(about, dict):
        raise ValueError("the inner state does not say what it holds")
    return about
