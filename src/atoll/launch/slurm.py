"""The Slurm launcher: units as batch jobs or as tasks of a job array.

A unit keeps its job number. A job that was preempted, has reached its time limit or has failed is requeued under the
same number, and its learner joins as a new incarnation. The job script `slurm_job.sh` does this. It stores the state of
the unit in the unit's directory, so this module does not need Slurm's accounting.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.files import write_text
from atoll.launch.launcher import Unit, UnitState, UnitStatus, find_start_logs, inherited_environment, last_start_number

SCRIPT_BODY = Path(__file__).with_name("slurm_job.sh")
HANDLE_FILE, SLURM_LOG = "handle.json", "slurm/slurm.log"
COMMAND_TIMEOUT_S = 30.0
EXIT_RESERVE_S = 15  # added to the notice: time to kill processes, store the cause and requeue
CANCEL_TIMEOUT_S = 300.0
SIGNAL_INTERVAL_S = 2.0
UNREACHABLE_PATTERN = r"ontroller|configuration source|timed out|transmitted|ommunication|onnection"
"""Matches messages of sbatch about an unreachable controller, which may have executed the request."""

# Options with the same names as in sbatch.
SBATCH_OPTIONS = (
    "account",
    "constraint",
    "exclude",
    "gres",
    "mem",
    "nodelist",
    "partition",
    "qos",
    "reservation",
    "time",
)
OPTIONS = (*SBATCH_OPTIONS, "exclusive", "sbatch", "setup")

PENDING_REASONS = {
    "Resources": "for free nodes",
    "Priority": "for jobs with a higher priority",
    "BeginTime": "for its begin time",
    "Dependency": "for another job",
    "JobHeldUser": "for its release by the user (scontrol release)",
    "JobHeldAdmin": "for its release by an administrator",
    "PartitionDown": "for its partition, which is down",
    "ReqNodeNotAvail": "for nodes that are not available",
    "None": "for the scheduler",
}
"""Descriptions of Slurm's reasons. Other reasons are shown unchanged."""

WAITING_STATES = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED"}
)
RUNNING_STATES = frozenset({"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING"})


@dataclass(frozen=True)
class _Job:
    """State of a job as scontrol shows it."""

    state: str
    reason: str
    restarts: int
    nodes: str

    @property
    def is_active(self) -> bool:
        return self.state in WAITING_STATES or self.state in RUNNING_STATES


