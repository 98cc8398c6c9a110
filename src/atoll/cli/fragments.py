"""`atoll fragments`: show how a model is cut into fragments, and how balanced they are."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from atoll.cli.options import DataclassOptions
from atoll.cli.output import JsonOption, Result
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.tensors.plan import FragmentPlan, TensorInfo

EMBEDDING_PATTERNS = ("*embed*", "*wte*")
"""Name patterns of embeddings in a file. A file does not store what its tensors are used for."""

MAX_HEADER_BYTES = 100 << 20  # the same limit as in the safetensors library

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}
_KIND_SYMBOLS = {"weight": "█", "embedding": "▒", "buffer": "░"}
_ASCII_KIND_SYMBOLS = {"weight": "#", "embedding": "=", "buffer": "."}


class FragmentCounts(NamedTuple):
    """Counts of one fragment: tensors or parts of tensors, parameters, and parameters by kind."""

    tensors: int
    parameters: int
    kinds: dict[str, int]


def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Size of the reference model (100k, 360k, 1m, 5m, 10m, moe), .safetensors file, or run directory.",
        ),
    ],
    *,
    protocol: Annotated[
        dict[str, Any], DataclassOptions("atoll.core.types:RunConfig", only=("fragments",), as_dict=True)
    ],
    numerics: Annotated[
        dict[str, Any], DataclassOptions("atoll.tensors.settings:Numerics", only=("plan",), as_dict=True)
    ],
    embeddings: Annotated[
        list[str] | None,
        Setting("Name pattern of embeddings. Repeatable. [default for files: *embed*, *wte*]", "PATTERN"),
    ] = None,
    as_json: JsonOption = False,
) -> Result:
    """Show how a model is cut into fragments.

    Prints one line per fragment: tensors, parameters, bytes, and a bar of the kinds of parameters. Balance is the size
    of the largest fragment over the mean. All fragments have the same time for their upload, so the largest one
    determines the bandwidth that the link needs.
    """
    from atoll.tensors.plan import make_plan

    tensors = read_tensors(model, embeddings)
    fragments: int = protocol["fragments"]
    plan = make_plan(tensors, fragments, numerics["plan"])
    shares = [_count_shares(plan, fragment) for fragment in range(len(plan.fragments))]
    arguments = model, fragments, plan, shares
    return Result(partial(_plan_fields, *arguments), partial(_print_plan, *arguments))


# ---------------------------------------------------------------------------------------------------------- the model


def read_tensors(model: str, embeddings: Sequence[str] | None) -> tuple[TensorInfo, ...]:
    """Return the tensors of a file or of a reference model. The values of a file are not read."""
    path = Path(model) / "model.safetensors" if Path(model).is_dir() else Path(model)
    if path.suffix == ".safetensors":
        return read_header(path, EMBEDDING_PATTERNS if embeddings is None else embeddings)
    try:
        from atoll.reference.models import SIZES, build_model
        from atoll.tensors.plan import describe_tensors
    except ModuleNotFoundError as missing:
        raise ValueError(
            f"a reference model needs {missing.name} of the extra 'train': pip install 'atoll[train]'"
        ) from None
    if model not in SIZES:
        raise ValueError(f"there is no model {model!r}; give a .safetensors file or one of {', '.join(SIZES)}")
    return describe_tensors(build_model(SIZES[model], 0), embeddings or ())


def read_header(path: Path, embeddings: Sequence[str]) -> tuple[TensorInfo, ...]:
    """Return names, shapes and dtypes of a safetensors file. Integer tensors are counters and masks that stay local."""
    from atoll.tensors.plan import MAX_NUMEL, TensorInfo

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, os.fstat(file.fileno()).st_size - 8):
            raise ValueError(f"{path} is not a safetensors file, or is truncated")
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is not JSON")
    tensors = []
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        shape = fields.get("shape") if isinstance(fields, dict) else None
        if not isinstance(shape, list) or not all(type(size) is int and 0 <= size <= MAX_NUMEL for size in shape):
            raise ValueError(f"{path} is damaged: {name[:100]!r} has no shape")
        dtype = fields.get("dtype")
        if not isinstance(dtype, str):
            raise ValueError(f"{path} is damaged: {name[:100]!r} has no dtype")
        if dtype in _DTYPES:
            kind = "embedding" if any(fnmatchcase(name, pattern) for pattern in embeddings) else "weight"
            tensors.append(TensorInfo(name, tuple(shape), _DTYPES[dtype], kind))
    if not any(tensor.is_synced for tensor in tensors):
        raise ValueError(f"{path} has no floating-point tensors, so there is nothing to cut into fragments")
    return tuple(tensors)


# --------------------------------------------------------------------------------------------------------- the output


def _count_shares(plan: FragmentPlan, fragment: int) -> FragmentCounts:
    kinds: dict[str, int] = {}
    for piece in plan.fragments[fragment]:
        kinds[piece.kind] = kinds.get(piece.kind, 0) + piece.numel
    return FragmentCounts(len({piece.tensor for piece in plan.fragments[fragment]}), plan.numel(fragment), kinds)


def _plan_fields(model: str, requested: int, plan: FragmentPlan, shares: Sequence[FragmentCounts]) -> dict[str, object]:
    return {
        "model": replace_unencodable(model),
        "plan": plan.method,
        "requested": requested,
        "parameters": plan.total_numel,
        "tensors": sum(tensor.is_synced for tensor in plan.tensors),
        "frozen": sum(tensor.kind == "frozen" for tensor in plan.tensors),
        "balance": plan.imbalance,
        "embeddings": [number for number, each in enumerate(shares) if "embedding" in each.kinds],
        "fragments": [
            {
                "fragment": number,
                "tensors": each.tensors,
                "parameters": each.parameters,
                "bytes_f32": 4 * each.parameters,
                "kinds": each.kinds,
                "pieces": [
                    [replace_unencodable(piece.tensor), piece.start, piece.stop] for piece in plan.fragments[number]
                ],
            }
            for number, each in enumerate(shares)
        ],
    }


def _print_plan(model: str, requested: int, plan: FragmentPlan, shares: Sequence[FragmentCounts]) -> None:
    from atoll.tensors.plan import MAX_ROWS_IMBALANCE

    width = min(max(shutil.get_terminal_size((80, 24)).columns, 40), 200)
    symbols = _kind_symbols()
    count = len(plan.fragments)
    sentences = [
        f"{replace_unencodable(model)}: {_plural(count, 'fragment')}, {format_count(plan.total_numel)} parameters,"
        f" {plan.method}"
    ]
    if count < requested:
        sentences.append(
            f"Fewer than the {requested} fragments requested: the model has no more tensors to distribute."
        )
    _print_wrapped(sentences, width)
    print()
    rows = [
        (str(number), str(each.tensors), format_count(each.parameters), f"{format_count(4 * each.parameters)}B")
        for number, each in enumerate(shares)
    ]
    head = ("p", "tensors", "params", "as f32") if width >= 60 else ("p", "n", "params", "as f32")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(4)]
    print(" ".join(cell.rjust(size) for cell, size in zip(head, widths, strict=True)))
    room = width - sum(widths) - 5
    largest = max(each.parameters for each in shares)
    for row, each in zip(rows, shares, strict=True):
        print(" ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)), end=" ")
        print(draw_bar(each.kinds, largest, room, symbols))
    print()
    kinds = [kind for kind in symbols if any(kind in each.kinds for each in shares)]
    sentences = ["  ".join(f"{symbols[kind]} {kind}s" for kind in kinds)]
    sentences.append(f"balance {plan.imbalance:.2f} (the largest over the mean)")
    numbers = [number for number, each in enumerate(shares) if "embedding" in each.kinds]
    if numbers:
        sentences.append(f"embeddings in {'fragment' if len(numbers) == 1 else 'fragments'} {format_ranges(numbers)}")
    if plan.method != "rows" and plan.imbalance > MAX_ROWS_IMBALANCE:
        sentences.append("--plan rows would cut the large tensors")
    _print_wrapped(sentences, width)


def _print_wrapped(sentences: Sequence[str], width: int) -> None:
    for sentence in sentences:
        print(textwrap.fill(sentence, width, subsequent_indent="  ", break_on_hyphens=False))


def replace_unencodable(text: str) -> str:
    """Replace characters that no encoding can write. Names of files and of tensors may have them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def draw_bar(kinds: dict[str, int], largest: int, width: int, symbols: dict[str, str]) -> str:
    """Return a bar with one symbol per kind of parameters.

    Args:
        kinds: Parameters by kind.
        largest: Parameters of the largest fragment, whose bar has the full width.
        width: Characters of the longest bar. The shortest bar has one.
        symbols: Symbol of each kind, in the order of drawing.

    >>> draw_bar({"embedding": 3, "weight": 3}, 12, 8, {"weight": "#", "embedding": "="})
    '##=='
    """
    drawn, total, bar = 0, 0, ""
    for kind, symbol in symbols.items():
        total += kinds.get(kind, 0)
        end = round(width * total / largest)
        bar += symbol * (end - drawn)
        drawn = end
    return bar or next(symbols[kind] for kind in symbols if kind in kinds)


def format_count(count: int) -> str:
    """
    >>> format_count(999), format_count(1_536), format_count(32_768), format_count(999_950), format_count(7_240_000_000)
    ('999', '1.54k', '32.8k', '1.00M', '7.24G')
    """
    size, unit = float(count), ""
    for unit in ("", "k", "M", "G", "T", "P"):
        if size < 999.5 or unit == "P":
            break
        size /= 1000
    if not unit:
        return str(count)
    return f"{size:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}{unit}"


def format_ranges(numbers: Sequence[int]) -> str:
    """
    >>> format_ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _kind_symbols() -> dict[str, str]:
    """Return block characters if stdout can encode them, otherwise ASCII."""
    try:
        "".join(_KIND_SYMBOLS.values()).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _ASCII_KIND_SYMBOLS
    return _KIND_SYMBOLS
