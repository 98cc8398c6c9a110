"""The ranks of an island meet: who holds which part of the model, whose tokens count, who leads.

Nothing is asked of the user: an island has many ranks where `torch.distributed` is initialised with more than one, and
what each of them holds is seen from its parameters.
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
    """An island of many ranks, seen from one of them."""

    rank: int
    size: int
    boxes: tuple[Boxes, ...]  # by rank
    counts_tokens: tuple[bool, ...]  # by rank, whether its tokens count; of ranks that train on the same data one does
    data_slots: tuple[int, ...]  # by rank, whose data it trains on; the same for ranks that share theirs
    control: list[RankConnection]  # at the leader one per follower, in their order; at a follower the leader's
    bulk: list[RankConnection]
    rows: list[RankConnection]

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def shut_down(self) -> None:
        """Threads that wait for another rank wait no longer."""
        for line in [*self.bulk, *self.rows]:
            line.shut_down()

    def close(self) -> None:
        for line in [*self.control, *self.bulk, *self.rows]:
            line.close()


def rendezvous(model: nn.Module) -> Ranks | None:
    """All ranks of the job call it together; None: there is but one. Raises the same ValueError on all of them."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    everybody = [json.loads(text) for text in _all_gather(json.dumps(_describe_rank(model, rank)), size)]
    _check_same_model(everybody)
    hosts = [each["host"] for each in everybody]
    place: list[Any] = [None]
    listener = None
    if rank == 0:
        listener, addresses = open_listener(len(set(hosts)) == 1)
        place = [json.dumps({"addresses": addresses, "secret": secrets.token_bytes(16).hex()})]
    try:
        place = _all_gather(place[0] or "", size)
        told = json.loads(place[0])
        secret = told["secret"].encode()
        if listener is not None:
            lines = accept_ranks(listener, secret, size)
        else:
            addresses = [(str(name), int(port)) for name, port in told["addresses"]]
            lines = connect_to_leader(addresses, secret, rank)
    finally:
        if listener is not None:
            listener.close()
    boxes = tuple(
        {name: Box(tuple(offset), tuple(shape)) for name, (offset, shape) in each["boxes"].items()}
        for each in everybody
    )
    counts, slots = data_groups([each["data"] for each in everybody])
    return Ranks(rank, size, boxes, counts, slots, *lines)


def _all_gather(text: str, size: int) -> list[Any]:
    """What every rank says, over the group of the training: it has not begun, and everybody is here."""
    found: list[Any] = [None] * size
    dist.all_gather_object(found, text)
    return found


def _describe_rank(model: nn.Module, rank: int) -> dict[str, Any]:
    """What the others have to know of this rank. A problem is told to all, so that nobody waits for who has it."""
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
    except Exception as wrong:
        return {"wrong": f"{type(wrong).__name__}: {wrong}"}


def _check_same_model(everybody: list[dict[str, Any]]) -> None:
    for rank, told in enumerate(everybody):
        if "wrong" in told:
            raise ValueError(f"rank {rank} of this island: {told['wrong']}")
    first = everybody[0]["tensors"]
    for rank, told in enumerate(everybody[1:], 1):
        for name in sorted({*first, *told["tensors"]}):
            mine, theirs = first.get(name, "nothing"), told["tensors"].get(name, "nothing")
            if mine != theirs:
                raise ValueError(
                    f"{name} is {theirs} on rank {rank} of this island and {mine} on rank 0; all ranks of an island "
                    "have the same model, whole or sharded"
                )


def fsdp_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]


def reshard(modules: list[Any]) -> None:
    """FSDP's parameters as they are between two steps. After a forward pass without a backward one some modules hold
    gathered copies, which would not see what is adopted."""
    for module in modules:
        module.reshard()


# --------------------------------------------------------------------------------------------------------------- data


def data_ranks(model: nn.Module, rank: int) -> tuple[str, list[int]]:
    """("others", ranks): these and this one have data of their own each, and train one model. ("same", ranks): these
    train on the same data, each with its part of the model."""
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
    """By rank, whether its tokens count, and whose data it has.

    Tokens count of the ranks that reduce gradients with the leader (DDP, FSDP); ranks beside them, of tensor
    parallelism, have the same data. Where there is only tensor parallelism, the first of each mesh counts.

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
