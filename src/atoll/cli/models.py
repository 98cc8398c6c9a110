"""`atoll generate`, `export_model` and `import`: the model that a run leaves, and the one it starts from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.output import JsonOption, Result
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.tensors.plan import TensorInfo

BYTE_VOCABULARY = 256


def run_generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run that atoll train has finished.")],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the model goes on from.")],
    tokens: Annotated[int, Setting("Bytes to add, at most.", "N")] = 300,
    temperature: Annotated[float, Setting("0: the most likely byte each time; 1: as the model has it.", "T")] = 0.7,
    seed: Annotated[int, Setting("Another seed gives another text.", "S")] = 0,
    as_json: JsonOption = False,
) -> Result:
    """Let the trained model of a run continue a text.

    The same run, text, temperature and seed give the same bytes. The model reads bytes, so any text will do; it has
    seen what the run was trained on, by default the sources of Python's standard library. It stops early where it ends
    the document.
    """
    import torch

    from atoll.reference.models import generate
    from atoll.reference.saved_models import load_model

    torch.set_num_threads(1)
    settings, model = load_model(run)
    if settings.vocabulary != BYTE_VOCABULARY:
        raise ValueError(f"the model of {run} knows {settings.vocabulary} tokens of its own, not bytes: it has no text")
    start = text.encode("utf-8", "surrogateescape")  # a shell may hand over bytes that are no text
    made = generate(model, list(start), tokens, temperature, seed)
    shown = start.decode("utf-8", "replace")

    def fields() -> dict[str, object]:
        added = bytes(made).decode("utf-8", "replace")
        return {"run": str(run), "text": shown, "added": added, "temperature": temperature, "seed": seed}

    return Result(fields, partial(_write_text, shown, made))


def _write_text(text: str, made: Iterator[int]) -> None:
    """As it comes; a letter of several bytes is shown when it is whole."""
    import codecs

    letters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    sys.stdout.write(text)
    for token in made:
        sys.stdout.write(letters.decode(bytes([token])))
        sys.stdout.flush()
    sys.stdout.write(letters.decode(b"", final=True) + "\n")


def run_export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, finished or not.")],
    out: Annotated[Path, Setting("A new file; dcp, transformers: a new directory.", "PATH")],
    to: Annotated[
        str, Setting("safetensors, dcp (torch.distributed.checkpoint), transformers.", "FORMAT")
    ] = "safetensors",
    snapshot: Annotated[int | None, Setting("That of snapshot N; atoll snapshot RUN --list.", "N")] = None,
    config: Annotated[
        Path | None,
        Setting("For transformers: config.json or adapter_config.json of the model, or its directory.", "DIR_OR_JSON"),
    ] = None,
    as_json: JsonOption = False,
) -> Result:
    """Write the published model of a run as a checkpoint that other programs read.

    Of a finished run it is the final model; of one that trains the newest published version of every fragment, without
    disturbing it. Tensors have the names and dtypes of the model that was trained; what is tied is written once, and
    what is frozen never travelled and is not in it. The way back is atoll import.

    For transformers it is a directory that from_pretrained loads. Weights beside the configuration are those of what
    was frozen. Of a run that trained an adapter of LoRA it is the adapter.
    """
    from atoll.checkpoint.formats import export_model, read_run_model
    from atoll.checkpoint.published_model import read_plan

    model = read_run_model(run, snapshot)
    if to == "transformers" and config is not None:
        frozen = {info.name: info for info in read_plan(run).tensors if info.kind == "frozen"}
        _export_transformers(model.tensors, frozen, config, out)
    elif config is not None:
        raise ValueError(f"--config is for --to transformers, and this is --to {to}")
    else:
        export_model(model, to, out)
    numbers = sum(tensor.numel() for tensor in model.tensors.values())
    tensors = len(model.tensors)
    fields = {"run": str(run), "which": model.description, "to": to, "out": str(out), "tensors": tensors}
    lines = [f"{out}: {model.description}, {tensors} tensors, {numbers:,} numbers", f"digest {model.digest}"]
    return Result({**fields, "numbers": numbers, "digest": model.digest}, lines)


def _export_transformers(
    tensors: Mapping[str, Tensor], frozen: Mapping[str, TensorInfo], config: Path, out: Path
) -> None:
    try:
        from atoll.integrations.pretrained import export_pretrained

        export_pretrained(tensors, frozen, config, out)
    except ModuleNotFoundError as missing:
        raise ValueError(missing_extra_message(missing)) from None


def missing_extra_message(missing: ModuleNotFoundError) -> str:
    return f"this needs {missing.name}, which comes with the extra 'transformers': pip install 'atoll[transformers]'"


def run_import(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A .safetensors file, a file of torch.save, or a directory: of torch.distributed.checkpoint, of "
            "transformers, or of a run.",
        ),
    ],
    out: Annotated[Path, Setting("A new .safetensors file, for --init.", "FILE")],
    prefix: Annotated[str, Setting("Take only tensors whose names begin so, without it.", "TEXT")] = "",
    rename: Annotated[
        list[str] | None, Setting("Give a tensor the name that the model has. Repeatable.", "NEW=OLD")
    ] = None,
    kind: Annotated[
        str | None,
        Setting(
            "transformers: take names from the model's class, with a tied head. Without it: as found.", "FORMAT", "from"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> Result:
    """Make a starting checkpoint for `atoll train --init` and `atoll syncer --init`.

    The run is founded with its values, and every learner starts from them, whatever it was initialised with. Names and
    shapes must be those of the model; a tied tensor has the first of its names in the alphabet. Whole numbers, such as
    counters, are left out: they stay local. Directories of torch.distributed.checkpoint hold pickled metadata: import
    only those that you trust. A directory of transformers is read by the class that its config.json names (--from
    transformers), so that tied tensors have the right names; nothing is downloaded.
    """
    from atoll.checkpoint.formats import ImportedModel, read_checkpoint
    from atoll.checkpoint.model_file import tensors_digest, write_tensors

    if out.suffix != ".safetensors":
        raise ValueError(f"{out}: end its name with .safetensors, which is what it will be")
    if out.exists():
        raise ValueError(f"{out} is there already, and nothing is written over: give another --out")
    if kind is None:
        found = read_checkpoint(checkpoint, prefix, rename or ())
    else:
        found = ImportedModel(_read_transformers(kind, checkpoint, bool(prefix or rename)), ())
    out.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(found.tensors, out)
    numbers = sum(tensor.numel() for tensor in found.tensors.values())
    digest = tensors_digest(found.tensors)
    left_out = [f"left out, as whole numbers stay local: {', '.join(found.skipped)}"] if found.skipped else []
    fields = {"out": str(out), "tensors": len(found.tensors), "numbers": numbers, "left_out": list(found.skipped)}
    lines = [
        f"{out}: {len(found.tensors)} tensors, {numbers:,} numbers",
        *left_out,
        f"digest {digest}",
        f"Start from it: atoll train --init {out}, or atoll syncer --init {out}",
    ]
    return Result({**fields, "digest": digest}, lines)


def _read_transformers(kind: str, folder: Path, is_renamed: bool) -> dict[str, Tensor]:

    if kind != "transformers":
        raise ValueError(f"--from {kind}: only transformers is named; other checkpoints are known by what they hold")
    if is_renamed:
        raise ValueError("with --from transformers names are those of the model: leave out --prefix and --rename")
    try:
        from atoll.integrations.pretrained import read_pretrained

        return read_pretrained(folder)
    except ModuleNotFoundError as missing:
        raise ValueError(missing_extra_message(missing)) from None
