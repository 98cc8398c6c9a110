"""Encode the state of an inner optimizer as bytes, by the names of the parameters.

A joining learner downloads it from a peer, whose parameter groups may be in another order. The bytes are a safetensors
file, with everything that is not a tensor as JSON in its metadata. Nothing is unpickled.

Parameter groups hold settings, which the joining learner keeps, and for some optimizers counters, which are state:
`k` and `weight_sum` of schedule-free ones, `d` of Prodigy. A value in a group is a counter if all of this is true:

- it is a number, or a tensor without dimensions;
- `optimizer.step` assigned it or changed it in place, at some step since `track_counters`; or it was installed as a
  counter; or its key is `train_mode`, which says whether the weights are those for training or for evaluation;
- it is not a learning rate or another value that belongs to a scheduler (`_SETTINGS`).

Values that schedulers and the training loop change between steps are settings. An optimizer that does not call
`Optimizer.__init__` has no step hooks. Its counters are the keys added to its groups after `track_counters`.

The metadata has one key, `atoll`:

| field | meaning |
|---|---|
| `format` | 1 |
| `optimizer` | name of the class; of several optimizers the names of their classes, as in `AdamW+Muon` |
| `parameters` | name to shape and dtype, and the settings that decide which state there is, such as `amsgrad`; |
|              | `optimizer` where there are several classes |
| `state` | name to key to value: a number, text or null as it is; else `{"tensor": n}`, `{"complex": n}` for pairs, |
|         | `{"list": [...]}`, `{"tuple": [...]}` or `{"dict": {...}}`, with n the name of a tensor of the file |
| `counters` | a list with one object for each parameter group that has counters: names of its parameters as `of`, and |
|            | `values`, from key to number; of a tensor `{"scalar": number, "dtype": name, "on_cpu": true or false}` |

The reply of a peer that cannot provide its state has no tensors, and only `format` and `refused`, with the reason.

Shapes are those of whole tensors. Each rank of an island copies its shards. One rank gathers and packs them
(`gather_state`), and each rank that loads them takes its part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.tensors.optimizers import Optimizers, as_optimizer_tuple
from atoll.tensors.plan import named_tensors
from atoll.tensors.sharding import Box, copy_box, is_sharded, local_box, local_tensor, shard_like

FORMAT = 1
MAX_HEADER_BYTES = 64 << 20

_STATE_DECIDING_SETTINGS = ("amsgrad", "centered", "momentum")
"""Settings that decide which state an optimizer has, so that both learners need the same values."""

_KNOWN_SHAPES = frozenset(
    ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Optimizers of torch whose state tensors are either counters (below) or have the shape of the parameter."""

_COUNTERS = {"eta", "mu", "mu_product", "step"}

