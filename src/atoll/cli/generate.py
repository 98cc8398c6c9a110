"""`atoll generate`: text from the model that a run has left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.output import JsonOption, print_json

EXAMPLE = 'atoll generate runs/first "def main():"'

BYTES = 256


def run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run that atoll train has finished.")],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What the model goes on from.")],
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="Bytes to add, at most.")] = 300,
    temperature: Annotated[
        float,
        typer.Option("--temperature", metavar="T", help="0: the most likely byte each time; 1: as the model has it."),
    ] = 0.7,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Another seed gives another text.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Let the trained model of a run continue a text.

    The same run, text, temperature and seed give the same bytes. The model reads bytes, so any text will do; it has
    seen what the run was trained on, by default the sources of Python's standard library. It stops early where it ends
    the document.
    """
    import torch

    from atoll.reference.models import sample
    from atoll.reference.saved_models import load_model

    torch.set_num_threads(1)
    settings, model = load_model(run)
    if settings.vocabulary != BYTES:
        raise ValueError(f"the model of {run} knows {settings.vocabulary} tokens of its own, not bytes: it has no text")
    start = text.encode("utf-8", "surrogateescape")  # a shell may hand over bytes that are no text
    made = sample(model, list(start), tokens, temperature, seed)
    shown = start.decode("utf-8", "replace")
    if as_json:
        added = bytes(made).decode("utf-8", "replace")
        print_json({"run": str(run), "text": shown, "added": added, "temperature": temperature, "seed": seed})
        return
    _write(shown, made)


def _write(text: str, made: Iterator[int]) -> None:
    """As it comes; a letter of several bytes is shown when it is whole."""
    import codecs

    letters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    sys.stdout.write(text)
    for token in made:
        sys.stdout.write(letters.decode(bytes([token])))
        sys.stdout.flush()
    sys.stdout.write(letters.decode(b"", final=True) + "\n")