class SlurmLauncher:
    """Launcher for the Slurm cluster of this machine, or of the `slurm.conf` that is given."""

    def __init__(self, conf: Path | None = None) -> None:
        self.conf = conf

    def check(self, unit: Unit) -> None:
        _check(unit)
        _check_sbatch()

    def render(self, unit: Unit) -> str:
        """Return the job script and the files next to it, with only the names of secrets."""
        _check(unit)
        files = {"settings": _settings(unit), "environment": _environment(unit)}
        hidden = sorted(unit.secret_names & set(unit.environment))
        parts = [_header([unit]) + "# then the lines of atoll/launch/slurm_job.sh\n"]
        parts += [f"# {_unit_home(unit) / name}\n{text}" for name, text in files.items()]
        parts += [f"# {_unit_home(unit) / 'secrets'}, for its owner only: {', '.join(hidden)}\n"] if hidden else []
        return "\n".join(parts)

    def start(self, unit: Unit) -> dict[str, Any]:
        return self.start_array([unit])[0]

    def start_array(self, units: Sequence[Unit]) -> list[dict[str, Any]]:
        """Start units with equal resources as one job array. Return their handles in the same order.

        Commands may differ. Units that already run keep their jobs. A single unit becomes a plain job.
        """
        for unit in units:
            _check(unit)
            if _array_key(unit) != _array_key(units[0]):
                raise ValueError(
                    f"{unit.name} needs other resources than {units[0].name}: tasks of one array have the same nodes,"
                    " devices, notice and options; start them as separate jobs"
                )
        _check_sbatch()  # last, so that errors in the units are also reported on a machine without Slurm
        handles = self._find_running(units)
        new = [unit for unit in units if unit.name not in handles]
        if new:
            handles |= self._submit(new)
        return [handles[unit.name] for unit in units]

    def status(self, handle: Mapping[str, Any]) -> UnitStatus:
        """Return the status. Raise ConnectionError if the controller cannot be reached: the job may still run."""
        home, number = Path(handle["home"]), str(handle["job"])
        job = self._job(handle)
        stored = _read_job_state(home, number)
        stopped = (home / "stopped").exists()
        restarts = job.restarts if job is not None else max(int(stored.get("starts", 1)) - int(handle["starts"]) - 1, 0)
        if job is not None and job.is_active:
            if job.state in RUNNING_STATES:
                cause = "is stopping" if stopped or job.state == "COMPLETING" else f"job {number} on {job.nodes}"
                return UnitStatus(UnitState.RUNNING, restarts, cause)
            cause = (
                "is suspended"
                if job.state == "SUSPENDED"
                else f"is waiting {PENDING_REASONS.get(job.reason, 'for ' + job.reason)}"
            )
            before = f"; last start: {stored['cause']}" if stored.get("state") == "waiting" else ""
            return UnitStatus(UnitState.WAITING, restarts, f"job {number} {cause}{before}")
        if stored.get("state") in ("ended", "failed", "stopped"):  # stored by the job script
            return UnitStatus(UnitState(stored["state"]), restarts, stored["cause"])
        if stopped:
            return UnitStatus(UnitState.STOPPED, restarts, stored.get("cause", ""))
        if job is None:
            last = f"; its last state was {stored['state']}" if stored else ""
            return UnitStatus(UnitState.LOST, restarts, f"Slurm does not know job {number} any more{last}")
        if job.state == "COMPLETED":  # the script could not write its state
            return UnitStatus(UnitState.ENDED, restarts, f"job {number}: completed")
        if job.state == "CANCELLED":
            return UnitStatus(UnitState.STOPPED, restarts, "cancelled")
        return UnitStatus(UnitState.FAILED, restarts, f"job {number}: {job.state.lower().replace('_', ' ')}")

    def stop(self, handle: Mapping[str, Any]) -> None:
        job, home = self._job(handle), Path(handle["home"])
        if job is None or not job.is_active:
            return
        # First: the job script does not requeue a job that has this file.
        (home / "stopped").touch()
        notice_s = float(handle["notice_s"]) + EXIT_RESERVE_S
        started_at, signalled, forced = time.monotonic(), -math.inf, False
        while (job := self._job(handle)) is not None and job.is_active:
            waited = time.monotonic() - started_at
            if waited > notice_s + CANCEL_TIMEOUT_S:
                raise TimeoutError(
                    f"job {handle['job']} is still {job.state} after {waited:.0f} s:"
                    f" look at scontrol show job {handle['job']}"
                )
            if job.state in WAITING_STATES or (waited > notice_s and not forced):
                self._cancel(handle)
                forced = True
            elif job.state == "RUNNING" and waited - signalled > SIGNAL_INTERVAL_S and not forced:
                # Repeated, because a signal before the start of the script is lost. The script forwards it once.
                self._cancel(handle, "--signal=TERM", "--batch")
                signalled = waited
            time.sleep(0.1)

    def requeue(self, handle: Mapping[str, Any]) -> None:
        """Requeue the job, as an administrator does for maintenance. It receives SIGTERM first."""
        self._run_command("scontrol", "requeue", str(handle["job"]), conf=handle.get("conf"))

    def log(self, handle: Mapping[str, Any]) -> list[Path]:
        home = Path(handle["home"])
        files = find_start_logs(home, after=int(handle["starts"]))
        # If the job never started its script, return the output of Slurm.
        return files or [path for path in (Path(handle.get("directory", home.parent)) / SLURM_LOG,) if path.exists()]

    def _submit(self, units: Sequence[Unit]) -> dict[str, dict[str, Any]]:
        script = _script(units)
        handles = {unit.name: self._prepare_handle(unit, units, task) for task, unit in enumerate(units)}
        for unit in units:
            write_text(_unit_home(unit) / "job.sh", script)
            # Written before sbatch: if this process is killed before the reply, the next `atoll up` finds the job by
            # it.
            write_text(_unit_home(unit) / HANDLE_FILE, json.dumps({**handles[unit.name], "job": None}) + "\n")
        # Units read their own files. Variables for other runs and secrets of this shell must not reach the job.
        secret = frozenset().union(*(unit.secret_names for unit in units))
        try:
            output = self._run_command("sbatch", "--parsable", str(_unit_home(units[0]) / "job.sh"), excluded=secret)
        except ConnectionError as error:
            found = self._find_running(units)  # the controller may have received the job anyway
            if len(found) == len(units):
                return found
            again = f"{_job_name(units)} is not in the queue now; start it again (the queue is searched first)"
            raise ConnectionError(f"{error}; {again}") from error
        number = output.strip().splitlines()[-1].split(";")[0]
        for unit in units:
            handle = handles[unit.name]
            handle["job"] = number if handle["task"] is None else f"{number}_{handle['task']}"
            write_text(_unit_home(unit) / HANDLE_FILE, json.dumps(handle) + "\n")
        return handles

    def _prepare_handle(self, unit: Unit, units: Sequence[Unit], task: int) -> dict[str, Any]:
        return {
            "name": _job_name(units),
            "task": None if len(units) == 1 else task,
            "directory": str(units[0].directory),
            "home": str(_unit_home(unit)),
            "notice_s": unit.notice_s,
            "starts": _prepare(unit),
            "wanted": _digest(unit),
            "conf": None if self.conf is None else str(self.conf),
        }

    def _find_running(self, units: Sequence[Unit]) -> dict[str, dict[str, Any]]:
        """Return handles of queued jobs that already run these units, if a submitter died before it stored them.

        Raise ValueError for a job with other settings: two jobs would be one learner, and each would end the other's
        connection.
        """
        last = {unit.name: _last_handle(unit) for unit in units}
        queued = self._queued({str(handle["name"]) for handle in last.values()})
        found: dict[str, dict[str, Any]] = {}
        for unit in units:
            handle = last[unit.name]
            for job, state, name, directory in queued:
                task = "" if handle["task"] is None else str(handle["task"])
                if (name, directory, job.partition("_")[2]) != (handle["name"], handle["directory"], task):
                    continue
                is_leaving = (_unit_home(unit) / "stopped").exists()
                if is_leaving or handle["wanted"] != _digest(unit):
                    cause = "is being stopped" if is_leaving else "has other settings"
                    raise ValueError(
                        f"{unit.name} already runs as job {job} ({state.lower()}), which {cause}:"
                        f" stop it, or scancel {job}"
                    )
                found[unit.name] = {**handle, "job": job}
        return found

    def _queued(self, names: set[str]) -> list[tuple[str, str, str, str]]:
        """Return unfinished jobs of these names: number, state, name and working directory."""
        filters = (f"--user={os.getuid()}", f"--name={','.join(sorted(names))}", "--states=all")
        output = self._run_command("squeue", *filters, "--array", "--noheader", "--format=%i %T %j %Z")
        lines = [line.split(" ", 3) for line in output.splitlines()]
        return [
            (job, state, name, directory)
            for job, state, name, directory in lines
            if state in WAITING_STATES or state in RUNNING_STATES
        ]

    def _job(self, handle: Mapping[str, Any]) -> _Job | None:
        """Return the job, or None if Slurm does not know it or has reused its number."""
        try:
            output = self._run_command("scontrol", "show", "job", "-o", str(handle["job"]), conf=handle.get("conf"))
        except ValueError:  # scontrol reports an unknown job as an error
            return None
        fields = dict(
            re.findall(r"(?:^| )(JobName|JobState|Reason|Restarts|NodeList)=(\S*)", output.partition("\n")[0])
        )
        if fields.get("JobName") != handle["name"]:
            return None
        nodes = fields.get("NodeList", "")
        return _Job(fields["JobState"], fields["Reason"], int(fields.get("Restarts", 0)), nodes)

    def _cancel(self, handle: Mapping[str, Any], *options: str) -> None:
        try:
            self._run_command("scancel", *options, str(handle["job"]), conf=handle.get("conf"))
        except ValueError:
            return  # the job has ended meanwhile; the caller checks again

    def _run_command(self, *command: str, conf: str | None = None, excluded: Collection[str] = ()) -> str:
        environment = inherited_environment(excluded)
        if conf is not None or self.conf is not None:
            environment["SLURM_CONF"] = conf or str(self.conf)
        try:
            result = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
                start_new_session=True,  # Ctrl-C must not kill sbatch in the middle of a submission
            )
        except FileNotFoundError as error:
            raise ConnectionError(f"cannot reach Slurm: {command[0]} was not found on this machine") from error
        except subprocess.TimeoutExpired as error:
            raise ConnectionError(
                f"cannot reach Slurm: {command[0]} has not replied within {COMMAND_TIMEOUT_S:g} s"
            ) from error
        if result.returncode == 0:
            return result.stdout
        if result.returncode < 0:
            raise ConnectionError(f"cannot reach Slurm: {command[0]} was killed by signal {-result.returncode}")
        output = " ".join((result.stderr or result.stdout).split())
        if re.search(r"Invalid job id|Job \S+ not found|already completing or completed|Job/step already", output):
            raise ValueError(output)
        if command[0] == "sbatch" and not re.search(UNREACHABLE_PATTERN, output):
            raise ValueError(f"sbatch refused the job: {output}")
        raise ConnectionError(f"cannot reach Slurm: {output}")