_SETTINGS = frozenset(
    ("params", "param_names", "lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
)
"""Keys of parameter groups that are never counters: the parameters, and values of learning-rate schedulers."""

_MODES = frozenset(["train_mode"])
MAX_REASON_CHARACTERS = 300


# ----------------------------------------------------------------------------------------- counters in parameter groups


class _StateWatch:
    """Record which values in the parameter groups the optimizer's `step` changes. Hooks must never raise."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.keys: set[str] = set()
        self._before: list[tuple[dict[str, Any], dict[str, int]]] = []  # groups before the step, versions of tensors
        self._initial_keys: set[str] | None = None  # keys of the groups; used if the optimizer has no hooks
        try:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        except AttributeError:
            self._initial_keys = {key for group in optimizer.param_groups for key in group}

    def counter_keys(self, group: Mapping[str, Any]) -> list[str]:
        added = group.keys() - self._initial_keys if self._initial_keys is not None else set()
        return sorted((self.keys | _MODES | added) & group.keys() - _SETTINGS)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._before = [(dict(group), _versions(group)) for group in optimizer.param_groups]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for group, (before, versions) in zip(optimizer.param_groups, self._before, strict=False):
            now = _versions(group)
            for key, value in group.items():
                if key not in self.keys and (value is not before.get(key) or versions.get(key) != now.get(key)):
                    self.keys.add(key)
        self._before = []


def _versions(group: Mapping[str, Any]) -> dict[str, int]:
    """Return the version counters of tensors. Reading their values would wait for the device."""
    return {k: v._version for k, v in group.items() if isinstance(v, Tensor) and not v.is_inference()}


_watched: WeakKeyDictionary[Optimizer, _StateWatch] = WeakKeyDictionary()


def track_counters(optimizers: Optimizers) -> None:
    """Start to detect which values in the parameter groups are counters. This costs microseconds per step."""
    for optimizer in as_optimizer_tuple(optimizers):
        _get_watch(optimizer)


def _get_watch(optimizer: Optimizer) -> _StateWatch:
    watch = _watched.get(optimizer)
    if watch is None:
        watch = _watched[optimizer] = _StateWatch(optimizer)
    return watch


def _get_counters(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    watch = _watched.get(optimizer)
    keys = watch.counter_keys(group) if watch is not None else sorted(_MODES & group.keys())
    counters: dict[str, Any] = {}
    for key in keys:
        value = group[key]
        if isinstance(value, bool | int | float):
            counters[key] = value
        elif isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex() and not is_sharded(value):
            dtype, on_cpu = str(value.dtype).removeprefix("torch."), value.device.type == "cpu"
            counters[key] = {"scalar": value.item(), "dtype": dtype, "on_cpu": on_cpu}
    return counters


# -------------------------------------------------------------------------------------------------------------- copying


class OptimizerStateCopy(NamedTuple):
    """Copy of an optimizer's state at one step boundary. Training does not change it."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]  # copies, on the devices of the originals
    events: list[torch.cuda.Event]  # recorded after the copies
    parts: dict[str, StatePart] = {}  # by tensor, for those that are sharded over ranks  # noqa: RUF012 - never changed
    other_ranks_tensors: dict[str, Tensor] = {}  # further tensors of the island's other ranks  # noqa: RUF012
    # With several ranks: gathers whole tensors at this rank.
    gather: Callable[[OptimizerStateCopy, TensorBuffers], OptimizerStateCopy] | None = None
    # With several ranks: lets each rank write its shards into a folder.
    write_shards: Callable[[OptimizerStateCopy, Path], list[Any] | None] | None = None

    def wait(self) -> None:
        for event in self.events:
            event.synchronize()

    @property
    def is_empty(self) -> bool:
        """Return whether there are neither parameter states nor counters."""
        return not self.metadata.get("state") and not self.metadata.get("counters")


TensorBuffers: TypeAlias = Mapping[str, Tensor]
"""Memory for gathered tensors, by their numbers. Other tensors get new memory."""


class StatePart(NamedTuple):
    """This rank's part of a sharded state tensor: its box, and the shape of the whole. Complex numbers are pairs."""

    box: Box
    sizes: tuple[int, ...]


@torch.no_grad()
def copy_state(optimizers: Optimizers, model: nn.Module) -> OptimizerStateCopy:
    """Copy the state at a step boundary, on its devices. `pack_copy` may run later, in any thread."""
    all_optimizers = as_optimizer_tuple(optimizers)
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, Any] = {}
    state: dict[str, Any] = {}
    parts: dict[str, StatePart] = {}
    groups: dict[int, tuple[OptimizedParameter, list[str]]] = {}  # by the identity of the parameter group
    names = _class_names(all_optimizers)
    for name, owned in named_optimized_parameters(all_optimizers, model).items():
        parameters[name] = _describe_parameter(owned, names)
        groups.setdefault(id(owned.group), (owned, []))[1].append(name)
        parameter, entries = owned.parameter, owned.optimizer.state.get(owned.parameter)
        if entries:
            state[name] = {
                key: _encode_value(entries[key], tensors, parts, f"{key} of {name}") for key in sorted(entries)
            }
            if is_sharded(parameter):
                _check_sharded(entries, name)
    counters = [
        {"of": of, "values": values}
        for owned, of in groups.values()
        if (values := _get_counters(owned.optimizer, owned.group))
    ]
    metadata = {"format": FORMAT, "optimizer": names, "parameters": parameters, "state": state, "counters": counters}
    devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
    return OptimizerStateCopy(
        metadata, tensors, [torch.cuda.current_stream(device).record_event() for device in devices], parts
    )


