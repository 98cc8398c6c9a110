"""`atoll export`: the model of a run, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.commands.output import JsonOption, print_json

EXAMPLE = "atoll export runs/first --to dcp --out first-dcp"


def run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, finished or not.")],
    out: Annotated[Path, typer.Option("--out", metavar="PATH", help="A new file, or for dcp a new directory.")],
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help="safetensors, dcp (torch.distributed.checkpoint), transformers."),
    ] = "safetensors",
    snapshot: Annotated[
        int | None, typer.Option("--snapshot", metavar="N", help="That of snapshot N; atoll snapshot RUN --list.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the published model of a run as a checkpoint that other programs read.

    Of a finished run it is the final model; of one that trains the newest published version of every fragment, without
    disturbing it. Tensors have the names and dtypes of the model that was trained; what is tied is written once, and
    what is frozen never travelled and is not in it. The way back is atoll import.
    """
    from atoll.train.checkpoints import export, model_of

    model = model_of(run, snapshot)
    export(model, to, out)
    numbers = sum(tensor.numel() for tensor in model.tensors.values())
    if as_json:
        told = {"run": str(run), "which": model.which, "to": to, "out": str(out), "tensors": len(model.tensors)}
        print_json(told | {"numbers": numbers, "digest": model.digest})
        return
    print(f"{out}: {model.which}, {len(model.tensors)} tensors, {numbers:,} numbers")
    print(f"digest {model.digest}")
