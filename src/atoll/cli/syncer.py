"""`atoll syncer` and `atoll shard`: merge the contributions of learners on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.dash import DashboardOptions, DashOption, DashPortOption, DashRulesOption, dashboard_process
from atoll.cli.options import KeysOption, LogFormatOption, TokenOption, print_log_line
from atoll.cli.output import ExitCode, JsonOption, Result, print_to_stderr
from atoll.core.settings import Setting, check_settings, setting

if TYPE_CHECKING:
    from socket import socket

    from atoll.reference.job_settings import JobSettings
    from atoll.syncer.process import SyncerProcess
    from atoll.transport.tls import KeyFiles


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options for serving a run. They are not settings of the run: give them again with --resume."""

    host: str = setting("127.0.0.1", "Address to listen on. Beyond this machine it needs keys.", "HOST")
    port: int = setting(7400, options.port_setting("Port to listen on; 0: a free one."))
    token: str | None = setting(None, options.TOKEN_SETTING)
    keys: Path | None = setting(
        None,
        "Use TLS with the syncer's key, which atoll keys init made. Learners need a key of the same authority, and also"
        " the token if one is set.",
        "DIR",
    )
    certificate: Path | None = setting(None, "Use TLS with this certificate, in PEM. Learners need the token.", "FILE")
    private_key: Path | None = setting(None, "Private key of --certificate, in PEM.", "FILE")
    plain_text: bool = setting(
        False,
        "Listen beyond this machine without TLS. Everyone on the network can read and change all traffic: use it only"
        " on isolated networks.",
    )
    serve_end: float = setting(
        600.0,
        "After the end of the run, keep serving for this time while learners have not received the end. With --resume,"
        " also for a finished run.",
        "SECONDS",
        min=0.0,
    )
    log_format: str = setting("text", options.LOG_FORMAT_SETTING)

    def __post_init__(self) -> None:
        check_settings(self)

    def key_files(self) -> KeyFiles | None:
        from atoll.transport.tls import KeyFiles, find_key_files

        if self.keys is not None:
            if self.certificate is not None or self.private_key is not None:
                raise ValueError("--keys includes a certificate: omit --certificate and --private-key")
            return find_key_files(self.keys, for_syncer=True)
        if self.certificate is None and self.private_key is None:
            return None
        if self.certificate is None or self.private_key is None:
            raise ValueError("--certificate needs --private-key and vice versa: give both")
        return KeyFiles(self.certificate, self.private_key)


REPEATED_ON_RESUME = {*(each.name for each in fields(ServeOptions)), "dash", "dash_port", "rules", "as_json"}
"""Options that must be given again when a syncer resumes a run."""

ALLOWED_ON_RESUME = REPEATED_ON_RESUME | {"out", "resume", "standby", "take_over_after"}
"""Options that are allowed with --resume, because they are not settings of the run."""

TOKEN_MARKER_FILE = "token-required"
"""File in the directory of a run whose syncer was started with a token."""