def make_refusal(cause: str) -> OptimizerStateCopy:
    """Return the reply to a joining learner if this learner has no state to provide."""
    return OptimizerStateCopy({"format": FORMAT, "refused": cause[:MAX_REASON_CHARACTERS]}, {}, [])


def check_has_state(optimizers: Optimizers, copied: OptimizerStateCopy | PreparedState) -> None:
    """Raise ValueError if a state is empty after a step, although its optimizers should have state."""
    all_optimizers = as_optimizer_tuple(optimizers)
    if copied.is_empty and not all(_is_stateless(optimizer) for optimizer in all_optimizers):
        raise ValueError(
            f"{_class_names(all_optimizers)} holds no optimizer state after its steps; if it wraps several optimizers, "
            "pass the list of optimizers instead: atoll.Learner(model, [first, second])"
        )


def _is_stateless(optimizer: Optimizer) -> bool:
    plain = isinstance(optimizer, torch.optim.SGD)
    return plain and not any(group.get("momentum", 0) for group in optimizer.param_groups)


def gather_state(copied: OptimizerStateCopy, buffers: TensorBuffers | None = None) -> OptimizerStateCopy:
    """Return the copy with whole tensors. With several ranks, wait for the others."""
    copied.wait()
    return copied.gather(copied, buffers or {}) if copied.gather is not None else copied


def pack_copy(copied: OptimizerStateCopy) -> bytes:
    """Encode a copy as bytes. This takes seconds for large models: do not call it in the training thread."""
    copied = gather_state(copied)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in copied.tensors.items()}
    return safetensors.torch.save(tensors, {"atoll": json.dumps(copied.metadata, separators=(",", ":"))})


def pack(optimizers: Optimizers, model: nn.Module) -> bytes:
    return pack_copy(copy_state(optimizers, model))


def unpack(data: bytes | bytearray | memoryview, optimizers: Optimizers, model: nn.Module) -> None:
    """Replace the state of the optimizers by that in `data`. Raise ValueError, and change nothing, if it is invalid."""
    prepare(*read(data), optimizers, model).install()


class PreparedState(NamedTuple):
    """State that was checked against optimizers, in its own memory."""

    parameters: list[OptimizedParameter]
    state: dict[Tensor, dict[str, Any]]
    counters: list[tuple[OptimizedParameter, dict[str, Any]]]  # one entry per parameter group with counters

    def install(self) -> None:
        for parameter, _, optimizer in self.parameters:
            optimizer.state.pop(parameter, None)
            if parameter in self.state:
                optimizer.state[parameter] = self.state[parameter]
        for (_, group, optimizer), values in self.counters:
            _get_watch(optimizer).keys |= values.keys()
            for key, value in values.items():
                old = group.get(key)
                if isinstance(old, Tensor) and old.dim() == 0:
                    old.copy_(torch.as_tensor(value))  # in place: a compiled step refers to its address
                else:
                    group[key] = value

    @property
    def is_empty(self) -> bool:
        return not self.state and not self.counters

    def __str__(self) -> str:
        leaves = list(_leaves(self.state))
        tensors = sum(isinstance(value, Tensor) for value in leaves)
        numbers = sum(isinstance(value, int | float) for value in leaves)
        return f"{tensors} state tensors and {numbers + sum(len(values) for _, values in self.counters)} counters"


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


