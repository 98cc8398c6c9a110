"""Options that several commands share. An option that is not given is None where its default depends on others."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
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

Seed = Annotated[int, typer.Option("--seed", metavar="S", help="Fixes the initial model and the order of the data.")]
Init = Annotated[
    Path | None,
    typer.Option(
        "--init",
        metavar="FILE",
        help="Start from this checkpoint: every learner begins with its values. One of atoll import, or anything that "
        "it reads.",
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="N",
        help="To train on, all learners together: 500k or 20M. [default: 0.8M]",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="SIZE",
        help="Parameters of the byte-level GPT: 100k, 360k, 1m, 5m, 10m; or moe. [default: 1m]",
    ),
]
Experts = Annotated[
    int | None,
    typer.Option(
        "--experts",
        metavar="N",
        help="Make it a mixture of so many experts, two per token. [default: 0]",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="N",
        help="Tokens of one sequence. [default: by the model]",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="A folder of text, a text file or a token file (.bin, .npy). "
        "[default: the sources of Python's standard library]",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="B",
        help="Sequences in one step of one learner. [default: 8]",
    ),
]
Inner = Annotated[
    str | None,
    typer.Option(
        "--inner",
        metavar="NAME",
        help="Optimizer of the inner steps: muon, adamw or sgd. [default: muon]",
    ),
]
Lr = Annotated[
    float | None,
    typer.Option(
        "--lr",
        metavar="RATE",
        help="Highest learning rate of the inner steps. [default: 0.012; with --inner adamw: 0.004]",
    ),
]
Beta2 = Annotated[
    float | None,
    typer.Option(
        "--beta2",
        metavar="BETA",
        help="Second beta of AdamW inside. [default: 0.95; with --inner adamw: 0.99]",
    ),
]
EvalTokens = Annotated[
    int | None,
    typer.Option(
        "--eval-tokens",
        metavar="N",
        help="Held-out tokens that judge the final model. [default: 65536]",
    ),
]
Shards = Annotated[
    int | None,
    typer.Option(
        "--shards",
        metavar="N",
        help="Processes that hold the fragments, merge and serve them beside the syncer. [default: 0]",
    ),
]
Fragments = Annotated[
    int | None,
    typer.Option(
        "--fragments",
        metavar="P",
        help="Fragments of the model. [default: 24; streaming: 4]",
    ),
]
Every = Annotated[
    int | None,
    typer.Option("--every", metavar="H", help="Steps between two exchanges of the same fragment. [default: 24]"),
]
Tau = Annotated[
    int | None, typer.Option("--tau", metavar="TAU", help="Steps under which one exchange is hidden. [default: 4]")
]
Quorum = Annotated[
    int | None, typer.Option("--quorum", metavar="K", help="Contributions that a merge needs. [default: 1]")
]
Grace = Annotated[
    float | None,
    typer.Option(
        "--grace",
        metavar="GAMMA",
        help="Share of the slack to wait for more; 0: off. [default: 0.9]",
    ),
]
SnapshotEvery = Annotated[
    int | None,
    typer.Option(
        "--snapshot-every",
        metavar="N",
        help="Merges between two snapshots of the whole run; 0: only on request. [default: 10 of each fragment]",
    ),
]
Adopt = Annotated[
    str | None,
    typer.Option(
        "--adopt",
        metavar="HOW",
        help="carry keeps steps that are not merged; overwrite and blend do not. [default: carry; streaming: blend]",
    ),
]
Merge = Annotated[
    str | None,
    typer.Option(
        "--merge",
        metavar="HOW",
        help="average; radial: mean direction and mean length apart; trimmed: per value without the smallest and the "
        "largest, against a learner gone wild. [default: average; with --inner adamw: radial]",
    ),
]
NormClip = Annotated[
    float | None,
    typer.Option(
        "--norm-clip",
        metavar="C",
        help="Scale contributions down to C times their usual size; 0: never. [default: 0]",
    ),
]
Plan = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="HOW",
        help="Fragments balanced, by layers or by rows. [default: balanced]",
    ),
]
Outer = Annotated[
    str | None,
    typer.Option(
        "--outer",
        metavar="NAME",
        help="Outer optimizer: nesterov, sgd, adam or torch's name. [default: nesterov]",
    ),
]
OuterLr = Annotated[
    float | None,
    typer.Option(
        "--outer-lr",
        metavar="RATE",
        help="Its learning rate. [default: 0.7; with --inner adamw: 0.4]",
    ),
]
OuterMomentum = Annotated[
    float | None,
    typer.Option(
        "--outer-momentum",
        metavar="MU",
        help="Its momentum. [default: 0.6; with --inner adamw: 0.85; diloco and streaming: 0.9]",
    ),
]
OuterRamp = Annotated[
    int | None,
    typer.Option(
        "--outer-ramp",
        metavar="MERGES",
        help="Merges of a fragment in which both rise from plain averaging. [default: 0; with --inner adamw: 20]",
    ),
]
OuterBreadth = Annotated[
    bool | None,
    typer.Option(
        "--outer-breadth/--no-outer-breadth",
        help="A merge from which learners are missing is a smaller step. [default: True]",
    ),
]
Up = Annotated[
    str | None,
    typer.Option(
        "--up",
        metavar="CODEC",
        help="How deltas travel to the syncer: f32, bf16, int8 or int4; auto: bf16, and int8 or int4 while a learner's "
        "link does not carry that. [default: auto]",
    ),
]
Down = Annotated[
    str | None,
    typer.Option(
        "--down",
        metavar="CODEC",
        help="How updates travel back, the same; auto: by the link of the learner in the middle. [default: auto]",
    ),
]
MaxRate = Annotated[
    str | None,
    typer.Option(
        "--max-rate",
        metavar="RATE",
        help="Most that values take of a learner's link, each way: 2gbit, 500mbit, 10MB/s. [default: no bound]",
    ),
]
Streams = Annotated[
    int | None,
    typer.Option(
        "--streams",
        metavar="N",
        help="Connections over which a large value goes, from 1 to 16. [default: 4]",
    ),
]
StepTime = Annotated[
    str | None,
    typer.Option(
        "--step-time",
        metavar="TIME",
        help="A step takes at least this long, 50ms or 0.05s: unequal accelerators on a few cores.",
    ),
]
Speeds = Annotated[
    str | None,
    typer.Option("--speeds", metavar="LIST", help="Speed of each learner beside --step-time, as in 1,1,0.5,0.8."),
]

# --------------------------------------------------------------------------------------------------------------------
# What they become

_PUBLISHED = {"merge": "average", "outer_lr": 0.7, "outer_momentum": 0.9, "outer_ramp": 0}
_OF_METHOD: dict[str, dict[str, Any]] = {
    "diloco": _PUBLISHED,
    "streaming": _PUBLISHED | {"adopt": "blend", "fragments": 4},
}
"""Where a method is better off with another default than the decoupled one."""

SHARED = (
    "tokens",
    "model",
    "experts",
    "context_tokens",
    "data",
    "batch",
    "inner",
    "lr",
    "beta2",
    "max_rate",
    "streams",
    "step_time",
    "speeds",
    "shards",
    "fragments",
    "every",
    "tau",
    "quorum",
    "grace",
    "snapshot_every",
    "adopt",
    "merge",
    "norm_clip",
    "plan",
    "outer",
    "outer_lr",
    "outer_momentum",
    "outer_ramp",
    "outer_breadth",
    "up",
    "down",
    "eval_tokens",
)
"""Names of the parameters that `train` and `syncer` have."""

PROTOCOL = (
    "max_rate",
    "streams",
    "step_time",
    "speeds",
    "shards",
    "fragments",
    "every",
    "tau",
    "quorum",
    "grace",
    "snapshot_every",
    "adopt",
)
"""Those of them that say how learners and syncer work together; the rest says what is trained."""

FLAGS = {"context_tokens": "context"}
"""Parameters whose flag is another word."""

RENAMED = {  # parameters whose setting is called otherwise
    "context_tokens": "context",
    "every": "every_steps",
    "tau": "overlap_steps",
    "grace": "grace_margin",
    "step_time": "step_time_s",
}


def is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_with_resume(context: typer.Context, allowed: set[str], word: str = "--resume") -> None:
    """Whoever gives an option believes that it matters; a run that goes on has settings of its own."""
    ignored = sorted(name for name in context.params if name not in allowed and is_given(context, name))
    if ignored:
        flag = "--" + FLAGS.get(ignored[0], ignored[0]).replace("_", "-")
        raise ValueError(f"{flag} means nothing with {word}: a run goes on by its own settings")


def make_settings(given: dict[str, Any]) -> JobSettings:
    """The job that these options describe; those that are None were not given."""
    from dataclasses import asdict, replace

    from atoll.reference.job_settings import ADAMW_BETA2, ADAMW_LR, FOR_ADAMW, JobSettings, Kill

    method = given.get("method") or "decoupled"
    values: dict[str, Any] = {}
    if given.get("inner") == "adamw":
        values = {"lr": ADAMW_LR, "beta2": ADAMW_BETA2} | asdict(FOR_ADAMW)
    values |= _OF_METHOD.get(method, {})
    values |= {name: value for name, value in given.items() if value is not None}
    if "tokens" in values:
        values["tokens"] = read_count("--tokens", values["tokens"])
    if "step_time" in values:
        values["step_time"] = read_seconds("--step-time", values["step_time"])
    if "speeds" in values:
        values["speeds"] = read_speeds(values["speeds"])
    if "kills" in values:
        values["kills"] = tuple(Kill.parse(each) for each in values["kills"])
    if "data" in values:
        values["data"] = str(Path(values["data"]).absolute())
    if method == "single":
        values.setdefault("learners", 1)
    numeric = {name: values.pop(name) for name in asdict(FOR_ADAMW) if name in values}
    values = {RENAMED.get(name, name): value for name, value in values.items()}
    return JobSettings(**values, numerics=replace(JobSettings().numerics, **numeric))


def read_count(option: str, text: str) -> int:
    """
    >>> read_count("--tokens", "1.5M"), read_count("--tokens", "1_000")
    (1500000, 1000)
    """
    found = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)\s*([kKmMgG]?)", text.strip())
    if found is None:
        raise ValueError(f"{option} {text!r} is not a count; give one such as 2000000, 500k or 20M")
    factor = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[found[2].lower()]
    return round(float(found[1].replace("_", "")) * factor)


def read_seconds(option: str, text: str) -> float:
    """
    >>> read_seconds("--step-time", "50ms"), read_seconds("--step-time", "0.2")
    (0.05, 0.2)
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)?", text.strip())
    if found is None:
        raise ValueError(f"{option} {text!r} is not a time; give one such as 50ms or 0.05s")
    return float(found[1]) / (1000.0 if found[2] == "ms" else 1.0)


def read_speeds(text: str) -> tuple[float, ...]:
    """
    >>> read_speeds("1,1,0.5x2")
    (1.0, 1.0, 0.5, 0.5)
    """
    speeds: list[float] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:x\s*(\d{1,4}))?\s*", part)
        if found is None:
            raise ValueError(
                f"--speeds {text!r} is not understood; give a speed per learner, as in 1,1,0.5,0.8 or 1x4,0.5x4"
            )
        speeds += [float(found[1])] * int(found[2] or 1)
    return tuple(speeds)