# long: the options with their help
def run_syncer(
    ctx: typer.Context,
    out: Annotated[Path, Setting("Directory of the run: versions, tape, model.", "DIR")],
    resume: Annotated[bool, Setting("Resume the run in --out.")] = False,
    or_resume: Annotated[
        bool, Setting("Start a run if --out has none, otherwise resume it with its own settings. For supervisors.")
    ] = False,
    standby: Annotated[
        bool, Setting("Wait until the syncer of the run in --out has exited or stalled, then take over.")
    ] = False,
    take_over_after: Annotated[
        float, Setting("For --standby: time without a heartbeat before the takeover. At least 3.", "SECONDS", min=3.0)
    ] = 15.0,
    init: options.InitOption = None,
    learners: Annotated[int | None, Setting("Number of learners that share the data. [default: 4]", "M")] = None,
    *,
    serving: Annotated[ServeOptions, options.DataclassOptions("atoll.cli.syncer:ServeOptions")],
    job: options.JobOptions,
    dash: DashOption = False,
    dash_port: DashPortOption = None,
    rules: DashRulesOption = None,
    as_json: JsonOption = False,
) -> Result:
    """Serve a run to learners on any machine that can reach this one.

    Learners connect to it (atoll learner), download the settings of the job, and may join and leave at any time. The
    syncer does not train. It merges contributions, and makes every version durable before it publishes it. It can be
    stopped at any time; continue with --resume. A second syncer with --standby on the same directory, here or on a
    machine that shares it, takes over automatically; give both addresses to the learners. docs/several-hosts.md shows
    two hosts step by step, docs/recovery.md explains recovery. Without keys (atoll keys init) it listens on this
    machine only.
    """
    from atoll.logs import check_log_format
    from atoll.reference.job_settings import JobSettings
    from atoll.reference.loop import model_config
    from atoll.store.run_settings import CONFIG_FILE, check_is_new_run
    from atoll.transport.auth import check_access
    from atoll.transport.listener import bind_socket
    from atoll.transport.tls import ServerTls

    token = serving.token or None  # an empty environment variable means no token
    files = serving.key_files()
    check_access(serving.host, token, ServerTls(files) if files is not None else None, serving.plain_text)
    check_log_format(serving.log_format)
    page = DashboardOptions(dash, dash_port, rules)
    page.check()
    if options.is_given(ctx, "take_over_after") and not standby:
        raise ValueError("--take-over-after has no effect without --standby")
    if or_resume and (resume or standby):
        raise ValueError("--or-resume has no effect with --resume or --standby: omit one of them")
    is_new = False
    if resume or standby:
        options.reject_options_with_resume(ctx, ALLOWED_ON_RESUME)
        if not (out / CONFIG_FILE).is_file():
            raise ValueError(f"{out} has no run (no {CONFIG_FILE}): omit --resume to start one")
        settings = JobSettings.load(out / CONFIG_FILE)
        _check_shards(settings, files)
    else:
        settings = options.make_job({"learners": learners, **job})
        model_config(settings)  # raises for an unknown model
        _check_shards(settings, files)
        if or_resume and (out / CONFIG_FILE).is_file():
            settings = _load_existing_settings(out, settings)
        else:
            # A launcher that starts the syncer with --or-resume has created the directory and has files in it.
            (_check_no_store if or_resume else check_is_new_run)(out)
            is_new = True
    with ExitStack() as stack:
        # Bind before the directory is created: a port in use must not leave one behind.
        sock = stack.enter_context(bind_socket(serving.host, serving.port, listen=True)) if is_new else None
        if is_new:
            _create_run(out, settings, init)
        _check_token(out, token)
        stack.enter_context(dashboard_process(page, out, token))
        wait_s = take_over_after if standby else None
        return _serve(out, settings, serving, files, wait_s, sock, partial(_resume_command, ctx), as_json)


def _check_shards(settings: JobSettings, files: KeyFiles | None) -> None:
    if settings.shards and files is not None and files.authority is None:
        raise ValueError(
            "a syncer and its shards authenticate each other by keys: give --keys in place of --certificate"
        )


def _load_existing_settings(out: Path, given: JobSettings) -> JobSettings:
    from atoll.reference.job_settings import JobSettings
    from atoll.store.run_settings import CONFIG_FILE

    settings = JobSettings.load(out / CONFIG_FILE)
    if settings != given:
        print_to_stderr(f"the run in {out} keeps its own settings, which differ from the given options")
    return settings


def _check_no_store(out: Path) -> None:
    from atoll.store.snapshots import STORE_FOLDER

    if (out / STORE_FOLDER).exists():
        raise ValueError(f"{out} has a store but no settings of a run: choose another --out")


def _create_run(out: Path, settings: JobSettings, init: Path | None) -> None:
    """Create the directory of a new run, or nothing if it fails.

    Whether --init fits the model is checked later, when the first learner uploads its model.
    """
    from atoll.store.run_settings import CONFIG_FILE

    values = None
    if init is not None:
        from atoll.checkpoint.formats import read_checkpoint

        values = read_checkpoint(init).tensors
    missing = [path for path in (out, *out.parents) if not path.exists()]
    others = set(out.iterdir()) if not missing else set()
    try:
        out.mkdir(parents=True, exist_ok=True)
        if values is not None:
            from atoll.checkpoint.model_file import write_tensors
            from atoll.syncer.initial_model import INIT_FILE

            write_tensors(values, out / INIT_FILE)
        settings.save(out / CONFIG_FILE)
    except BaseException:
        with suppress(OSError):
            for path in set(out.iterdir()) - others:
                path.unlink()
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        raise