@torch.no_grad()
def prepare(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    optimizers: Optimizers,
    model: nn.Module,
    is_local_part: bool = False,
) -> PreparedState:
    """Check the metadata and tensors of an `OptimizerStateCopy` against optimizers, without changing these.

    Args:
        is_local_part: Tensors in the shape of their parameter are only this rank's part (`extract_part`).
    """
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"optimizer state has format {str(metadata.get('format'))[:20]}, not {FORMAT}; run the same version"
        )
    if "refused" in metadata:
        raise ValueError(f"the peer has no state to provide: {str(metadata['refused'])[:MAX_REASON_CHARACTERS]}")
    all_optimizers = as_optimizer_tuple(optimizers)
    names = _class_names(all_optimizers)
    if metadata.get("optimizer") != names:
        raise ValueError(
            f"the optimizer state is of {str(metadata.get('optimizer'))[:100]}, the optimizer here is {names}; use the "
            "same class on every island"
        )
    parameters, state = metadata.get("parameters"), metadata.get("state")
    if not isinstance(parameters, dict) or not isinstance(state, dict):
        raise ValueError("the optimizer state lacks the list of parameters or of states")
    ours = named_optimized_parameters(all_optimizers, model)
    _check_parameters(ours, parameters, names)
    made: dict[Tensor, dict[str, Any]] = {}
    for name, entries in state.items():
        if name not in ours or not isinstance(entries, dict):
            raise ValueError(
                f"the optimizer state has an entry {name[:200]!r}, which is not a parameter of this optimizer"
            )
        parameter, group, optimizer = ours[name]
        made[parameter] = {}
        for key, value in entries.items():
            placer = _Placer(key, name, parameter, group, optimizer, is_local_part)
            made[parameter][key] = _decode_value(value, tensors, placer)
    return PreparedState(list(ours.values()), made, _load_counters(metadata.get("counters", []), ours))


