"""Row downloads from a syncer that sends invalid or damaged ranges, which are refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from aiohttp import web
from torch import nn

from atoll.island.fragments import FragmentTensors, RowFragment
from atoll.island.row_transfer import FetchRowsRequest, RankRowTransfer
from atoll.tensors.codecs import get_codec
from atoll.tensors.model_view import ModelView
from atoll.tensors.plan import describe_tensors, make_plan, tensor_digest
from atoll.tensors.row_sharding import shard_fragment
from atoll.tensors.sharding import Box
from atoll.transport.http_client import FragmentClient, LearnerLink, LinkEvent
from atoll.transport.wire import FragmentHeader, FrameKind, WireError, as_bytes, encode_frame_head

ROWS = 1000
VALUE = torch.arange(ROWS * 8.0)


def fragment_of_rank(rank: int) -> RowFragment:
    """Return the fragment of a rank that owns one half of a weight."""
    model = nn.Linear(8, ROWS, bias=False)
    plan = make_plan(describe_tensors(model), 1, "balanced")
    halves = [{"weight": Box((begin, 0), (ROWS // 2, 8))} for begin in (0, ROWS // 2)]
    share = shard_fragment(plan, 0, halves)
    rows = FragmentTensors(ModelView(model, plan), 0, get_codec("f32"), share=share, rank=rank).rows
    assert rows is not None
    return rows


class LinkOwner:
    def handle_link_event(self, event: LinkEvent) -> None:
        raise AssertionError(f"no connection is opened here: {event}")


Fault = Callable[[FragmentHeader, bytes, int], tuple[FragmentHeader, bytes, int]]


async def fetch_rows(fault: Fault, rank: int = 1) -> tuple[RowFragment, list[tuple[int, int]], dict[str, Any]]:
    """Download the rows of a rank. Return its fragment, the requested byte ranges, and the result."""
    requested: list[tuple[int, int]] = []

    async def serve(request: web.Request) -> web.Response:
        begin, end = int(request.query["begin"]), int(request.query["end"])
        requested.append((begin, end))
        value = bytes(as_bytes(VALUE))
        header = FragmentHeader(0, 7, None, tensor_digest(VALUE), begin, len(value))
        header, payload, damage = fault(header, value[begin:end], len(requested))
        encoded = header.encode()
        body = bytearray(encode_frame_head(FrameKind.FRAGMENT, 0, encoded, payload) + encoded + payload)
        if damage:
            body[-1] ^= damage
        return web.Response(body=bytes(body))

    app = web.Application()
    app.router.add_get("/v1/fragment/0/7", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    link = LearnerLink(f"127.0.0.1:{port}", None, logging.getLogger("test"), LinkOwner())
    await link.start()
    fragment = fragment_of_rank(rank)
    try:
        with ThreadPoolExecutor(1) as compute:
            transfer = RankRowTransfer(link, FragmentClient(link, None), compute, lambda _: [fragment], lambda *_: None)
            result = await transfer.fetch(FetchRowsRequest(0, 0, 7, None, ("int8",), link.current_address))
    finally:
        await link.close()
        await runner.cleanup()
    return fragment, requested, result


def no_fault(header: FragmentHeader, payload: bytes, number: int) -> tuple[FragmentHeader, bytes, int]:
    return header, payload, 0


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_requests_only_its_own_rows(rank):
    fragment, requested, result = asyncio.run(fetch_rows(no_fault, rank))
    half = VALUE.nbytes // 2
    assert requested[0] == (0, 1), "the first request must get the codec"
    assert sum(end - begin for begin, end in requested[1:]) == half == result["moved"]
    assert min(begin for begin, _ in requested[1:]) == rank * half
    assert result["digest"] == tensor_digest(VALUE)
    value = fragment.pop_fetched(7)
    assert value is not None
    assert torch.equal(value.tensor[: VALUE.numel() // 2], VALUE.chunk(2)[rank])


def test_damaged_slice_is_requested_again():
    _, requested, _ = asyncio.run(fetch_rows(lambda header, payload, number: (header, payload, int(number == 2))))
    assert requested[1] == requested[2]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (lambda header, payload, number: (header, payload, 1), "digest"),
        (lambda header, payload, number: (header, payload[: -1 if number > 1 else None], 0), "size"),
        (lambda header, payload, number: (header, payload + (b"x" if number > 1 else b""), 0), "size"),
        (lambda header, payload, number: (header._replace(total_bytes=header.total_bytes - 4), payload, 0), "size"),
        (lambda header, payload, number: (header._replace(version=8), payload, 0), "type"),
        (lambda header, payload, number: (header._replace(fragment=1), payload, 0), "type"),
        (lambda header, payload, number: (header._replace(base=6), payload, 0), "type"),
        (lambda header, payload, number: (header._replace(begin=header.begin + (number > 1)), payload, 0), "type"),
    ],
    ids=["damaged", "short", "long", "other size", "other version", "other fragment", "other base", "other begin"],
)
def test_ranges_that_were_not_requested_are_refused(fault, code):
    with pytest.raises(WireError) as error:
        asyncio.run(fetch_rows(fault))
    assert error.value.code == code


def test_download_restarts_when_the_value_changes():
    """The header of a later slice has another digest. Slices of two values must not be mixed."""
    other = "0" * 32
    fault: Fault = lambda header, payload, number: (  # noqa: E731
        header._replace(value_digest=other if number > 1 else header.value_digest),
        payload,
        0,
    )
    with pytest.raises(ConnectionError, match="serves other bytes"):
        asyncio.run(fetch_rows(fault))