def _check_token(out: Path, token: str | None) -> None:
    """Raise `ValueError` if the run was served with a token before and has none now. Record that it has one."""
    marker = out / TOKEN_MARKER_FILE
    if token is not None:
        marker.write_text("The syncer of this run was started with a token and needs one again.\n")
    elif marker.exists():
        raise ValueError(
            f"the run in {out} was served with a token, and none is given now: set ATOLL_TOKEN or give --token; to"
            f" serve it without one, remove {marker} first"
        )


def _resume_command(ctx: typer.Context, address: str | None) -> str:
    """Return the command that resumes this run at the same address, without its secrets."""
    import shlex

    arguments = ["atoll", "syncer", "--out", str(ctx.params["out"]), "--resume"]
    for option in ctx.command.params:
        if option.name not in REPEATED_ON_RESUME or not options.is_given(ctx, option.name):
            continue
        value = ctx.params[option.name]
        if option.name == "token":
            value = option.metavar
        elif option.name == "port" and address is not None:
            value = address.rpartition(":")[2]  # the port that learners use, also with --port 0
        arguments += [option.opts[0]] if value is True else [option.opts[0], str(value)]
    source = ctx.get_parameter_source("token")
    from_environment = ctx.params["token"] and source is not None and source.name == "ENVIRONMENT"
    return shlex.join(arguments) + (", with the same ATOLL_TOKEN" if from_environment else "")


def _write_model(out: Path, shards: int, syncer: SyncerProcess) -> None:
    """Write the final model as soon as the run ends, because its end may be served for a long time."""
    from atoll.checkpoint.model_file import MODEL_FILE, write_tensors
    from atoll.checkpoint.published_model import read_published_tensors

    # The learners may train any model, not only the reference model. The syncer has gathered the fragments of shards.
    write_tensors(syncer.published_model() if shards else read_published_tensors(out), out / MODEL_FILE)


# long: from the wait of a standby to the model
def _serve(
    out: Path,
    settings: JobSettings,
    serving: ServeOptions,
    keys: KeyFiles | None,
    take_over_after: float | None,
    sock: socket | None,
    resume_command: Callable[[str | None], str],
    as_json: bool,
) -> Result:
    import logging
    import sys

    import torch

    from atoll.checkpoint.model_file import MODEL_FILE, write_tensors
    from atoll.checkpoint.published_model import is_run_finished, learners_missing_end, read_published_tensors
    from atoll.logs import configure_logging
    from atoll.reference.saved_models import load_model
    from atoll.reference.supervisor import new_run_id, run_settings_for
    from atoll.store.version_store import StoreInUseError
    from atoll.syncer.main import SupersededError, serve_syncer, wait_to_take_over
    from atoll.syncer.shards.coordinator import ShardsUnavailableError

    configure_logging(serving.log_format, logging.WARNING)
    for name in ("atoll.syncer", "atoll.command"):
        logging.getLogger(name).setLevel(logging.INFO)
    torch.set_num_threads(1)

    addresses: list[str] = []

    def print_address(address: str) -> None:
        addresses.append(address)
        if as_json:
            return
        print(f"The syncer listens on {address}.")
        port = address.rpartition(":")[2]
        given, written = "", ""
        if keys is not None:
            by_key = keys.authority is not None
            given = " --keys DIR" if by_key else " --ca FILE"
            written = ', keys="DIR"' if by_key else ', ca="FILE", token=...'
        print(f"On each island: atoll learner --syncer HOST:{port}{given}")
        print(f'Or in your own training loop: atoll.Learner(model, optimizer, syncer="HOST:{port}"{written})')
        sys.stdout.flush()

    def print_unreceived_end(address: str) -> None:
        missing = ", ".join(map(str, learners_missing_end(out)))
        print(f"The run in {out} is finished, and learners {missing} have not received its end.")
        end = f"for up to {serving.serve_end:g} s (--serve-end)"
        print(f"Serving the end on {address} {end}; Ctrl-C stops it.", flush=True)

    def print_standby() -> None:
        print_log_line(serving.log_format, f"Standing by: a syncer serves {out}.")

    run = run_settings_for(settings, new_run_id(out))
    while True:
        takeover = wait_to_take_over(out, take_over_after, print_standby) if take_over_after is not None else None
        # If the model of a run with shards was not gathered, serve the run again, so that the shards can send it.
        has_model = take_over_after is not None or not settings.shards or (out / MODEL_FILE).exists()
        was_finished = is_run_finished(out) and has_model
        # A standby does not serve the end: the syncer that it watches does.
        serves_end = take_over_after is None and serving.serve_end > 0 and was_finished and learners_missing_end(out)
        if takeover is not None:
            print_log_line(serving.log_format, f"Taking over: {takeover.reason}.")
        finished = was_finished and not serves_end
        if finished:
            break
        on_ready = print_unreceived_end if was_finished and not as_json else print_address
        on_finished = None if was_finished else partial(_write_model, out, settings.shards)
        try:
            is_forced = takeover is not None and takeover.is_forced
            finished = was_finished | serve_syncer(
                *(out, run, serving.host, serving.port, serving.token or None, on_ready, on_finished),
                take_over=is_forced,
                keys=keys,
                plain_text=serving.plain_text,
                serve_end_s=serving.serve_end,
                sock=sock,
            )
            break
        except StoreInUseError:
            if take_over_after is None:
                raise  # otherwise another standby was faster: wait again
        except ShardsUnavailableError as missing:
            advice = f"start it, then run again: {resume_command(None)}"
            raise ValueError(f"{missing}; {advice}") from None
        except SupersededError as superseded:
            print_to_stderr(str(superseded))
            raise typer.Exit(ExitCode.FAILED) from None
    if not finished:
        address = addresses[-1] if addresses else None
        print_to_stderr(f"stopped before the end; learners continue to train; resume with: {resume_command(address)}")
        raise KeyboardInterrupt
    path = out / MODEL_FILE
    if was_finished and not settings.shards:
        write_tensors(read_published_tensors(out), path)

    def lines() -> Iterator[str]:
        yield f"The run in {out} {'was finished before' if was_finished else 'is finished'}; its model is {path}."
        with suppress(ValueError):  # learners with their own loops train their own models
            load_model(out)
            yield f'Generate text: atoll generate {out} "def main():"'

    return Result({"finished": True, "model": str(path)}, lines())


