"""`atoll syncer`: the syncer of a run whose learners are anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.commands import job_options as options
from atoll.commands.output import JsonOption, complain, print_json

if TYPE_CHECKING:
    from atoll.train.job_settings import JobSettings

EXAMPLE = "atoll syncer --host 0.0.0.0 --out runs/two-hosts"

Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="ATOLL_TOKEN",
        metavar="SECRET",
        help="What learners must know to take part. Better in the environment: others can read a command line.",
    ),
]


# long: the list of options, with what each one means
def run(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Directory of the run: every durable version, tape, model.")
    ],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that --out holds.")] = False,
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Address to listen on; beyond this machine it needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT", help="Port to listen on; 0: any.")] = 7400,
    token: Token = None,
    learners: Annotated[
        int | None,
        typer.Option("--learners", metavar="M", help="Learners among which the data is divided. [default: 4]"),
    ] = None,
    tokens: options.Tokens = None,
    model: options.Model = None,
    experts: options.Experts = None,
    context_tokens: options.Context = None,
    data: options.Data = None,
    batch: options.Batch = None,
    seed: options.Seed = 0,
    inner: options.Inner = None,
    lr: options.Lr = None,
    step_time: options.StepTime = None,
    speeds: options.Speeds = None,
    fragments: options.Fragments = None,
    every: options.Every = None,
    tau: options.Tau = None,
    quorum: options.Quorum = None,
    grace: options.Grace = None,
    snapshot_every: options.SnapshotEvery = None,
    adopt: options.Adopt = None,
    merge: options.Merge = None,
    plan: options.Plan = None,
    outer: options.Outer = None,
    outer_lr: options.OuterLr = None,
    outer_momentum: options.OuterMomentum = None,
    up: options.Up = None,
    down: options.Down = None,
    eval_tokens: options.EvalTokens = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a run to learners on any machine that can reach this one.

    Learners dial in by themselves (atoll learner), take the job from here, and may come and go. The syncer trains
    nothing: it merges what they send, and makes every version durable before anybody sees it. Stop it when you like,
    and go on with --resume. docs/several-hosts.md shows two hosts step by step. Without a token it listens to this
    machine only.
    """
    from atoll.net.serving import check_access
    from atoll.train.job_settings import CONFIG, JobSettings, check_new

    token = token or None  # an empty variable is no token
    check_access(host, token)
    if resume:
        options.refuse_with_resume(context, {"out", "resume", "host", "port", "token", "as_json"})
        if not (out / CONFIG).is_file():
            raise ValueError(f"{out} holds no run (it has no {CONFIG}): leave --resume out to start one")
        settings = JobSettings.load(out / CONFIG)
    else:
        given = {"learners": learners, "seed": seed, **{name: context.params[name] for name in options.SHARED}}
        settings = options.make_settings(given)
        check_new(out)
        out.mkdir(parents=True, exist_ok=True)
        settings.save(out / CONFIG)
    _serve(out, settings, host, port, token, as_json)


def _serve(out: Path, settings: JobSettings, host: str, port: int, token: str | None, as_json: bool) -> None:
    import contextlib
    import logging
    import sys

    import torch

    from atoll.net.serving import serve_syncer
    from atoll.train.model_file import load_model, save_tensors
    from atoll.train.published import is_finished, published_tensors
    from atoll.train.supervisor import new_run_id, run_of

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(message)s")
    logging.getLogger("atoll.syncer").setLevel(logging.INFO)
    torch.set_num_threads(1)

    def told(address: str) -> None:
        print(f"The syncer listens on {address}.")
        port = address.rpartition(":")[2]
        print(f"On each island: atoll learner --syncer HOST:{port}")
        print(f'Or in a loop of your own: atoll.Learner(model, optimizer, syncer="HOST:{port}")')
        sys.stdout.flush()

    was_finished = is_finished(out)
    on_ready = None if as_json else told
    finished = was_finished or serve_syncer(out, run_of(settings, new_run_id(out)), host, port, token, on_ready)
    if not finished:
        complain(f"stopped before the end; learners train on and wait for: atoll syncer --out {out} --resume")
        raise KeyboardInterrupt
    path = save_tensors(published_tensors(out), out)  # of whatever the learners train: it need not be our model
    if as_json:
        print_json({"finished": True, "model": str(path)})
        return
    print(f"The run in {out} {'was finished before' if was_finished else 'is finished'}; its model is {path}.")
    with contextlib.suppress(ValueError):  # learners with loops of their own train models of their own
        load_model(out)
        print(f'Ask it: atoll generate {out} "def main():"')