def _load_counters(raw: Any, ours: Mapping[str, OptimizedParameter]) -> list[tuple[OptimizedParameter, dict[str, Any]]]:
    by_name: dict[str, Mapping[str, Any]] = {}
    try:
        for each in raw:
            for key, value in each["values"].items():
                number = value["scalar"] if isinstance(value, dict) else value
                is_number = isinstance(number, float) or (isinstance(number, bool | int) and abs(number) < 2**63)
                if key in _SETTINGS or not is_number:
                    raise ValueError(f"the optimizer state has {str(value)[:40]} as the counter {str(key)[:40]!r}")
            by_name |= dict.fromkeys(each["of"], each["values"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the counters of the optimizer state cannot be read: {error!r:.100}") from None
    groups: dict[int, tuple[OptimizedParameter, Mapping[str, Any]]] = {}
    for name, owned in ours.items():
        first = groups.setdefault(id(owned.group), (owned, by_name.get(name, {})))[1]
        if first != by_name.get(name, {}):
            raise ValueError(
                f"{name} has other counters in the optimizer state than the parameters of its group here; use the same "
                "parameter groups on every island"
            )
    return [
        (owned, {key: _load_counter(value, owned.parameter.device) for key, value in values.items()})
        for owned, values in groups.values()
        if values
    ]


def _load_counter(value: Any, device: torch.device) -> Any:
    if not isinstance(value, dict):
        return value
    dtype = getattr(torch, str(value.get("dtype")), None)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex:
        raise ValueError(f"the optimizer state has a counter of dtype {str(value.get('dtype'))[:40]!r}")
    try:
        return torch.tensor(value["scalar"], dtype=dtype, device="cpu" if value.get("on_cpu") else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"the counters of the optimizer state cannot be read: {error!r:.100}") from None


class TensorOwner(NamedTuple):
    """Parameter that a state tensor belongs to."""

    parameter: str
    is_complex: bool


def tensor_owners(metadata: Mapping[str, Any]) -> dict[str, TensorOwner]:
    """Return the parameter of each state tensor, by the tensor's number."""
    owners: dict[str, TensorOwner] = {}

    def visit(value: Any, name: str) -> None:
        if not isinstance(value, dict):
            return
        for kind, inner in value.items():
            if kind in ("tensor", "complex"):
                owners[inner] = TensorOwner(name, kind == "complex")
            elif kind in ("list", "tuple", "dict"):
                for each in inner.values() if kind == "dict" else inner:
                    visit(each, name)

    for name, entries in metadata["state"].items():
        for value in entries.values():
            visit(value, name)
    return owners


def extract_part(tensor: Tensor, is_complex: bool, sizes: tuple[int, ...], box: Box | None) -> Tensor:
    """Return the part of a whole state tensor for a rank that holds this box of a parameter of these sizes."""
    part = part_box(tuple(tensor.shape), is_complex, sizes, box)
    return tensor if part is None else copy_box(tensor, part)


def part_box(shape: tuple[int, ...], is_complex: bool, sizes: tuple[int, ...], box: Box | None) -> Box | None:
    """Return the box of `extract_part` in a tensor of this shape; None for the whole tensor."""
    more = (2,) if is_complex else ()
    if box is None or not sizes or shape != (*sizes, *more):
        return None
    return Box((*box.offset, *(0 for _ in more)), (*box.shape, *more))


# ------------------------------------------------------------------------------------------------------------- naming


class OptimizedParameter(NamedTuple):
    """A parameter, its parameter group, and the optimizer that updates it."""

    parameter: Tensor
    group: dict[str, Any]
    optimizer: Optimizer


def named_optimized_parameters(optimizers: Optimizers, model: nn.Module) -> dict[str, OptimizedParameter]:
    """Return the parameters that the optimizers update, sorted by name. Raise ValueError for one not in the model."""
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    made: dict[str, OptimizedParameter] = {}
    for optimizer in as_optimizer_tuple(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ValueError(
                        f"parameter group {index} of the optimizer has a tensor of shape {tuple(parameter.shape)} that "
                        "is no parameter of the model; give the learner the model that the optimizer trains"
                    )
                name = names[id(parameter)]
                if name in made and made[name].optimizer is not optimizer:
                    raise ValueError(f"two optimizers update {name}; leave it in one of them")
                made[name] = OptimizedParameter(parameter, group, optimizer)
    return dict(sorted(made.items()))


def _class_names(optimizers: tuple[Optimizer, ...]) -> str:
    return "+".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))


def _describe_parameter(owned: OptimizedParameter, class_names: str) -> dict[str, Any]:
    parameter, group, optimizer = owned
    description = {
        "shape": list(parameter.shape),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        **{name: bool(group[name]) for name in _STATE_DECIDING_SETTINGS if name in group},
    }
    own = type(optimizer).__name__
    return description if own == class_names else description | {"optimizer": own}


def _check_parameters(ours: Mapping[str, OptimizedParameter], theirs: Mapping[str, Any], class_names: str) -> None:
    for name in sorted({*ours, *theirs}):
        if name not in theirs:
            raise ValueError(
                f"the optimizer state lacks {name!r}, which the optimizer here updates; use the same setup"
            )
        if name not in ours:
            raise ValueError(f"the optimizer state has {name[:200]!r}, which the local optimizer does not update")
        mine = _describe_parameter(ours[name], class_names)
        if mine != theirs[name]:
            raise ValueError(f"{name} differs: the optimizer state has {str(theirs[name])[:300]}, the optimizer {mine}")


# ------------------------------------------------------------------------------------------------------------- values


def _encode_value(value: object, tensors: dict[str, Tensor], parts: dict[str, StatePart], what: str) -> Any:
    """Return a value as JSON, in which numbers replace tensors. `tensors` receives copies of the tensors by number."""
    if isinstance(value, Tensor):
        sizes, box = tuple(value.shape), local_box(value)
        if box is None and is_sharded(value):
            box = Box((0,) * len(sizes), sizes)  # this rank has the whole tensor, other ranks may have no part of it
        value = local_tensor(value)
        if type(value) not in (Tensor, nn.Parameter):
            raise ValueError(f"{what} is a {type(value).__name__}; the state of this optimizer cannot be sent to peers")
        if value.layout != torch.strided or value.is_meta:
            raise ValueError(f"{what} is not a dense tensor; the state of this optimizer cannot be sent to peers")
        number = str(len(tensors))
        pairs = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
        tensors[number] = pairs.clone(memory_format=torch.contiguous_format)
        if box is not None:
            more = (2,) if value.is_complex() else ()
            parts[number] = StatePart(Box((*box.offset, *(0 for _ in more)), (*box.shape, *more)), (*sizes, *more))
        return {"complex" if value.is_complex() else "tensor": number}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode_value(each, tensors, parts, what) for each in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encode_value(value[key], tensors, parts, what) for key in value}}
    raise ValueError(f"{what} is a {type(value).__name__}; the state of this optimizer cannot be sent to peers")


def _check_sharded(entries: Mapping[str, Any], name: str) -> None:
    """Raise ValueError if a sharded parameter has plain state other than counters: its rows would be unknown."""
    for key, value in entries.items():
        if isinstance(value, Tensor) and value.dim() and not is_sharded(value):
            raise ValueError(
                f"{key} of {name} is not sharded as {name} is; the state of this optimizer cannot be sent to peers"
            )


