"""Rendezvous of the ranks of an island: which rank has which part of the model, whose tokens count, which rank leads.

The user configures nothing. An island has several ranks if `torch.distributed` is initialized with more than one, and
their shards are found from their parameters.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atoll.island.rank_connection import RankConnection, accept_ranks, connect_to_leader, host_identity, open_listener
from atoll.tensors.plan import named_tensors
from atoll.tensors.sharding import Box, Boxes, is_sharded, local_boxes


class Ranks(NamedTuple):
    """Ranks of an island, as seen from one of them."""

    rank: int
    size: int
    boxes: tuple[Boxes, ...]  # by rank
    counts_tokens: tuple[bool, ...]  # by rank; of ranks that train on the same data, one counts
    data_slots: tuple[int, ...]  # by rank, number of the data shard; ranks that train on the same data share it
    control: list[RankConnection]  # at the leader one per follower, in rank order; at a follower the leader's
    bulk: list[RankConnection]
    rows: list[RankConnection]

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def shut_down(self) -> None:
        """Wake the threads that wait for another rank."""
        for connection in [*self.bulk, *self.rows]:
            connection.shut_down()

    def close(self) -> None:
        for connection in [*self.control, *self.bulk, *self.rows]:
            connection.close()


def rendezvous(model: nn.Module) -> Ranks | None:
    """Connect all ranks of the job. Return None if there is only one. Raise the same ValueError on all ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    descriptions = [json.loads(text) for text in _all_gather(json.dumps(_describe_rank(model, rank)), size)]
    _check_same_model(descriptions)
    hosts = [each["host"] for each in descriptions]
    offers: list[Any] = [None]
    listener = None
    if rank == 0:
        listener, addresses = open_listener(len(set(hosts)) == 1)
        offers = [json.dumps({"addresses": addresses, "secret": secrets.token_bytes(16).hex()})]
    try:
        offers = _all_gather(offers[0] or "", size)
        offer = json.loads(offers[0])
        secret = offer["secret"].encode()
        if listener is not None:
            connections = accept_ranks(listener, secret, size)
        else:
            addresses = [(str(name), int(port)) for name, port in offer["addresses"]]
            connections = connect_to_leader(addresses, secret, rank)
    finally:
        if listener is not None:
            listener.close()
    boxes = tuple(
        {name: Box(tuple(offset), tuple(shape)) for name, (offset, shape) in each["boxes"].items()}
        for each in descriptions
    )
    counts, slots = data_groups([each["data"] for each in descriptions])
    return Ranks(rank, size, boxes, counts, slots, *connections)


def _all_gather(text: str, size: int) -> list[Any]:
    """Gather a text from all ranks, over the process group of the training, which is still idle."""
    texts: list[Any] = [None] * size
    dist.all_gather_object(texts, text)
    return texts


def _describe_rank(model: nn.Module, rank: int) -> dict[str, Any]:
    """Return the description of this rank for the others. An error is sent too, so that no rank waits for this one."""
    try:
        reshard(fsdp_modules(model))
        return {
            "host": host_identity(),
            "tensors": {
                name: f"{'x'.join(map(str, tensor.shape))} {tensor.dtype} {'' if tensor.requires_grad else 'frozen'}"
                for name, tensor in named_tensors(model).items()
            },
            "boxes": local_boxes(model),
            "data": data_ranks(model, rank),
        }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _check_same_model(descriptions: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(descriptions):
        if "error" in each:
            raise ValueError(f"rank {rank} of this island: {each['error']}")
    first = descriptions[0]["tensors"]
    for rank, each in enumerate(descriptions[1:], 1):
        for name in sorted({*first, *each["tensors"]}):
            first_rank, this_rank = first.get(name, "missing"), each["tensors"].get(name, "missing")
            if first_rank != this_rank:
                raise ValueError(
                    f"{name} is {this_rank} on rank {rank} of this island and {first_rank} on rank 0;"
                    " all ranks of an island must have the same model, whole or sharded"
                )


def fsdp_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]


def reshard(modules: list[Any]) -> None:
    """Reshard FSDP parameters. After a forward pass without a backward pass some modules hold gathered copies, which
    would not see adopted values."""
    for module in modules:
        module.reshard()


# --------------------------------------------------------------------------------------------------------------- data


def data_ranks(model: nn.Module, rank: int) -> tuple[str, list[int]]:
    """Return ("others", ranks) if these ranks train one model on different data, or ("same", ranks) if they train on
    the same data, each with its part of the model."""
    if isinstance(model, DistributedDataParallel):
        return "others", dist.get_process_group_ranks(model.process_group)
    for module in fsdp_modules(model):
        state = module._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            if group is None:
                continue
            ranks: list[int] = group.mesh_info.mesh.mesh.flatten().tolist()
            return "others", ranks
    for parameter in model.parameters():
        if is_sharded(parameter):
            sharded: Any = parameter
            return "same", sharded.device_mesh.mesh.flatten().tolist()
    return "others", list(range(dist.get_world_size()))


def data_groups(data_by_rank: list[Any]) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """Return, by rank, whether its tokens count, and the number of its data shard.

    Tokens of the ranks that reduce gradients with the leader (DDP, FSDP) count. Ranks of tensor parallelism next to
    them have the same data. With tensor parallelism only, the first rank of each mesh counts.

    >>> data_groups([["others", [0, 1]], ["others", [0, 1]]])
    ((True, True), (0, 1))
    >>> data_groups([["same", [0, 1]], ["same", [0, 1]]])
    ((True, False), (0, 0))
    >>> data_groups([["others", [0, 2]], ["others", [1, 3]], ["others", [0, 2]], ["others", [1, 3]]])
    ((True, False, True, False), (0, 0, 1, 1))
    """
    kind, first = data_by_rank[0]
    if kind == "same":
        sets = sorted({tuple(ranks) for _, ranks in data_by_rank})
        slots = tuple(sets.index(tuple(ranks)) for _, ranks in data_by_rank)
        return tuple(rank == min(ranks) for rank, (_, ranks) in enumerate(data_by_rank)), slots
    slots = tuple(ranks.index(rank) if rank in ranks else 0 for rank, (_, ranks) in enumerate(data_by_rank))
    return tuple(rank in first for rank in range(len(data_by_rank))), slots
