"""Options that several commands share. An option that is not given is None if its default depends on other options."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from atoll.core.settings import Declared, Setting, declared_settings, make_settings

if TYPE_CHECKING:
    from atoll.cli.output import Result
    from atoll.reference.job_settings import JobSettings


def port_setting(help: str, flag: str = "port") -> Setting:
    """Return the setting of an option for a TCP port. All commands accept the same range."""
    return Setting(help, "PORT", flag, check=_check_port)


def _check_port(port: int | None) -> None:
    if port is not None and not 0 <= port <= 65535:
        raise ValueError(f"{port} is not a port; give a number from 0 to 65535 (0: a free port)")


TOKEN_SETTING = Setting(
    "Token that learners must present to join. Prefer the environment: other users can read a command line.",
    "SECRET",
    flag="token",
    envvar="ATOLL_TOKEN",
)
TokenOption = Annotated[str | None, TOKEN_SETTING]
KeysOption = Annotated[
    Path | None,
    Setting("Use TLS with this key: the directory that atoll keys add made.", "DIR", envvar="ATOLL_KEYS"),
]
CaOption = Annotated[
    Path | None,
    Setting(
        "Use TLS with the token and without a key: the authority of the syncer's certificate, in PEM. "
        "https://HOST:PORT alone trusts the authorities of this system.",
        "FILE",
    ),
]
LOG_FORMAT_SETTING = Setting(
    "Write logs as text, or as one JSON object per line with run, learner, incarnation, fragment and version.",
    "text|json",
    envvar="ATOLL_LOG_FORMAT",
)
LogFormatOption = Annotated[str, LOG_FORMAT_SETTING]
InitOption = Annotated[
    Path | None,
    Setting(
        "Start from the values of this checkpoint. It may be an output of atoll import, or any checkpoint that atoll "
        "import reads.",
        "FILE",
    ),
]


@contextmanager
def child_log_format(log_format: str) -> Iterator[None]:
    """Set the log format of child processes that are started in this context."""
    from atoll.logs import LOG_FORMAT_VARIABLE

    before = os.environ.get(LOG_FORMAT_VARIABLE)
    os.environ[LOG_FORMAT_VARIABLE] = log_format
    try:
        yield
    finally:
        del os.environ[LOG_FORMAT_VARIABLE]
        if before is not None:
            os.environ[LOG_FORMAT_VARIABLE] = before


def print_log_line(log_format: str, sentence: str) -> None:
    """Print one line to stderr in the format of the log."""
    if log_format != "json":
        print(sentence, file=sys.stderr, flush=True)
        return
    import logging

    logging.getLogger("atoll.command").info("%s", sentence)


_PUBLISHED_DEFAULTS = {"merge": "average", "outer_lr": 0.7, "outer_momentum": 0.9, "outer_ramp": 0}
_METHOD_DEFAULTS: dict[str, dict[str, Any]] = {
    "diloco": _PUBLISHED_DEFAULTS,
    "streaming": _PUBLISHED_DEFAULTS | {"adopt": "blend", "fragments": 4},
}
"""Defaults of methods that differ from the decoupled method."""

PROTOCOL_SETTINGS = {
    *("max_rate", "streams", "step_time_s", "speeds", "shards", "fragments", "every_steps", "overlap_steps", "quorum"),
    *("grace_margin", "snapshot_every", "adopt"),
}
"""Settings of a job for the protocol between learners and syncer. The other settings describe what is trained."""


def is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def option_flag(context: typer.Context, name: str) -> str:
    """Return the option that sets this parameter of the command."""
    return next(each.opts[0] for each in context.command.params if each.name == name)


def reject_options_with_resume(context: typer.Context, allowed: set[str], flag: str = "--resume") -> None:
    """Raise `ValueError` for an option that would be ignored, because a resumed run keeps its settings."""
    ignored = sorted(name for name in context.params if name not in allowed and is_given(context, name))
    if ignored:
        raise ValueError(
            f"{option_flag(context, ignored[0])} has no effect with {flag}: the run keeps its settings; omit it"
        )


def make_job(given: Mapping[str, Any]) -> JobSettings:
    """Return the job that these options describe.

    Args:
        given: Values by name of setting. None means that the option was not given.
    """
    from dataclasses import asdict

    from atoll.reference.job_settings import ADAMW_BETA2, ADAMW_LR, ADAMW_NUMERICS, JobSettings, PlannedKill

    method = given.get("method") or "decoupled"
    values: dict[str, Any] = {}
    if given.get("inner") == "adamw":
        values = {"lr": ADAMW_LR, "beta2": ADAMW_BETA2} | asdict(ADAMW_NUMERICS)
    values |= _METHOD_DEFAULTS.get(method, {})
    values |= {name: value for name, value in given.items() if value is not None}
    for each in declared_settings(JobSettings):
        if each.setting.parse is not None and each.name in values:
            values[each.name] = each.setting.parse(values[each.name])
    if "kills" in values:
        values["kills"] = tuple(PlannedKill.parse(each) for each in values["kills"])
    if method == "single":
        values.setdefault("learners", 1)
    return make_settings(JobSettings, values)


# --------------------------------------------------------------------------------------------------------------------
# Options that are derived from a dataclass of settings


@dataclass(frozen=True, slots=True)
class DataclassOptions:
    """Mark a parameter of a command as a dataclass, with one option per setting."""

    dataclass_path: str  # module:class, imported when the command is built
    only: Collection[str] = ()  # names of settings; empty: all that have a help text
    as_dict: bool = False  # pass the values by name, for a command that adds others before it makes the dataclass


@dataclass(frozen=True, slots=True)
class DerivedOptions:
    """Mark a parameter of a command as a dict of options by name of setting. None: the option was not given."""

    parameters: Callable[[], Sequence[Parameter]]


def expand_options(run: Callable[..., Result | None]) -> Callable[..., Result | None]:
    """Return the command with one Typer option for each of its settings."""
    flat: list[Parameter] = []
    makers: list[Callable[[dict[str, Any]], None]] = []
    for name, each in signature(run, eval_str=True).parameters.items():
        mark = getattr(each.annotation, "__metadata__", (None,))[0]
        options: Sequence[Parameter] = [each]
        if isinstance(mark, Setting):
            default = MISSING if each.default is Parameter.empty else each.default
            options = [make_option(Declared(name, mark, each.annotation.__origin__, default))]
        elif isinstance(mark, DerivedOptions):
            options = mark.parameters()
            makers.append(partial(_collect, name, options))
        elif isinstance(mark, DataclassOptions):
            dataclass_type = resolve_name(mark.dataclass_path)
            only = mark.only or {each.name for each in declared_settings(dataclass_type)}
            declared = [each for each in declared_settings(dataclass_type) if each.setting.help and each.name in only]
            options = [make_option(each, checked_by_dataclass=True) for each in declared]
            makers.append(
                partial(
                    _make_dataclass, name, dict if mark.as_dict else partial(make_settings, dataclass_type), declared
                )
            )
        flat += options

    @wraps(run)
    def expanded(**values: Any) -> Result | None:
        for maker in makers:
            maker(values)
        return run(**values)

    expanded.__signature__ = Signature(  # type: ignore[attr-defined]
        [each.replace(kind=Parameter.KEYWORD_ONLY) for each in flat]
    )
    return expanded


def _collect(name: str, options: Sequence[Parameter], values: dict[str, Any]) -> None:
    values[name] = {each.name: values.pop(each.name) for each in options}


def _make_dataclass(
    name: str, make: Callable[[Mapping[str, Any]], Any], declared: Sequence[Declared], values: dict[str, Any]
) -> None:
    given: dict[str, Any] = {}
    for each in declared:
        value, parse = values.pop(each.name), each.setting.parse
        if parse is None:
            given[each.name] = value
        elif value is not None:
            given[each.name] = tuple(map(parse, value)) if each.setting.repeated else parse(value)
    values[name] = make(given)


def make_option(declared: Declared, checked_by_dataclass: bool = False) -> Parameter:
    """Return the parameter of a command for this setting. Typer checks its bounds, unless a dataclass does."""
    setting, flag, default = declared.setting, declared.flag, declared.default
    kind: Any = str if get_origin(declared.type) is Literal else declared.type
    if setting.parse is not None:
        kind = list[str] | None if setting.repeated else str | None
        default = None if setting.show is None else setting.show(default)
    flags = [f"{flag}/{flag[:2]}no-{flag[2:]}" if bool in (kind, *get_args(kind)) and default is not False else flag]
    flags += [] if setting.short is None else [setting.short]
    text = f"{setting.help} [default: {setting.default_text}]" if setting.default_text else setting.help
    callback = None if setting.check is None else _make_callback(setting.check)
    option = typer.Option(
        *flags,
        callback=callback,
        metavar=setting.metavar or None,
        help=text or None,
        min=None if checked_by_dataclass else setting.min,
        max=None if checked_by_dataclass else setting.max,
        envvar=setting.envvar,
        hidden=setting.hidden,
    )
    shown = Parameter.empty if default is MISSING else default
    return Parameter(declared.name, Parameter.KEYWORD_ONLY, default=shown, annotation=Annotated[kind, option])


def _make_callback(check: Callable[[Any], None]) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        try:
            check(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return value

    return checked


def _make_job_option(declared: Declared, default_text: str) -> Parameter:
    """Return the parameter of a command for a setting of a job. Its value is None if the option is not given."""
    kind = next(k for k in (bool, int, float, str) if k is str or _accepts_type(declared.type, k))
    setting = replace(declared.setting, default_text=default_text, show=None)
    return make_option(Declared(declared.name, setting, kind | None, None), checked_by_dataclass=True)


def _accepts_type(hint: Any, kind: type) -> bool:
    """Return whether the type hint is `kind` or a union that contains it."""
    return kind in (hint, *get_args(hint))


def _make_job_parameters(
    only: Collection[str] = (), left_out: Collection[str] = (), default: str | None = None
) -> list[Parameter]:
    """Derive the options of a job. Their help names the defaults of other methods and of AdamW if they differ.

    Args:
        only: Names of the settings to include; empty: all.
        left_out: Names of the settings to leave out.
        default: Text for the default of every option, if another process chooses it.
    """
    from atoll.reference.job_settings import JobSettings

    def defaults(job: JobSettings) -> dict[str, Any]:
        return {each.name: getattr(job if hasattr(job, each.name) else job.numerics, each.name) for each in declared}

    declared = [each for each in declared_settings(JobSettings) if each.setting.help]
    declared = [each for each in declared if each.name not in left_out and each.name in (only or (each.name,))]
    cases = {"with --inner adamw": defaults(make_job({"inner": "adamw"}))}
    cases |= {method: defaults(make_job({"method": method})) for method in _METHOD_DEFAULTS}

    def default_text(each: Declared) -> str:
        if each.setting.default_text is not None:
            return each.setting.default_text
        others: dict[str, list[str]] = {}
        for case, values in cases.items():
            if values[each.name] != each.default:
                others.setdefault(each.shown_default(values[each.name]), []).append(case)
        parts = [f"{' and '.join(names)}: {value}" for value, names in others.items()]
        return "; ".join([each.shown_default(each.default), *parts])

    return [_make_job_option(each, default_text(each) if default is None else default) for each in declared]


JobOptions = Annotated[dict[str, Any], DerivedOptions(_make_job_parameters)]
TrainedModelOptions = Annotated[
    dict[str, Any], DerivedOptions(partial(_make_job_parameters, left_out=PROTOCOL_SETTINGS))
]
"""Options of a job without the settings of the protocol."""
LinkOptions = Annotated[
    dict[str, Any],
    DerivedOptions(partial(_make_job_parameters, only=("max_rate", "streams"), default="from the run")),
]
"""Options of a job that depend on the network link of one learner."""
