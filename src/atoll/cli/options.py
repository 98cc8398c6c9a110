"""Options that several commands share. An option that is not given is None where its default depends on others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

if TYPE_CHECKING:
    from atoll.cli.output import Result
    from atoll.core.settings import Declared
    from atoll.reference.job_settings import JobSettings


def port_option(flag: str, help: str) -> Any:
    """Declare an option for a TCP port. All commands refuse the same numbers."""
    return typer.Option(flag, metavar="PORT", callback=_check_port, help=help)


def _check_port(port: int | None) -> int | None:
    if port is not None and not 0 <= port <= 65535:
        raise typer.BadParameter(f"{port} is not a port; give a number from 0 to 65535 (0: a free port)")
    return port


Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="ATOLL_TOKEN",
        metavar="SECRET",
        help="What learners must know to take part. Better in the environment: others can read a command line.",
    ),
]

Keys = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        envvar="ATOLL_KEYS",
        metavar="DIR",
        help="TLS with this key, as atoll keys add has made it: the directory of one key.",
    ),
]

Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        metavar="FILE",
        help="TLS, with the token and without a key: the authority of the syncer's certificate, in PEM. "
        "https://HOST:PORT alone trusts those of this system.",
    ),
]


LogFormat = Annotated[
    str,
    typer.Option(
        "--log-format",
        envvar="ATOLL_LOG_FORMAT",
        metavar="text|json",
        help="Logs for people, or a JSON object per line that names run, learner, incarnation, fragment and version.",
    ),
]


@contextmanager
def of_children(log_format: str) -> Iterator[None]:
    """Processes that are started meanwhile write their logs so."""
    from atoll.logs import VARIABLE

    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = log_format
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def say(log_format: str, sentence: str) -> None:
    """One line on stderr between those of the log, and in its format."""
    if log_format != "json":
        print(sentence, file=sys.stderr, flush=True)
        return
    import logging

    logging.getLogger("atoll.command").info("%s", sentence)


# --------------------------------------------------------------------------------------------------------------------
# Options

Init = Annotated[
    Path | None,
    typer.Option(
        "--init",
        metavar="FILE",
        help="Start from this checkpoint: every learner begins with its values. One of atoll import, or anything that "
        "it reads.",
    ),
]
# --------------------------------------------------------------------------------------------------------------------
# What they become

_PUBLISHED = {"merge": "average", "outer_lr": 0.7, "outer_momentum": 0.9, "outer_ramp": 0}
_OF_METHOD: dict[str, dict[str, Any]] = {
    "diloco": _PUBLISHED,
    "streaming": _PUBLISHED | {"adopt": "blend", "fragments": 4},
}
"""Where a method is better off with another default than the decoupled one."""

PROTOCOL = {
    *("max_rate", "streams", "step_time_s", "speeds", "shards", "fragments", "every_steps", "overlap_steps", "quorum"),
    *("grace_margin", "snapshot_every", "adopt"),
}
"""Settings of a job that say how learners and syncer work together; the rest says what is trained."""


def is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def flag_of(context: typer.Context, name: str) -> str:
    """Return the option that sets this parameter of the command."""
    return next(each.opts[0] for each in context.command.params if each.name == name)


def refuse_with_resume(context: typer.Context, allowed: set[str], word: str = "--resume") -> None:
    """Whoever gives an option believes that it matters; a run that goes on has settings of its own."""
    ignored = sorted(name for name in context.params if name not in allowed and is_given(context, name))
    if ignored:
        raise ValueError(f"{flag_of(context, ignored[0])} means nothing with {word}: a run goes on by its own settings")


def make_settings(given: Mapping[str, Any]) -> JobSettings:
    """Return the job that these options describe, by the names of settings; those that are None were not given."""
    from dataclasses import asdict, replace

    from atoll.core.settings import declared_settings
    from atoll.reference.job_settings import ADAMW_BETA2, ADAMW_LR, FOR_ADAMW, JobSettings, Kill

    method = given.get("method") or "decoupled"
    values: dict[str, Any] = {}
    if given.get("inner") == "adamw":
        values = {"lr": ADAMW_LR, "beta2": ADAMW_BETA2} | asdict(FOR_ADAMW)
    values |= _OF_METHOD.get(method, {})
    values |= {name: value for name, value in given.items() if value is not None}
    for each in declared_settings(JobSettings):
        if each.setting.parse is not None and each.name in values:
            values[each.name] = each.setting.parse(values[each.name])
    if "kills" in values:
        values["kills"] = tuple(Kill.parse(each) for each in values["kills"])
    if method == "single":
        values.setdefault("learners", 1)
    numeric = {name: values.pop(name) for name in asdict(FOR_ADAMW) if name in values}
    return JobSettings(**values, numerics=replace(JobSettings().numerics, **numeric))


# --------------------------------------------------------------------------------------------------------------------
# Options that are derived from a dataclass of settings


@dataclass(frozen=True, slots=True)
class DerivedOptions:
    """Mark a parameter of a command as a dict of options, by the name of their setting."""

    parameters: Callable[[], Sequence[Parameter]]


def expand(run: Callable[..., Result | None]) -> Callable[..., Result | None]:
    """Return the command with the options in place of the parameters that `DerivedOptions` marks."""
    parameters = signature(run, eval_str=True).parameters
    derived = {
        name: mark.parameters()
        for name, each in parameters.items()
        for mark in getattr(each.annotation, "__metadata__", ())
        if isinstance(mark, DerivedOptions)
    }

    @wraps(run)
    def expanded(**values: Any) -> Result | None:
        for name, options in derived.items():
            values[name] = {each.name: values.pop(each.name) for each in options}
        return run(**values)

    flat = [option for name, each in parameters.items() for option in derived.get(name, (each,))]
    expanded.__signature__ = Signature(  # type: ignore[attr-defined]
        [each.replace(kind=Parameter.KEYWORD_ONLY) for each in flat]
    )
    return expanded


def option_of(declared: Declared, default_text: str) -> Parameter:
    """Return the parameter of a command for this setting. It is None where the option is not given."""
    setting, flag = declared.setting, declared.flag
    kind = str if setting.parse is not None else next(k for k in (bool, int, float, str) if _is_of(declared.type, k))
    words = f"{flag}/{flag[:2]}no-{flag[2:]}" if kind is bool else flag
    text = f"{setting.help} [default: {default_text}]" if default_text else setting.help
    option = typer.Option(words, metavar=setting.metavar or None, help=text)
    return Parameter(declared.name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def _is_of(hint: Any, kind: type) -> bool:
    """Say whether values of this type, or of this type and None, are of this kind. A literal is text."""
    members = get_args(hint) or (hint,)
    return kind in members or (kind is str and isinstance(members[0], str))


def _job_parameters(left_out: Collection[str] = ()) -> list[Parameter]:
    """Derive the options of a job. Their help names the defaults of other methods and of AdamW where they differ."""
    from atoll.core.settings import declared_settings
    from atoll.reference.job_settings import JobSettings

    def defaults(job: JobSettings) -> dict[str, Any]:
        return {each.name: getattr(job if hasattr(job, each.name) else job.numerics, each.name) for each in declared}

    declared = [each for each in declared_settings(JobSettings) if each.setting.help and each.name not in left_out]
    cases = {"with --inner adamw": defaults(make_settings({"inner": "adamw"}))}
    cases |= {method: defaults(make_settings({"method": method})) for method in _OF_METHOD}

    def default_text(each: Declared) -> str:
        if each.setting.default_text is not None:
            return each.setting.default_text
        others: dict[str, list[str]] = {}
        for case, values in cases.items():
            if values[each.name] != each.default:
                others.setdefault(each.shown_default(values[each.name]), []).append(case)
        parts = [f"{' and '.join(names)}: {value}" for value, names in others.items()]
        return "; ".join([each.shown_default(each.default), *parts])

    return [option_of(each, default_text(each)) for each in declared]


JobOptions = Annotated[dict[str, Any], DerivedOptions(_job_parameters)]
TrainedModelOptions = Annotated[dict[str, Any], DerivedOptions(partial(_job_parameters, PROTOCOL))]
"""Options of a job without those of its protocol."""
