"""A small Slurm of one's own on this machine, for tests.

Controller, nodes and munge run as children of this process, with files, key and ports of their own, and end with it.
Nothing of a Slurm that is installed and configured here is touched. The daemons have to be root.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
STARTED_WITHIN_S = 120.0


def why_not() -> str | None:
    """What is missing here for a Slurm of one's own, in words; None where nothing is."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing:
        return f"{', '.join(missing)} not found: install slurm-wlm and munge"
    return None if os.geteuid() == 0 else "the daemons of Slurm have to be root"


class LocalSlurm:
    """`with LocalSlurm() as slurm: SlurmLauncher(slurm.conf)`. Nodes share the machine; each claims `cpus`."""

    def __init__(self, *, nodes: int = 1, cpus: int = 8, kill_wait_s: int = 30, requeue_wait_s: int = 30) -> None:
        """`requeue_wait_s`: how long a job that was requeued stays in the queue without `hurry`, Slurm itself has two
        minutes; also how long a start may take on a machine that is busy."""
        missing = why_not()
        if missing is not None:
            raise ValueError(f"no Slurm can be started here: {missing}")
        self.nodes, self.cpus = nodes, cpus
        self.kill_wait_s, self.requeue_wait_s = kill_wait_s, requeue_wait_s
        # Short, whatever TMPDIR is: the path of a socket has 107 characters.
        self.directory = Path(tempfile.mkdtemp(prefix="atoll-slurm-", dir="/tmp"))
        self.conf = self.directory / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []  # in the order in which they were started
        self._hurried: set[tuple[str, str]] = set()

    def __enter__(self) -> LocalSlurm:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what was started here, jobs included, and removes its files."""
        if self._daemons:
            self.run("scancel", "--user", "root", "--full", "--signal", "KILL")
            self.run("scancel", "--user", "root")
            self.wait_for(lambda: not self.run("squeue", "--noheader").strip(), 20.0, must=False)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        shutil.rmtree(self.directory, ignore_errors=True)

    def stop_controller(self) -> None:
        """Jobs go on. `start_controller` brings it back."""
        controller = self._daemons.pop(1)
        controller.terminate()  # killed, it would forget what it has not saved yet
        controller.wait(60)

    def start_controller(self) -> None:
        self._spawn("slurmctld", "-D", "-f", str(self.conf), at=1)
        self.wait_for(lambda: bool(self.run("scontrol", "ping")))

    def hurry(self, job: str) -> None:
        """Shortens the wait of a job that was requeued to two seconds; to any other it does nothing."""
        shown = self.run("scontrol", "show", "job", "-o", job)
        restarts = re.search(r" Restarts=(\d+)", shown)
        if " Reason=BeginTime " in shown and restarts and (job, restarts[1]) not in self._hurried:
            # Not now: nodes refuse what was queued in the second in which they ended the job.
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")
            self._hurried.add((job, restarts[1]))

    def _start(self) -> None:
        for name in ("state", "spool", "logs"):
            (self.directory / name).mkdir()
        self.directory.chmod(0o755)  # users other than root reach munge and read the configuration
        key = self.directory / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        self.conf.write_text(self._configuration())
        # Forced, because it dislikes that /tmp is everybody's; only root may write to the directory in it.
        files = [f"--{name}-file={self.directory}/munge.{name}" for name in ("key", "pid", "seed")]
        log = f"--log-file={self.directory}/logs/munged"
        self._spawn("munged", "--foreground", "--force", f"--socket={self._socket}", log, *files)
        self.wait_for(self._socket.is_socket)
        self._spawn("slurmctld", "-D", "-f", str(self.conf))
        for node in range(1, self.nodes + 1):
            self._spawn("slurmd", "-D", "-f", str(self.conf), "-N", f"node{node}")
        self.wait_for(lambda: self._states() == ["idle"] * self.nodes)

    @property
    def _socket(self) -> Path:
        return self.directory / "munge.socket"

    def _configuration(self) -> str:
        here = socket.gethostname().split(".")[0]
        controller_port, *ports = _free_ports(1 + self.nodes)
        names = [f"node{number}" for number in range(1, self.nodes + 1)]
        lines = [
            "ClusterName=atoll",
            f"SlurmctldHost={here}(127.0.0.1)",
            f"SlurmctldPort={controller_port}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            "CredType=cred/munge",
            f"AuthInfo=socket={self._socket},cred_expire={self.requeue_wait_s}",
            f"StateSaveLocation={self.directory}/state",
            f"SlurmdSpoolDir={self.directory}/spool/%n",
            f"SlurmctldPidFile={self.directory}/slurmctld.pid",
            f"SlurmdPidFile={self.directory}/slurmd-%n.pid",
            f"SlurmctldLogFile={self.directory}/logs/slurmctld",
            f"SlurmdLogFile={self.directory}/logs/slurmd-%n",
            # Neither cgroups nor a database: what every machine has.
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SlurmdParameters=config_overrides",  # believe the CPUs below: nodes share the machine
            "SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=2",
            f"KillWait={self.kill_wait_s}",
            "ReturnToService=2",
            "MpiDefault=none",
            "SlurmdTimeout=300",
        ]
        lines += [
            f"NodeName={name} NodeHostname={here} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} RealMemory=1024"
            for name, port in zip(names, ports, strict=True)
        ]
        lines.append(f"PartitionName=islands Nodes={','.join(names)} Default=YES MaxTime=INFINITE OverSubscribe=NO")
        return "\n".join(lines) + "\n"

    def _spawn(self, program: str, *arguments: str, at: int | None = None) -> None:
        out = (self.directory / "logs" / "daemons").open("ab")
        found = shutil.which(program, path=_path())
        assert found is not None, program  # why_not() has looked
        with out:
            daemon = subprocess.Popen(
                [found, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self._daemons.insert(len(self._daemons) if at is None else at, daemon)

    def _states(self) -> list[str]:
        return self.run("sinfo", "--noheader", "--Node", "--format", "%T").split()

    def run(self, *command: str) -> str:
        """What a command of this cluster prints; nothing where it fails."""
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        return ended.stdout if ended.returncode == 0 else ""

    def wait_for(self, ready: Callable[[], bool], within_s: float = STARTED_WITHIN_S, *, must: bool = True) -> None:
        """RuntimeError with what the daemons said, where it takes too long or one of them has gone."""
        end = time.monotonic() + within_s
        while not ready():
            gone = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if must and (gone or time.monotonic() > end):
                shown = (self.directory / "logs" / "daemons").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"waited in vain for Slurm: {gone or f'{within_s:g} s are over'}\n{shown}")
            if time.monotonic() > end:
                return
            threading.Event().wait(0.1)


def _end_with_parent() -> None:
    """Also when that is killed and cannot end its daemons."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _path() -> str:
    """Daemons are where users do not look."""
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        held = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in held]


__all__ = ["LocalSlurm", "why_not"]
