"""The docs agree with the code. Each check is shown to detect a planted error."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from atoll.chaos.scenario import shipped_scenarios
from atoll.cli.keys import ACTIONS
from atoll.cli.main import COMMANDS, build_command
from atoll.core import protocol
from atoll.core.learner.core import LearnerCore
from atoll.core.reasons import REASONS, Reason
from atoll.core.states import TRANSITION_TABLES
from atoll.core.types import Limits, MergedUpTo, RoundId, RunConfig, contribution_weight
from atoll.sim.checkers import create_checkers
from tests.diagrams import GENERATED_PART, fill_generated_parts

ROOT = Path(__file__).resolve().parent.parent
PROTOCOL = ROOT / "docs/protocol.md"
TEXT = PROTOCOL.read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])

FROM_LEARNER = {kind.__name__: kind for kind in get_args(protocol.LearnerBody)}
FROM_SYNCER = {kind.__name__: kind for kind in get_args(protocol.SyncerBody)}
BODIES: dict[str, Any] = FROM_LEARNER | FROM_SYNCER
EVENTS: dict[str, Any] = {kind.__name__: kind for kind in get_args(protocol.Event)}
EFFECTS: dict[str, Any] = {kind.__name__: kind for kind in get_args(protocol.Effect)}
WORLD_CHECKERS = ("liveness", "core")  # violations found by the world, not by a checker of tapes

Check = Callable[[str], Iterator[str]]


def by_hand(text: str) -> str:
    """Return the page without its generated parts, which do not count as explanations."""
    return GENERATED_PART.sub("", text)


def section(text: str, heading: str) -> str:
    """Return the text from this heading to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.DOTALL | re.MULTILINE)
    return found[1] if found else ""


