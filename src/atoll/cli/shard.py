"""`atoll shard`: a process that holds some fragments of a run whose syncer is somewhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.access_options import Keys, Token, port_option
from atoll.cli.log_format import LogFormat
from atoll.cli.output import complain

EXAMPLE = "atoll shard --syncer head:7400 --shard 0 --shards 4 --out shards/0"


def run(
    syncer: Annotated[
        str,
        typer.Option("--syncer", metavar="HOST:PORT", help="Where atoll syncer --shards N listens; A:PORT,B:PORT."),
    ],
    shard: Annotated[int, typer.Option("--shard", metavar="K", min=0, help="Which one this is, from 0.")],
    shards: Annotated[int, typer.Option("--shards", metavar="N", min=1, help="How many there are.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Its directory; the same one when it comes back.")],
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, port_option("--port", "Port to listen on; 0: a free one.")] = 7401,
    advertise: Annotated[
        str | None,
        typer.Option("--advertise", metavar="HOST:PORT", help="Where learners reach it, if that is another address."),
    ] = None,
    token: Token = None,
    keys: Keys = None,
    plain_text: Annotated[
        bool, typer.Option("--plain-text", help="Nobody else is on this network: no keys are needed.")
    ] = False,
    log_format: LogFormat = "text",
) -> None:
    """Hold some fragments of a run: learners bring and fetch them here, the syncer decides.

    With n shards fragment p is at shard p % n. Put one at every site: what a site sends over the wide network is then
    that of a ring, and the syncer's own links carry nothing but words. A shard that is killed stops its own fragments
    until it is back with its directory; everything else goes on.
    """
    import logging

    from atoll.logs import check_format, set_up
    from atoll.store.version_store import InUse
    from atoll.syncer.main import Superseded
    from atoll.syncer.shards.process import serve_shard
    from atoll.transport.endpoint import address, place
    from atoll.transport.tls import key_files

    check_format(log_format)
    head = place(syncer, keys)
    head.check()
    if advertise is not None:
        address(advertise)
    set_up(log_format, logging.WARNING)
    logging.getLogger("atoll.shard").setLevel(logging.INFO)
    files = key_files(keys, of_syncer=True) if keys is not None else None

    def ready(where: str) -> None:
        complain(f"shard {shard} of {shards} listens on {where}")

    try:
        serve_shard(out, shard, shards, head, host, port, token or None, advertise, ready, files, plain_text)
    except (InUse, Superseded) as wrong:
        raise ValueError(str(wrong)) from None