def _check_sbatch() -> None:
    if shutil.which("sbatch") is None:
        raise ValueError(
            "sbatch was not found: run this command on a login node of the cluster, or choose another launcher"
        )


def _check(unit: Unit) -> None:
    for kind, name in (("run", unit.run), ("unit", unit.name)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            raise ValueError(f"name of the {kind} is {name!r}: use letters, digits and dashes")
    if not unit.command:
        raise ValueError(f"{unit.name} has no command")
    if not unit.directory.is_absolute():
        raise ValueError(
            f"directory of {unit.name}: {unit.directory} is not absolute: use an absolute path that all nodes share"
        )
    if re.search(r'[\x00-\x1f"\\]', str(unit.directory)):
        raise ValueError(
            f"directory of {unit.name}: sbatch does not accept quotes, backslashes"
            f" and control characters in {unit.directory}"
        )
    unknown = sorted(set(unit.options) - set(OPTIONS))
    if unknown:
        raise ValueError(
            f"{unit.name}: launcher slurm has no option {', '.join(unknown)}; it has {', '.join(OPTIONS)}."
            ' Give other options of sbatch as sbatch = ["--name=value"]'
        )
    for name in (*SBATCH_OPTIONS, "setup"):
        value = unit.options.get(name, "")
        if not isinstance(value, str | int) or isinstance(value, bool) or (name != "setup" and "\n" in str(value)):
            raise ValueError(f"{unit.name}: {name} is {value!r}: use a string in one line, or an integer")
    if not isinstance(unit.options.get("exclusive", False), bool):
        raise ValueError(f"{unit.name}: exclusive must be true or false")
    extra = unit.options.get("sbatch", ())
    if isinstance(extra, str) or not all(isinstance(line, str) and re.fullmatch(r"--\S.*", line) for line in extra):
        raise ValueError(f'{unit.name}: sbatch is {extra!r}: use a list of options such as "--name=value"')
    for line in extra:
        if re.match(r"--(array|chdir|error|job-name|no-requeue|open-mode|output|signal)\b", line):
            raise ValueError(f"{unit.name}: sbatch has {line}: remove it, the launcher sets this option")
    for name in unit.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{unit.name}: environment has {name!r}, which is not a valid name of a variable")


def _unit_home(unit: Unit) -> Path:
    return unit.directory / "slurm"


def _job_name(units: Sequence[Unit]) -> str:
    """Return the job name. The name of an array depends on all its units: task numbers differ."""
    if len(units) == 1:
        return f"{units[0].run}.{units[0].name}"
    names_digest = hashlib.sha256("\n".join(unit.name for unit in units).encode()).hexdigest()[:6]
    return f"{units[0].run}.{units[0].name}..{units[-1].name}.{names_digest}"


def _array_key(unit: Unit) -> tuple[Any, ...]:
    return unit.run, unit.nodes, unit.cpus, unit.devices, unit.notice_s, dict(unit.options)


def _digest(unit: Unit) -> str:
    """Return the digest of the settings without secrets. A job with another digest runs another unit."""
    return hashlib.sha256((_header([unit]) + _settings(unit) + _environment(unit)).encode()).hexdigest()


def _header(units: Sequence[Unit]) -> str:
    unit = units[0]
    log = str(unit.directory / SLURM_LOG).replace("%", "%%")
    lines = [
        f"--job-name={_job_name(units)}",
        f'--chdir="{unit.directory}"',
        "--requeue",
        "--open-mode=append",
        f'--output="{log}"',
        f"--nodes={unit.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={unit.cpus}",
        f"--signal=B:TERM@{math.ceil(unit.notice_s) + EXIT_RESERVE_S}",
    ]
    if len(units) > 1:
        lines.append(f"--array=0-{len(units) - 1}")
    if unit.devices and "gres" not in unit.options:
        lines.append(f"--gres=gpu:{unit.devices}")
    lines += [f"--{name}={unit.options[name]}" for name in SBATCH_OPTIONS if name in unit.options]
    if unit.options.get("exclusive", False):
        lines.append("--exclusive")
    lines += unit.options.get("sbatch", ())
    homes = " ".join(shlex.quote(str(_unit_home(each))) for each in units)
    return "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines) + f"homes=({homes})\n"


def _settings(unit: Unit) -> str:
    return (
        f"command=({shlex.join(unit.command)})\n"
        f"nodes={unit.nodes}\n"
        f"notice={math.ceil(unit.notice_s)}\n"
        f"restarts={unit.max_restarts}\n"
        f"syncer={shlex.quote(str(unit.syncer_directory or ''))}\n"
        f"with_syncer={'yes' if unit.ends_with_syncer else 'no'}\n"
        f"setup={shlex.quote(str(unit.options.get('setup', '')))}\n"
    )


def _environment(unit: Unit, *, secret: bool = False) -> str:
    chosen = {name: value for name, value in unit.environment.items() if (name in unit.secret_names) == secret}
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in chosen.items())