class _Placer(NamedTuple):
    """Check a state tensor and copy it to the device that the optimizer needs."""

    key: str
    name: str
    parameter: Tensor
    group: Mapping[str, Any]
    optimizer: Optimizer
    cut: bool

    def __call__(self, tensor: Tensor) -> Tensor:
        known = self.optimizer.state.get(self.parameter, {}).get(self.key)
        expected = tensor.shape
        if isinstance(known, Tensor):
            expected = known.shape
        elif type(self.optimizer).__name__ in _KNOWN_SHAPES:
            expected = torch.Size() if self.key in _COUNTERS else self.parameter.shape
        elif self.cut and tensor.shape == local_tensor(self.parameter).shape:
            expected = self.parameter.shape
        if is_sharded(self.parameter) and expected == self.parameter.shape and self.parameter.dim():
            return self._sharded(tensor)
        if tensor.shape != expected:
            raise ValueError(
                f"{self.key} of {self.name} has shape {tuple(tensor.shape)} in the optimizer state, "
                f"here {tuple(expected)}"
            )
        if type(self.optimizer).__name__ in _KNOWN_SHAPES and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"{self.key} of {self.name} has dtype {tensor.dtype} in the optimizer state")
        return tensor.to(self._device(tensor, known), copy=True)

    def _sharded(self, tensor: Tensor) -> Tensor:
        """Return this rank's part, sharded like the parameter."""
        local = local_tensor(self.parameter)
        expected = local.shape if self.cut else self.parameter.shape
        if tensor.shape != expected or not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"{self.key} of {self.name} has shape {tuple(tensor.shape)} in the optimizer state, "
                f"here {tuple(expected)}"
            )
        part = tensor.clone() if self.cut else copy_box(tensor, local_box(self.parameter))
        return shard_like(part.to(local.device), self.parameter)

    def _device(self, tensor: Tensor, known: object) -> torch.device:
        """Return the device. Step counters stay on the CPU, unless the optimizer reads them on the device."""
        if isinstance(known, Tensor):
            return known.device
        on_device = tensor.dim() > 0 or self.key != "step" or self.group.get("capturable") or self.group.get("fused")
        return self.parameter.device if on_device else torch.device("cpu")


def _decode_value(value: Any, tensors: Mapping[str, Tensor], placer: _Placer) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f"{placer.key} of {placer.name} is nothing that optimizer state holds")
    kind, inner = next(iter(value.items()))
    if kind in ("tensor", "complex") and isinstance(inner, str) and inner in tensors:
        tensor = tensors[inner]
        if kind == "complex":
            if tensor.dim() == 0 or tensor.shape[-1] != 2 or not tensor.is_floating_point():
                raise ValueError(f"{placer.key} of {placer.name} is not complex")
            tensor = torch.view_as_complex(tensor.contiguous())
        return placer(tensor)
    constructors: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple}
    if kind in constructors and isinstance(inner, list):
        return constructors[kind](_decode_value(each, tensors, placer) for each in inner)
    if kind == "dict" and isinstance(inner, dict):
        return {key: _decode_value(each, tensors, placer) for key, each in inner.items()}
    raise ValueError(f"{placer.key} of {placer.name} is nothing that optimizer state holds")


def read(data: bytes | bytearray | memoryview) -> tuple[dict[str, Any], dict[str, Tensor]]:
    raw = data if isinstance(data, bytes) else bytes(data)
    metadata = read_metadata(raw)
    try:
        return metadata, safetensors.torch.load(raw)
    except (ValueError, KeyError, TypeError, AssertionError, safetensors.SafetensorError) as error:
        raise ValueError(f"the optimizer state is not a safetensors file written by Atoll: {error}") from None


def read_metadata(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return the metadata without loading tensors. Raise ValueError if it is invalid."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, MAX_HEADER_BYTES):
        raise ValueError("the optimizer state is truncated, or not a safetensors file")
    try:
        metadata = json.loads(json.loads(bytes(data[8 : 8 + length]))["__metadata__"]["atoll"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"the optimizer state is not a safetensors file written by Atoll: {error}") from None
    if not isinstance(metadata, dict):
        raise ValueError("the metadata of the optimizer state is not a JSON object")
    return metadata
