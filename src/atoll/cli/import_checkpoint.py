"""`atoll import`: a checkpoint of anybody's as what a run starts from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import JsonOption, print_json

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLE = "atoll import first-dcp --out start.safetensors"


def run(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A .safetensors file, a file of torch.save, or a directory: of torch.distributed.checkpoint, of "
            "transformers, or of a run.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="A new .safetensors file, for --init.")],
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="TEXT", help="Take only tensors whose names begin so, without it.")
    ] = "",
    rename: Annotated[
        list[str] | None,
        typer.Option("--rename", metavar="NEW=OLD", help="Give a tensor the name that the model has. Repeatable."),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="transformers: names are those of the model's class, a tied head included. Without it: as found.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a starting checkpoint for `atoll train --init` and `atoll syncer --init`.

    The run is founded with its values, and every learner starts from them, whatever it was initialised with. Names and
    shapes must be those of the model; a tied tensor has the first of its names in the alphabet. Whole numbers, such as
    counters, are left out: they stay local. Directories of torch.distributed.checkpoint hold pickled metadata: import
    only those that you trust. A directory of transformers is read by the class that its config.json names (--from
    transformers), so that tied tensors have the right names; nothing is downloaded.
    """
    from atoll.checkpoint.formats import Read, read_checkpoint
    from atoll.checkpoint.model_file import tensors_digest, write_tensors

    if out.suffix != ".safetensors":
        raise ValueError(f"{out}: end its name with .safetensors, which is what it will be")
    if out.exists():
        raise ValueError(f"{out} is there already, and nothing is written over: give another --out")
    if kind is None:
        found = read_checkpoint(checkpoint, prefix, rename or ())
    else:
        found = Read(_of_transformers(kind, checkpoint, bool(prefix or rename)), ())
    out.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(found.tensors, out)
    numbers = sum(tensor.numel() for tensor in found.tensors.values())
    digest = tensors_digest(found.tensors)
    if as_json:
        print_json(
            {"out": str(out), "tensors": len(found.tensors), "numbers": numbers, "left_out": list(found.left_out)}
            | {"digest": digest}
        )
        return
    print(f"{out}: {len(found.tensors)} tensors, {numbers:,} numbers")
    if found.left_out:
        print(f"left out, as whole numbers stay local: {', '.join(found.left_out)}")
    print(f"digest {digest}")
    print(f"Start from it: atoll train --init {out}, or atoll syncer --init {out}")


def _of_transformers(kind: str, folder: Path, is_renamed: bool) -> dict[str, Tensor]:
    from atoll.cli.export import missing_extra

    if kind != "transformers":
        raise ValueError(f"--from {kind}: only transformers is named; other checkpoints are known by what they hold")
    if is_renamed:
        raise ValueError("with --from transformers names are those of the model: leave out --prefix and --rename")
    try:
        from atoll.integrations.pretrained import read_pretrained

        return read_pretrained(folder)
    except ModuleNotFoundError as missing:
        raise ValueError(missing_extra(missing)) from None
