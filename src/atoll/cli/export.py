"""`atoll export`: the model of a run, for other programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import JsonOption, print_json

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.tensors.plan import TensorInfo

EXAMPLE = "atoll export runs/first --to dcp --out first-dcp"


def run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, finished or not.")],
    out: Annotated[Path, typer.Option("--out", metavar="PATH", help="A new file; dcp, transformers: a new directory.")],
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help="safetensors, dcp (torch.distributed.checkpoint), transformers."),
    ] = "safetensors",
    snapshot: Annotated[
        int | None, typer.Option("--snapshot", metavar="N", help="That of snapshot N; atoll snapshot RUN --list.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="DIR_OR_JSON",
            help="For transformers: config.json of the model, or adapter_config.json; or the directory of one.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the published model of a run as a checkpoint that other programs read.

    Of a finished run it is the final model; of one that trains the newest published version of every fragment, without
    disturbing it. Tensors have the names and dtypes of the model that was trained; what is tied is written once, and
    what is frozen never travelled and is not in it. The way back is atoll import.

    For transformers it is a directory that from_pretrained loads. Weights beside the configuration are those of what
    was frozen. Of a run that trained an adapter of LoRA it is the adapter.
    """
    from atoll.checkpoint.formats import export, model_of
    from atoll.checkpoint.published import plan_of

    model = model_of(run, snapshot)
    if to == "transformers" and config is not None:
        frozen = {info.name: info for info in plan_of(run).tensors if info.kind == "frozen"}
        _to_transformers(model.tensors, frozen, config, out)
    elif config is not None:
        raise ValueError(f"--config is for --to transformers, and this is --to {to}")
    else:
        export(model, to, out)
    numbers = sum(tensor.numel() for tensor in model.tensors.values())
    if as_json:
        told = {"run": str(run), "which": model.which, "to": to, "out": str(out), "tensors": len(model.tensors)}
        print_json(told | {"numbers": numbers, "digest": model.digest})
        return
    print(f"{out}: {model.which}, {len(model.tensors)} tensors, {numbers:,} numbers")
    print(f"digest {model.digest}")


def _to_transformers(tensors: Mapping[str, Tensor], frozen: Mapping[str, TensorInfo], config: Path, out: Path) -> None:
    try:
        from atoll.integrations.pretrained import export_pretrained

        export_pretrained(tensors, frozen, config, out)
    except ModuleNotFoundError as missing:
        raise ValueError(missing_extra(missing)) from None


def missing_extra(missing: ModuleNotFoundError) -> str:
    return f"this needs {missing.name}, which comes with the extra 'transformers': pip install 'atoll[transformers]'"