def _script(units: Sequence[Unit]) -> str:
    return _header(units) + SCRIPT_BODY.read_text()


def _prepare(unit: Unit) -> int:
    """Write the files that the script reads. Return the number of starts by earlier jobs, whose logs are kept."""
    home = _unit_home(unit)
    home.mkdir(parents=True, exist_ok=True)
    starts = max(int(_read_state(home).get("starts", 0)), last_start_number(home))
    (home / "stopped").unlink(missing_ok=True)
    write_text(home / "state", f"starts={starts}\nfailures=0\n")
    write_text(home / "settings", _settings(unit))
    write_text(home / "environment", _environment(unit))
    write_text(home / "secrets", _environment(unit, secret=True), mode=0o600)
    return starts


def _last_handle(unit: Unit) -> dict[str, Any]:
    """Return the handle of the newest job of this unit. `job` is None if its number was not stored."""
    try:
        handle: dict[str, Any] = json.loads((_unit_home(unit) / HANDLE_FILE).read_text())
    except (FileNotFoundError, ValueError):
        return {"job": None, "name": _job_name([unit]), "task": None, "directory": str(unit.directory), "wanted": None}
    return handle


def _read_state(home: Path) -> dict[str, str]:
    """Return the stored state, or nothing if the file is incomplete, as after a power failure."""
    try:
        text = (home / "state").read_text()
    except FileNotFoundError:
        return {}
    fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    is_complete = text.endswith("\n") and all(fields.get(name, "").isdigit() for name in ("starts", "failures"))
    return fields if is_complete else {}


def _read_job_state(home: Path, number: str) -> dict[str, str]:
    """Return the state that the script of this job wrote."""
    state = _read_state(home)
    return state if state.get("job") == number else {}