def run_shard(
    syncer: Annotated[str, Setting("Address of atoll syncer --shards N; with standbys: A:PORT,B:PORT.", "HOST:PORT")],
    shard: Annotated[int, Setting("Number of this shard, from 0.", "K", min=0)],
    shards: Annotated[int, Setting("Total number of shards.", "N", min=1)],
    out: Annotated[Path, Setting("Directory of this shard. Give the same one after a restart.", "DIR")],
    host: Annotated[str, Setting("Address to listen on.", "HOST")] = "127.0.0.1",
    port: Annotated[int, options.port_setting("Port to listen on; 0: a free one.")] = 7401,
    advertise: Annotated[str | None, Setting("Address by which learners reach it, if it differs.", "HOST:PORT")] = None,
    token: TokenOption = None,
    keys: KeysOption = None,
    plain_text: Annotated[bool, Setting("Serve other machines without TLS. Use it only on isolated networks.")] = False,
    log_format: LogFormatOption = "text",
) -> None:
    """Store and merge some fragments of a run. Learners upload and download them here; the syncer decides.

    With n shards fragment p is at shard p % n. Start one at every site: each site then sends as much over the WAN as in
    a ring, and the links of the syncer carry control messages only. While a shard is down, its fragments are not
    merged; all other fragments are. Restart it with the same directory.
    """
    import logging

    from atoll.logs import check_log_format, configure_logging
    from atoll.store.version_store import StoreInUseError
    from atoll.syncer.main import SupersededError
    from atoll.syncer.shards.process import serve_shard
    from atoll.transport.endpoint import parse_address, parse_endpoint
    from atoll.transport.tls import find_key_files

    check_log_format(log_format)
    head = parse_endpoint(syncer, keys)
    head.check()
    if advertise is not None:
        parse_address(advertise)
    configure_logging(log_format, logging.WARNING)
    logging.getLogger("atoll.shard").setLevel(logging.INFO)
    files = find_key_files(keys, for_syncer=True) if keys is not None else None

    def on_ready(address: str) -> None:
        print_to_stderr(f"shard {shard} of {shards} listens on {address}")

    try:
        serve_shard(out, shard, shards, head, host, port, token or None, advertise, on_ready, files, plain_text)
    except (StoreInUseError, SupersededError) as error:
        raise ValueError(str(error)) from None
