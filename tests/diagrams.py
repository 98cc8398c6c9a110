"""Generate parts of docs/protocol.md from the code: state diagrams, reason sentences, fields of types.

    python -m tests.diagrams --write docs/protocol.md     update the page (`make docs`)
    python -m tests.diagrams                              print them

A part is the text between two comments of the page:

    <!-- generated: states of round -->
    <!-- end -->
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, get_args

from atoll.core import protocol
from atoll.core.reasons import REASONS, Reason
from atoll.core.states import TRANSITION_TABLES
from atoll.core.types import AcceptedContribution, MergedUpTo, RoundId

GENERATED_PART = re.compile(r"<!-- generated: (?P<name>[^>]*) -->\n(?P<text>.*?)<!-- end -->", re.DOTALL)

Table = Mapping[tuple[Any, str], Enum]


def render_states(name: str) -> str:
    """Return one transition table as a diagram and as table rows."""
    table: Table = TRANSITION_TABLES[name]
    kind: type[Enum] = type(next(iter(table))[0])
    members = list(kind)
    arrows: dict[tuple[Enum, Enum], list[str]] = {}
    for (state, trigger), to in table.items():
        arrows.setdefault((state, to), []).append(trigger)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {members[0].name}"]
    lines += [f"    {state.name} --> {to.name}: {', '.join(triggers)}" for (state, to), triggers in arrows.items()]
    lines += [f"    {state.name} --> [*]" for state in members if not _outgoing(table, state)]
    lines += ["```", "", "| state | moves |", "|---|---|"]
    for state in members:
        moves = [f"`{trigger}` to {to.name}" for trigger, to in _outgoing(table, state)]
        lines.append(f"| {state.name} | {', '.join(moves) or 'none'} |")
    return "\n".join(lines) + "\n"


def _outgoing(table: Table, state: Enum) -> list[tuple[str, Enum]]:
    return [(trigger, to) for (origin, trigger), to in table.items() if origin is state]


def render_reasons() -> str:
    lines = ["| code | sentence |", "|---|---|"]
    lines += [f"| `{code}` | {sentence} |" for code, sentence in REASONS.items()]
    return "\n".join(lines) + "\n"


TYPE_GROUPS: dict[str, Iterable[Any]] = {
    "nouns": (RoundId, MergedUpTo, AcceptedContribution, Reason, protocol.RecordKey),
    "around every body": (protocol.Envelope,),
    "learner to syncer": get_args(protocol.LearnerBody),
    "syncer to learner": get_args(protocol.SyncerBody),
    "records": get_args(protocol.Record),
}


def render_types() -> str:
    """Return all message and record types with their fields and annotations; aliases first."""
    lines = ["```python", "LearnerId = FragmentId = Version = Incarnation = int"]
    lines += ["Number = int | float", "Scalar = bool | Number | str | None"]
    for title, types in TYPE_GROUPS.items():
        lines += ["", f"# {title}"]
        lines += [f"{kind.__name__}({_format_fields(kind)})" for kind in types]
    return "\n".join([*lines, "```"]) + "\n"


def _format_fields(kind: Any) -> str:
    return ", ".join(f"{name}: {hint}" for name, hint in kind.__annotations__.items())


PART_RENDERERS: dict[str, Callable[[], str]] = {
    **{f"states of {name}": partial(render_states, name) for name in TRANSITION_TABLES},
    "reasons": render_reasons,
    "shapes": render_types,
}


def fill_generated_parts(text: str) -> str:
    """Return the page with every generated part up to date."""
    found = [match["name"] for match in GENERATED_PART.finditer(text)]
    missing, unknown = sorted(set(PART_RENDERERS) - set(found)), sorted(set(found) - set(PART_RENDERERS))
    if missing or unknown or len(found) != len(set(found)):
        raise ValueError(f"parts of the page: missing {missing}, unknown {unknown}, found {found}; each goes in once")
    return GENERATED_PART.sub(
        lambda match: f"<!-- generated: {match['name']} -->\n{PART_RENDERERS[match['name']]()}<!-- end -->", text
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="The generated parts of docs/protocol.md.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put them into this page")
    page: Path | None = parser.parse_args().write
    if page is None:
        sys.stdout.write("\n".join(f"## {name}\n\n{part()}" for name, part in PART_RENDERERS.items()))
        return 0
    before = page.read_text(encoding="utf-8")
    after = fill_generated_parts(before)
    if after != before:
        page.write_text(after, encoding="utf-8")
    print(f"{page}: {'rewritten' if after != before else 'up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
