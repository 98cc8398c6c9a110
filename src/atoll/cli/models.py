"""`atoll generate`, `export` and `import`: use the model of a run, or make the model that a run starts from."""

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
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run of atoll train.")],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Text that the model continues.")],
    tokens: Annotated[int, Setting("Maximum number of bytes to add.", "N")] = 300,
    temperature: Annotated[float, Setting("Sampling temperature. 0: always the most likely byte.", "T")] = 0.7,
    seed: Annotated[int, Setting("Seed of the sampling.", "S")] = 0,
    as_json: JsonOption = False,
) -> Result:
    """Continue a text with the trained model of a run.

    The same run, text, temperature and seed give the same bytes. The model reads bytes, so it accepts any text. It was
    trained on the data of the run, by default the sources of Python's standard library. It stops early if it generates
    the end of the document.
    """
    import torch

    from atoll.reference.models import generate
    from atoll.reference.saved_models import load_model

    torch.set_num_threads(1)
    settings, model = load_model(run)
    if settings.vocabulary != BYTE_VOCABULARY:
        raise ValueError(
            f"the model of {run} uses {settings.vocabulary} tokens instead of bytes: it cannot generate text"
        )
    start = text.encode("utf-8", "surrogateescape")  # a shell may pass bytes that are not UTF-8
    generated = generate(model, list(start), tokens, temperature, seed)
    prompt = start.decode("utf-8", "replace")

    def fields() -> dict[str, object]:
        added = bytes(generated).decode("utf-8", "replace")
        return {"run": str(run), "text": prompt, "added": added, "temperature": temperature, "seed": seed}

    return Result(fields, partial(_write_text, prompt, generated))


def _write_text(text: str, generated: Iterator[int]) -> None:
    """Write the text as it is generated. A character of several bytes is written when it is complete."""
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    sys.stdout.write(text)
    for token in generated:
        sys.stdout.write(decoder.decode(bytes([token])))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")


def run_export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run, finished or not.")],
    out: Annotated[Path, Setting("New file, or new directory for dcp and transformers.", "PATH")],
    to: Annotated[
        str, Setting("Format: safetensors, dcp (torch.distributed.checkpoint) or transformers.", "FORMAT")
    ] = "safetensors",
    snapshot: Annotated[
        int | None, Setting("Export the model of snapshot N; atoll snapshot RUN --list shows them.", "N")
    ] = None,
    config: Annotated[
        Path | None,
        Setting(
            "For transformers: config.json or adapter_config.json of the model, or the directory with it.",
            "DIR_OR_JSON",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> Result:
    """Write the published model of a run as a checkpoint for other programs.

    For a finished run it is the final model. For a live run it is the newest published version of every fragment; the
    run is not slowed down. Tensors have the names and dtypes of the trained model. Tied tensors are written once.
    Frozen tensors are not synchronized and therefore not written. atoll import reads the checkpoint back.

    For transformers it is a directory that from_pretrained loads. Frozen weights are taken from the directory of the
    configuration. For a run that trained a LoRA adapter, it is the adapter.
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
    return f"this needs {missing.name} of the extra 'transformers': pip install 'atoll[transformers]'"


def run_import(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A .safetensors file, a torch.save file, or a directory of torch.distributed.checkpoint, of "
            "transformers, or of a run.",
        ),
    ],
    out: Annotated[Path, Setting("New .safetensors file, for --init.", "FILE")],
    prefix: Annotated[str, Setting("Import only tensors with this name prefix, and remove the prefix.", "TEXT")] = "",
    rename: Annotated[
        list[str] | None, Setting("Rename a tensor to its name in the model. Repeatable.", "NEW=OLD")
    ] = None,
    kind: Annotated[
        str | None,
        Setting(
            "transformers: take tensor names from the model's class. [default: names as in the checkpoint]",
            "FORMAT",
            "from",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> Result:
    """Convert a checkpoint for `atoll train --init` and `atoll syncer --init`.

    The run starts with its values, and every learner takes them in place of its own initialization. Names and shapes
    must match the model; a tied tensor has the alphabetically first of its names. Integer tensors, such as counters,
    are omitted: they stay local. Directories of torch.distributed.checkpoint contain pickled metadata: import only
    those that you trust. With --from transformers a directory is loaded by the class that its config.json names, so
    that tied tensors have the right names. Nothing is downloaded.
    """
    from atoll.checkpoint.formats import ImportedModel, read_checkpoint
    from atoll.checkpoint.model_file import tensors_digest, write_tensors

    if out.suffix != ".safetensors":
        raise ValueError(f"{out} is not a .safetensors name; end --out with .safetensors")
    if out.exists():
        raise ValueError(f"{out} exists already and is not overwritten: give another --out")
    if kind is None:
        imported = read_checkpoint(checkpoint, prefix, rename or ())
    else:
        imported = ImportedModel(_read_transformers(kind, checkpoint, bool(prefix or rename)), ())
    out.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(imported.tensors, out)
    numbers = sum(tensor.numel() for tensor in imported.tensors.values())
    digest = tensors_digest(imported.tensors)
    left_out = (
        [f"omitted, because integer tensors stay local: {', '.join(imported.skipped)}"] if imported.skipped else []
    )
    fields = {"out": str(out), "tensors": len(imported.tensors), "numbers": numbers, "left_out": list(imported.skipped)}
    lines = [
        f"{out}: {len(imported.tensors)} tensors, {numbers:,} numbers",
        *left_out,
        f"digest {digest}",
        f"Start from it: atoll train --init {out}, or atoll syncer --init {out}",
    ]
    return Result({**fields, "digest": digest}, lines)


def _read_transformers(kind: str, folder: Path, is_renamed: bool) -> dict[str, Tensor]:
    if kind != "transformers":
        raise ValueError(f"--from {kind} is unknown; give transformers, or omit --from for other formats")
    if is_renamed:
        raise ValueError("--from transformers takes names from the model: omit --prefix and --rename")
    try:
        from atoll.integrations.pretrained import read_pretrained

        return read_pretrained(folder)
    except ModuleNotFoundError as missing:
        raise ValueError(missing_extra_message(missing)) from None
