"""Units as jobs of Slurm: queued, placed, requeued and logged by the cluster that people already have.

A unit is one batch job, or one task of a job array, and stays that job while it lives: what was pre-empted, has
reached its time limit or has failed is requeued under its number, and comes back as a new incarnation. The script that
does this is `slurm_job.sh`; it keeps what it knows in the unit's directory, so nothing here needs Slurm's accounting.
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
EXIT_RESERVE_S = 15  # added to the notice: to kill, to store the cause, and to requeue
CANCEL_TIMEOUT_S = 300.0
SIGNAL_INTERVAL_S = 2.0
UNREACHABLE_PATTERN = r"ontroller|configuration source|timed out|transmitted|ommunication|onnection"
"""Matches messages of sbatch about an unreachable controller, which may have executed the request."""

# Options with the names that sbatch has.
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
    "Resources": "for nodes that are free",
    "Priority": "for jobs that are before it",
    "BeginTime": "until Slurm starts it again",
    "Dependency": "for another job",
    "JobHeldUser": "until it is released (scontrol release)",
    "JobHeldAdmin": "until an administrator releases it",
    "PartitionDown": "for its partition, which is down",
    "ReqNodeNotAvail": "for nodes that are not available",
    "None": "to be looked at by the scheduler",
}
"""Sentences for reasons that Slurm gives. Other reasons are shown unchanged."""

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
        _check_sbatch()  # last: errors in the units are reported on every machine
        handles = self._find_running(units)
        new = [unit for unit in units if unit.name not in handles]
        if new:
            handles |= self._submit(new)
        return [handles[unit.name] for unit in units]

    def status(self, handle: Mapping[str, Any]) -> UnitStatus:
        """Return the status. Raise ConnectionError if the controller cannot be reached: the job may still run."""
        home, number = Path(handle["home"]), str(handle["job"])
        job = self._job(handle)
        noted = _read_job_state(home, number)
        stopped = (home / "stopped").exists()
        restarts = job.restarts if job is not None else max(int(noted.get("starts", 1)) - int(handle["starts"]) - 1, 0)
        if job is not None and job.is_active:
            if job.state in RUNNING_STATES:
                words = "is leaving" if stopped or job.state == "COMPLETING" else f"job {number} on {job.nodes}"
                return UnitStatus(UnitState.RUNNING, restarts, words)
            held = (
                "is suspended"
                if job.state == "SUSPENDED"
                else f"waits {PENDING_REASONS.get(job.reason, 'for ' + job.reason)}"
            )
            before = f"; before: {noted['cause']}" if noted.get("state") == "waiting" else ""
            return UnitStatus(UnitState.WAITING, restarts, f"job {number} {held}{before}")
        if noted.get("state") in ("ended", "failed", "stopped"):  # the script knows whether it was stopped
            return UnitStatus(UnitState(noted["state"]), restarts, noted["cause"])
        if stopped:
            return UnitStatus(UnitState.STOPPED, restarts, noted.get("cause", ""))
        if job is None:
            last = f"; it was {noted['state']} last" if noted else ""
            return UnitStatus(UnitState.LOST, restarts, f"Slurm has forgotten job {number}{last}")
        if job.state == "COMPLETED":  # the script could not write it down
            return UnitStatus(UnitState.ENDED, restarts, f"job {number}: completed")
        if job.state == "CANCELLED":
            return UnitStatus(UnitState.STOPPED, restarts, "cancelled")
        return UnitStatus(UnitState.FAILED, restarts, f"job {number}: {job.state.lower().replace('_', ' ')}")

    def stop(self, handle: Mapping[str, Any]) -> None:
        job, home = self._job(handle), Path(handle["home"])
        if job is None or not job.is_active:
            return
        # Before anything else: a script that reads this does not ask for another place in the queue.
        (home / "stopped").touch()
        notice_s = float(handle["notice_s"]) + EXIT_RESERVE_S
        started_at, signalled, forced = time.monotonic(), -math.inf, False
        while (job := self._job(handle)) is not None and job.is_active:
            waited = time.monotonic() - started_at
            if waited > notice_s + CANCEL_TIMEOUT_S:
                raise TimeoutError(f"job {handle['job']} is still {job.state} after {waited:.0f} s: ask scontrol why")
            if job.state in WAITING_STATES or (waited > notice_s and not forced):
                self._cancel(handle)
                forced = True
            elif job.state == "RUNNING" and waited - signalled > SIGNAL_INTERVAL_S and not forced:
                # More than once: a signal before the script has started is lost. The script passes it on once.
                self._cancel(handle, "--signal=TERM", "--batch")
                signalled = waited
            time.sleep(0.1)

    def requeue(self, handle: Mapping[str, Any]) -> None:
        """Requeue the job, as an administrator does for maintenance. It receives SIGTERM first."""
        self._run_command("scontrol", "requeue", str(handle["job"]), conf=handle.get("conf"))

    def log(self, handle: Mapping[str, Any]) -> list[Path]:
        home = Path(handle["home"])
        files = find_start_logs(home, after=int(handle["starts"]))
        # The output of Slurm, for a job that never started its script.
        return files or [path for path in (Path(handle.get("directory", home.parent)) / SLURM_LOG,) if path.exists()]

    def _submit(self, units: Sequence[Unit]) -> dict[str, dict[str, Any]]:
        script = _script(units)
        handles = {unit.name: self._prepare_handle(unit, units, task) for task, unit in enumerate(units)}
        for unit in units:
            write_text(_unit_home(unit) / "job.sh", script)
            # Before sbatch: if this process dies before the reply, the next one finds the job by this file.
            write_text(_unit_home(unit) / HANDLE_FILE, json.dumps({**handles[unit.name], "job": None}) + "\n")
        # Units read their own files. Variables for other runs and secrets of this shell must not reach the job.
        secret = frozenset().union(*(unit.secret_names for unit in units))
        try:
            words = self._run_command("sbatch", "--parsable", str(_unit_home(units[0]) / "job.sh"), excluded=secret)
        except ConnectionError as error:
            found = self._find_running(units)  # the controller may have it all the same
            if len(found) == len(units):
                return found
            again = f"{_job_name(units)} is not in the queue now; start it again, which looks for it first"
            raise ConnectionError(f"{error}; {again}") from error
        number = words.strip().splitlines()[-1].split(";")[0]
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
                        f"{unit.name} is job {job} already ({state.lower()}), and {cause}: stop it, or scancel {job}"
                    )
                found[unit.name] = {**handle, "job": job}
        return found

    def _queued(self, names: set[str]) -> list[tuple[str, str, str, str]]:
        """Return unfinished jobs of these names: number, state, name and working directory."""
        those = (f"--user={os.getuid()}", f"--name={','.join(sorted(names))}", "--states=all")
        output = self._run_command("squeue", *those, "--array", "--noheader", "--format=%i %T %j %Z")
        lines = [line.split(" ", 3) for line in output.splitlines()]
        return [
            (job, state, name, place)
            for job, state, name, place in lines
            if state in WAITING_STATES or state in RUNNING_STATES
        ]

    def _job(self, handle: Mapping[str, Any]) -> _Job | None:
        """Return the job, or None if Slurm does not know it or has reused its number."""
        try:
            output = self._run_command("scontrol", "show", "job", "-o", str(handle["job"]), conf=handle.get("conf"))
        except ValueError:  # scontrol has no other way to say that it does not know a job
            return None
        fields = dict(
            re.findall(r"(?:^| )(JobName|JobState|Reason|Restarts|NodeList)=(\S*)", output.partition("\n")[0])
        )
        if fields.get("JobName") != handle["name"]:
            return None
        nodes = fields.get("NodeList", "")
        return _Job(fields["JobState"], fields["Reason"], int(fields.get("Restarts", 0)), nodes)

    def _cancel(self, handle: Mapping[str, Any], *how: str) -> None:
        try:
            self._run_command("scancel", *how, str(handle["job"]), conf=handle.get("conf"))
        except ValueError:
            return  # it has ended meanwhile; the caller checks again

    def _run_command(self, *command: str, conf: str | None = None, excluded: Collection[str] = ()) -> str:
        environment = inherited_environment(excluded)
        if conf is not None or self.conf is not None:
            environment["SLURM_CONF"] = conf or str(self.conf)
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
                start_new_session=True,  # Ctrl-C is for this process: sbatch would die with its job half submitted
            )
        except FileNotFoundError as error:
            raise ConnectionError(f"cannot reach Slurm: {command[0]} was not found on this machine") from error
        except subprocess.TimeoutExpired as error:
            raise ConnectionError(
                f"cannot reach Slurm: no answer of {command[0]} in {COMMAND_TIMEOUT_S:g} s"
            ) from error
        if done.returncode == 0:
            return done.stdout
        if done.returncode < 0:
            raise ConnectionError(f"cannot reach Slurm: {command[0]} was ended by signal {-done.returncode}")
        output = " ".join((done.stderr or done.stdout).split())
        if re.search(r"Invalid job id|Job \S+ not found|already completing or completed|Job/step already", output):
            raise ValueError(output)
        if command[0] == "sbatch" and not re.search(UNREACHABLE_PATTERN, output):
            raise ValueError(f"sbatch refused it: {output}")
        raise ConnectionError(f"cannot reach Slurm: {output}")


def _check_sbatch() -> None:
    if shutil.which("sbatch") is None:
        raise ValueError("sbatch was not found: start this where jobs are submitted, or choose another launcher")


def _check(unit: Unit) -> None:
    for what, name in (("run", unit.run), ("unit", unit.name)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            raise ValueError(f"name of the {what}: {name!r} is not of letters, digits and dashes")
    if not unit.command:
        raise ValueError(f"{unit.name} has no command")
    if not unit.directory.is_absolute():
        raise ValueError(f"directory of {unit.name}: {unit.directory} is not absolute; all nodes have to find it")
    if re.search(r'[\x00-\x1f"\\]', str(unit.directory)):
        raise ValueError(f"directory of {unit.name}: sbatch takes no quote or backslash in {unit.directory}")
    unknown = sorted(set(unit.options) - set(OPTIONS))
    if unknown:
        raise ValueError(
            f"{unit.name}: the slurm launcher does not know {', '.join(unknown)}; it knows {', '.join(OPTIONS)}."
            ' Anything else that sbatch takes goes into sbatch = ["--name=value"]'
        )
    for name in (*SBATCH_OPTIONS, "setup"):
        value = unit.options.get(name, "")
        if not isinstance(value, str | int) or isinstance(value, bool) or (name != "setup" and "\n" in str(value)):
            raise ValueError(f"{unit.name}: {name} = {value!r} is not a word")
    if not isinstance(unit.options.get("exclusive", False), bool):
        raise ValueError(f"{unit.name}: exclusive is true or false")
    more = unit.options.get("sbatch", ())
    if isinstance(more, str) or not all(isinstance(line, str) and re.fullmatch(r"--\S.*", line) for line in more):
        raise ValueError(f'{unit.name}: sbatch is a list of options, each as "--name=value"; it is {more!r}')
    for line in more:
        if re.match(r"--(array|chdir|error|job-name|no-requeue|open-mode|output|signal)\b", line):
            raise ValueError(f"{unit.name}: {line} in sbatch: leave it out, by this the launcher finds its jobs")
    for name in unit.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{unit.name}: {name!r} is no name of a variable")


def _unit_home(unit: Unit) -> Path:
    return unit.directory / "slurm"


def _job_name(units: Sequence[Unit]) -> str:
    """Return the job name. That of an array depends on all its units: task numbers differ between arrays."""
    if len(units) == 1:
        return f"{units[0].run}.{units[0].name}"
    all_of_them = hashlib.sha256("\n".join(unit.name for unit in units).encode()).hexdigest()[:6]
    return f"{units[0].run}.{units[0].name}..{units[-1].name}.{all_of_them}"


def _array_key(unit: Unit) -> tuple[Any, ...]:
    return unit.run, unit.nodes, unit.cpus, unit.devices, unit.notice_s, dict(unit.options)


def _digest(unit: Unit) -> str:
    """Return the digest of the settings without secrets. A job with another digest is another unit."""
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
    homes = " ".join(shlex.quote(str(_unit_home(one))) for one in units)
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
    kept = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    is_whole = text.endswith("\n") and all(kept.get(name, "").isdigit() for name in ("starts", "failures"))
    return kept if is_whole else {}


def _read_job_state(home: Path, number: str) -> dict[str, str]:
    """Return the state that the script of this job wrote."""
    kept = _read_state(home)
    return kept if kept.get("job") == number else {}