def coded(text: str) -> set[str]:
    """Return all inline code, including code with a line break."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return {" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose)}


# --------------------------------------------------------------------------------------------------------------------
# Checks: functions from a page to problems


def generated_parts_are_what_the_code_generates(text: str) -> Iterator[str]:
    if fill_generated_parts(text) != text:
        yield "run `make docs`: a generated part is not what the code generates"


def every_message_has_a_section_with_its_fields(text: str) -> Iterator[str]:
    for name, kind in BODIES.items():
        documented = section(by_hand(text), f"`{name}`")
        if not documented:
            yield f"no section of the message {name}"
        for field in kind.__struct_fields__:
            if documented and field not in coded(documented):
                yield f"the section of {name} does not mention {field}"


def every_message_has_its_lane_and_the_recovery_from_loss(text: str) -> Iterator[str]:
    for name in BODIES:
        documented = section(by_hand(text), f"`{name}`")
        if not documented.strip().startswith(("Control.", "Bulk")):
            yield f"the section of {name} does not begin with its lane"
        if "Lost" not in documented:
            yield f"the section of {name} does not say what happens when it is lost"


def envelope_is_documented(text: str) -> Iterator[str]:
    documented = coded(section(by_hand(text), "The envelope"))
    yield from (
        f"the envelope's {field} is not explained"
        for field in protocol.Envelope.__struct_fields__
        if field not in documented
    )


def events_effects_and_records_are_documented(text: str) -> Iterator[str]:
    hand = by_hand(text)
    cells = coded("\n".join(re.findall(r"^\| (`[^|]*)\|", hand, re.MULTILINE)))
    for name in (*EVENTS, *EFFECTS, *(kind.__name__ for kind in get_args(protocol.Record))):
        if name not in cells:
            yield f"{name} begins no row of a table"


def every_trigger_is_explained(text: str) -> Iterator[str]:
    documented = coded(section_of_states(by_hand(text)))
    for name, table in TRANSITION_TABLES.items():
        yield from (f"trigger {trigger!r} of the {name} table" for _, trigger in table if trigger not in documented)


def section_of_states(text: str) -> str:
    found = re.search(r"^## States\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE)
    return found[1] if found else ""


def every_checker_is_named_with_its_invariant(text: str) -> Iterator[str]:
    rows = re.findall(r"^\| *\d* *\| `([^`]+)` \| (.+) \|$", section(by_hand(text), "Invariants"), re.MULTILINE)
    documented = dict(rows)
    expected = [(checker.name, checker.invariant) for checker in create_checkers(RunConfig())]
    for name, sentence in expected:
        if documented.get(name) != sentence:
            yield f"checker {name!r} says {sentence!r}, the page {documented.get(name)!r}"
    yield from (f"{name!r} is not named" for name in WORLD_CHECKERS if name not in documented)
    unknown = set(documented) - {name for name, _ in expected} - set(WORLD_CHECKERS)
    yield from (f"there is no checker {name!r}" for name in sorted(unknown))
    if [name for name, _ in rows if name in dict(expected)] != [name for name, _ in expected]:
        yield "the checkers are not in the order of all_checkers"


def every_reason_code_is_listed(text: str) -> Iterator[str]:
    documented = coded(section(text, "Reasons"))
    yield from (f"reason {code!r} is not listed" for code in REASONS if code not in documented)


def settings_and_limits_have_their_defaults(text: str) -> Iterator[str]:
    documented = documented_settings(by_hand(text))
    for kind in (RunConfig, Limits):
        for field in dataclasses.fields(kind):
            if field.name == "limits":
                continue
            default = "empty" if field.default == () else field.default
            expected = f"{default:g}" if isinstance(default, float) else str(default)
            if documented.get(field.name) != expected:
                yield f"the default of {field.name} is {expected}, the page says {documented.get(field.name)}"


def documented_settings(text: str) -> dict[str, str]:
    """Return the defaults by name: names are backquoted, and defaults are in the last cell in the same order."""
    documented: dict[str, str] = {}
    for row in re.findall(r"^\| (.*) \|$", section(text, "Words and symbols"), re.MULTILINE):
        cells = [cell.strip() for cell in row.split("|")]
        names = next((re.findall(r"`([^`]+)`", cell) for cell in cells[:-1] if re.match(r"`\w+`", cell)), [])
        documented.update(zip(names, [value.strip(" `") for value in cells[-1].split(",")], strict=False))
    return documented


def diagrams_show_messages_that_exist(text: str) -> Iterator[str]:
    """Yield arrows between a learner and a syncer or shard that are not messages, and arrows between the syncer and the
    disk or a shard that are not effects or events."""
    for flow in re.findall(r"```mermaid\nsequenceDiagram\n(.*?)```", text, re.DOTALL):
        roles = dict(re.findall(r"participant (\w+) as (\w+)", flow))
        for origin, to, name in re.findall(r"(\w+)->>(\w+): (\w+)", flow):
            known = {
                ("learner", "syncer"): FROM_LEARNER,
                ("syncer", "learner"): FROM_SYNCER,
                ("syncer", "disk"): EFFECTS,
                ("disk", "syncer"): EVENTS,
                ("learner", "shard"): FROM_LEARNER,
                ("syncer", "shard"): EFFECTS,
                ("shard", "syncer"): EVENTS,
            }.get((roles.get(origin, ""), roles.get(to, "")), {})
            if name not in known:
                yield f"{origin}->>{to}: {name} is not sent from {roles.get(origin)} to {roles.get(to)}"


# Changes of the page that each check must detect
PLANTED: dict[Check, list[tuple[str, str]]] = {
    generated_parts_are_what_the_code_generates: [
        ("IDLE --> PULLING: opened", "IDLE --> GRACE: opened"),
        ("| `published` | version", "| `published` | Version"),
        ("Pull(round: RoundId)", "Pull(round: int)"),
    ],
    every_message_has_a_section_with_its_fields: [
        ("#### `Resync`", "#### Resync"),
        ("`received_version` what is held", "and what is held"),
    ],
    every_message_has_its_lane_and_the_recovery_from_loss: [
        ("Control. The operator wants this learner out", "The operator wants this learner out"),
        ("Lost: it counts as DISCONNECTED", "It counts as DISCONNECTED"),
    ],
    envelope_is_documented: [("- `seen_tick`: newest tick", "- newest tick")],
    events_effects_and_records_are_documented: [
        ("| `StepTaken` |", "| StepTaken |"),
        ("| `OpenGrace` |", "| grace |"),
        ("| `ManifestRecord` |", "| manifest |"),
    ],
    every_trigger_is_explained: [("`pull-retried`: ", "asked again: ")],
    every_checker_is_named_with_its_invariant: [
        ("| `bounds` |", "| `limits` |"),
        ("no merge with fewer than K contributions", "no merge below the quorum"),
        ("| 10 | `liveness` |", "| 10 | |"),
    ],
    every_reason_code_is_listed: [("| `snapshot-in-progress` |", "| |")],
    settings_and_limits_have_their_defaults: [
        ("| `every_steps` | 24 |", "| `every_steps` | 500 |"),
        ("before its link is dropped | 5 |", "before its link is dropped | 6 |"),
        ("| `warmup_steps` |", "| |"),
    ],
    diagrams_show_messages_that_exist: [
        ("L->>S: Ready", "L->>S: Started"),
        ("S->>A: Marker", "A->>S: Marker"),
    ],
}


@pytest.mark.parametrize("check", PLANTED, ids=lambda check: check.__name__)
def test_the_page_is_complete(check):
    assert list(check(TEXT)) == []


@pytest.mark.parametrize(
    ("check", "old", "new"),
    [(check, *change) for check, changes in PLANTED.items() for change in changes],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_check_detects_a_planted_error(check, old, new):
    assert old in TEXT, "the text of the planted error is gone from the page"
    assert list(check(TEXT.replace(old, new, 1))) != []


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        (TEXT.replace("<!-- generated: reasons -->", "<!-- generated: excuses -->"), r"missing \['reasons'\], unknown"),
        (TEXT.replace("<!-- generated: states of run -->", ""), r"missing \['states of run'\]"),
        (TEXT + "<!-- generated: reasons -->\n<!-- end -->", "each goes in once"),
    ],
)
def test_a_page_with_other_parts_than_the_generator_is_refused(page, complaint):
    with pytest.raises(ValueError, match=complaint):
        fill_generated_parts(page)


def test_filling_twice_changes_nothing():
    assert fill_generated_parts(fill_generated_parts(TEXT)) == fill_generated_parts(TEXT)


# --------------------------------------------------------------------------------------------------------------------
# Links


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Yield relative links whose file or heading does not exist."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{page.name}: {target}: no such file"
        elif anchor and file.suffix == ".md":
            there = text if file == page else file.read_text(encoding="utf-8")
            if anchor not in anchors(there):
                yield f"{page.name}: {target}: no such heading"


def anchors(text: str) -> set[str]:
    """Return the anchors that renderers make from headings."""
    bare = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", bare, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_exist(page):
    assert list(broken_links(page, page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("link", "complaints"),
    [
        ("[x](design.md)", 0),
        ("[x](../src/atoll/core/states.py)", 0),
        ("[x](#grace)", 0),
        ("[x](#a-learner-in-the-syncers-eyes)", 0),
        ("[x](https://example.org/nothing)", 0),
        ("`[x](nowhere.md)`", 0),
        ("[x](nowhere.md)", 1),
        ("[x](#no-such-heading)", 1),
        ("[x](protocol.md#no-such-heading)", 1),
    ],
)
def test_planted_link_is_checked(link, complaints):
    assert len(list(broken_links(PROTOCOL, f"{TEXT}\n{link}\n"))) == complaints


# --------------------------------------------------------------------------------------------------------------------
# The worked example


def example_rows(text: str) -> list[dict[str, str]]:
    rows = [line.strip("| ").split(" | ") for line in section(text, "Example").splitlines() if line.startswith("|")]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def learner_at_step_64(adopt: str) -> tuple[LearnerCore, protocol.Contribution]:
    """Return a learner that was just pulled; its copy of step 40 is in the version that it adopted at step 42."""
    core = LearnerCore(RunConfig(fragments=1, adopt=adopt), learner=1, incarnation=1)  # type: ignore[arg-type]
    core.handle(0.0, protocol.Started())
    core.handle(0.0, protocol.ConnectionOpened(1))
    receive(core, protocol.Welcome((2,), 0.0, 1.0))
    receive(core, protocol.Published(0, 2, None, None, 0.0))
    receive(core, protocol.NoPeer(Reason("peer-none"), False))
    train_to(core, 39)
    receive(core, protocol.Pull(RoundId(0, 2, 1, 1)))
    train_to(core, 41)
    receive(core, protocol.Published(0, 3, 2, MergedUpTo(1, 2, 40, 40_000, 0), 0.0))
    train_to(core, 63)
    receive(core, protocol.Pull(RoundId(0, 3, 1, 1)))
    sent = [effect.envelope.body for effect in train_to(core, 64) if isinstance(effect, protocol.Send)]
    (contribution,) = (body for body in sent if isinstance(body, protocol.Contribution))
    return core, contribution


def receive(core: LearnerCore, body: protocol.SyncerBody) -> None:
    core.handle(
        core.state.now, protocol.MessageArrived(protocol.Envelope(1, 1, 1, 1, core.state.seen_tick + 1, 0, 0, body))
    )


def train_to(core: LearnerCore, step: int) -> list[protocol.LearnerEffect]:
    """Train up to a step, and return the effects of the last boundary."""
    effects: list[protocol.LearnerEffect] = []
    while core.state.step < step:
        effects = core.handle(core.state.now + 1.0, protocol.StepTaken(1, 1000, 1.0))
    return effects


@pytest.mark.parametrize("row", example_rows(TEXT), ids=lambda row: row["case"])
def test_the_worked_example_is_what_the_core_does(row):
    core, _ = learner_at_step_64(row["mode"])
    version, base, copied_at = map(int, re.findall(r"\d+", row["arrives with mark"]))
    adopted_at = int(row["adopted at step"])
    train_to(core, adopted_at - 1)
    receive(core, protocol.Published(0, version, None, MergedUpTo(1, base, copied_at, copied_at * 1000, 0), 0.0))
    effects = train_to(core, adopted_at)
    counts = [int(row[name]) for name in ("merged tokens", "dropped tokens", "pending tokens")]
    expected = protocol.AdoptFragment(0, version, row["mode"], row["merged copy"] == "yes", *counts)
    assert [effect for effect in effects if isinstance(effect, protocol.AdoptFragment)] == [expected]


def test_the_contribution_of_the_worked_example_is_what_the_core_sends():
    _, contribution = learner_at_step_64("carry")
    for name in ("copied_at", "steps", "tokens", "trained", "dropped"):
        assert f"`{name}` {getattr(contribution, name)}" in " ".join(section(TEXT, "Example").split())
    assert f"= {contribution_weight(contribution.tokens, contribution.steps):,.0f}." in section(TEXT, "Example")


def test_the_worked_example_has_all_its_cases():
    assert [row["case"] for row in example_rows(TEXT)] == ["merged", "missed", "refused", "overwritten"]


# --------------------------------------------------------------------------------------------------------------------
# docs/recovery.md


def unknown_of_the_faults(page: str) -> list[str]:
    """Return names in the table of faults that are neither a test nor a scenario."""
    tests = {
        name
        for path in ROOT.glob("tests/**/test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    rows = section(page, "Every fault, its test and its scenario").splitlines()
    cells = [name for row in rows if row.startswith("|") for name in re.findall(r"`([\w-]+)`", row)]
    return [name for name in cells if name not in tests | shipped_scenarios().keys()]


def test_tests_and_scenarios_of_every_fault_exist():
    page = (ROOT / "docs/recovery.md").read_text(encoding="utf-8")
    assert unknown_of_the_faults(page) == []
    assert set(shipped_scenarios()) - {"everything"} <= coded(section(page, "Every fault, its test and its scenario"))
    assert unknown_of_the_faults(page.replace("`kill-one`", "`kill-none`")) == ["kill-none"]


# --------------------------------------------------------------------------------------------------------------------
# Commands and options that pages and error messages name

OPTIONS = {
    name: {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    for name, command in ((name, build_command(name, each)) for name, each in COMMANDS.items())
}
GLOBAL_OPTIONS = set().union(*OPTIONS.values()) | {"--help", "--traceback", "--version"}
COMMAND = re.compile(r"(?<![\w./-])atoll ([a-z]+)((?:\\\n|[^\n`|;&#\")])*)")
OPTION = re.compile(r"(?<!var\()(?<![\w-])--[a-z][a-z0-9-]*(?![\w-]*:)")  # not a variable of a style sheet
FOREIGN_OPTIONS = {
    *("--nproc-per-node", "--max-restarts", "--logdir", "--head", "--object-store-memory", "--ray-client-server-port"),
    *("--name", "--user", "--format", "--job-name", "--chdir", "--output", "--nodes", "--cpus-per-task", "--signal"),
    *("--array", "--gres", "--log-file", "--socket", "--requeue", "--rewrite-vectors", "--pin", "--node"),
}
"""Options of torchrun, Ray, Slurm, TensorBoard, pytest and our examples."""


def unknown_commands(text: str) -> Iterator[str]:
    """Yield unknown commands of `atoll`, and unknown options and actions of known commands."""
    for command, rest in COMMAND.findall(text):
        if command not in OPTIONS:
            yield f"there is no command: atoll {command}"
            continue
        yield from (f"atoll {command} has no {flag}" for flag in OPTION.findall(rest) if flag not in OPTIONS[command])
        action = rest.split()[:1]
        if command == "keys" and action and action[0].isalpha() and action[0].islower() and action[0] not in ACTIONS:
            yield f"atoll keys has no {action[0]}"


def unknown_options(text: str) -> Iterator[str]:
    known = GLOBAL_OPTIONS | FOREIGN_OPTIONS
    yield from (f"there is no {flag}" for flag in OPTION.findall(text) if flag not in known)


def sentences(source: str) -> Iterator[str]:
    """Yield strings of a module with more than one word: messages, help and docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif id(node) in parts:
            continue
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_of_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))
    options = "\n".join(re.findall(r"`(--[^`]+)`", text)) if page.parent.name != "benchmarks" else ""
    assert [*unknown_commands(code), *unknown_options(options)] == []


def test_commands_and_options_of_error_messages_exist():
    found = [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for sentence in sentences(path.read_text(encoding="utf-8"))
        if sentence != "atoll authority X"  # the name in a certificate
        for problem in (*unknown_commands(sentence), *unknown_options(sentence))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("`atoll keys list DIR` shows it", "atoll keys has no list"),
        ("atoll sync --out runs/first", "there is no command: atoll sync"),
        ("atoll syncer --out RUN --lease-samples 5", "atoll syncer has no --lease-samples"),
        ("atoll syncer --out RUN \\\n  --advertise head:1", "atoll syncer has no --advertise"),
        ("give --lease-samples", "there is no --lease-samples"),
    ],
)
def test_planted_command_or_option_is_found(text, problem):
    assert problem in [*unknown_commands(text), *unknown_options(text)]
