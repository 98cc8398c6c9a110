"""The local launcher, with real processes: they come back, they go when they are asked to, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.files import is_locked
from atoll.launch.guard import ProcessId, identify_process, is_alive, send_signal
from atoll.launch.launcher import Unit, UnitState
from atoll.launch.local import LocalLauncher
from atoll.launch.local_supervisor import BACKOFF_FIRST_S, BACKOFF_MAX_S, LOCK_FILE, read_state, write_json
from atoll.launch.supervisor import RestartPolicy
from tests.launch import local_units
from tests.launch.local_units import KeptUnit, kept, processes_of, python, until

FOREVER = "import signal, sys; print('here', flush=True); signal.pause()"
POLITE = """
import signal, sys
def leave(*_):
    print("goodbye", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("here", flush=True)
while True:
    signal.pause()
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); signal.pause()"
# As torchrun does it: a child in a session of its own.
WITH_RANK = """
import signal, subprocess, sys
rank = "import signal; print('rank', flush=True); signal.pause()"
subprocess.Popen([sys.executable, "-c", rank], start_new_session=True)
signal.pause()
"""
# It counts signals and exits slowly.
COUNTING = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("here", flush=True)
signal.sigwait({signal.SIGTERM})
print("signaled", flush=True)
if signal.sigtimedwait({signal.SIGTERM}, 1.0):
    print("signaled again", flush=True)
"""
START_AND_DIE = """
import json, os, signal, sys
from pathlib import Path
from atoll.launch.launcher import Unit
from atoll.launch.local import LocalLauncher
unit = Unit("test", "a", tuple(sys.argv[2:]), Path(sys.argv[1]))
print(json.dumps(LocalLauncher().start(unit)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def supervisor_of(unit: KeptUnit) -> ProcessId:
    return local_units.supervisor_of(unit.unit.directory)


def child_of(unit: KeptUnit) -> ProcessId:
    """It may have printed something before its supervisor has written down that it is there."""
    return until(lambda: ProcessId.from_json((read_state(unit.unit.directory) or {}).get("child")))


def guard_of(unit: KeptUnit) -> ProcessId:
    """The parent of the command."""
    stat = Path(f"/proc/{child_of(unit).pid}/stat").read_text()
    found = identify_process(int(stat.rpartition(")")[2].split()[1]))
    assert found is not None
    return found


def left_of(unit: KeptUnit) -> list[ProcessId]:
    return processes_of(unit.unit.directory)


def test_a_unit_that_ends_well_is_not_started_again(tmp_path):
    code = "import os; print(os.environ['WORD'], os.getcwd(), os.environ.get('ATOLL_STRAY'))"
    os.environ["ATOLL_STRAY"] = "of another run"
    try:
        with kept(tmp_path, code, environment={"WORD": "hello"}) as unit:
            assert unit.stands(UnitState.ENDED).restarts == 0
            assert unit.said() == [f"hello {unit.unit.directory} None"]
    finally:
        del os.environ["ATOLL_STRAY"]


def test_a_unit_that_fails_comes_back_until_it_has_no_restart_left(tmp_path):
    code = "import sys; print('start', flush=True); sys.exit('no luck')"
    with kept(tmp_path, code, max_restarts=1) as unit:
        status = unit.stands(UnitState.FAILED)
        assert status.restarts == 1
        assert status.cause == "exit code 1 after 1 restarts: no luck"
        assert [path.name for path in unit.launcher.log(unit.handle)] == ["start-0001.log", "start-0002.log"]
        assert unit.said()[:3] == ["start", "no luck", "[atoll] exit code 1; restarting in 1 s"]
        until(lambda: not is_alive(supervisor_of(unit)))


def test_a_unit_that_is_killed_comes_back(tmp_path):
    with kept(tmp_path, FOREVER) as unit:
        unit.says("here")
        first = child_of(unit)
        assert send_signal(first, signal.SIGKILL)
        unit.stands(UnitState.RUNNING, restarts=1)
        assert child_of(unit) != first
        assert any("killed by SIGKILL; restarting in 1 s" in line for line in unit.said())


def test_unit_is_signaled_before_it_is_killed(tmp_path):
    with kept(tmp_path, POLITE) as unit:
        unit.says("here")
        unit.launcher.stop(unit.handle)
        assert unit.status().state is UnitState.STOPPED
        assert unit.said() == ["here", "goodbye"]
        assert left_of(unit) == []
        assert not is_alive(supervisor_of(unit))
        unit.launcher.stop(unit.handle)  # twice is once


def test_unit_that_ignores_the_signal_is_killed_after_its_notice(tmp_path):
    with kept(tmp_path, STUBBORN, notice_s=0.5) as unit:
        unit.says("here")
        unit.launcher.stop(unit.handle)
        status = unit.status()
        assert status.state is UnitState.STOPPED
        assert status.cause == "did not end within 0.5 s and was killed"
        assert left_of(unit) == []


def test_a_unit_that_waits_to_be_started_again_is_stopped_at_once(tmp_path):
    with kept(tmp_path, "raise SystemExit(3)") as unit:
        status = unit.stands(UnitState.WAITING, restarts=1)
        assert status.cause.startswith("exit code 3; restarts in ")
        unit.launcher.stop(unit.handle)
        assert unit.status().state is UnitState.STOPPED


def test_what_a_killed_unit_has_started_is_ended_before_it_comes_back(tmp_path):
    with kept(tmp_path, WITH_RANK) as unit:
        unit.says("rank")
        first = child_of(unit)
        ranks = [one for one in left_of(unit) if one != first]
        assert len(ranks) == 1
        assert os.getsid(ranks[0].pid) != os.getsid(first.pid)
        send_signal(first, signal.SIGKILL)
        unit.stands(UnitState.RUNNING, restarts=1)
        assert not is_alive(ranks[0])
        until(lambda: len(left_of(unit)) == 2)
        unit.launcher.stop(unit.handle)
        assert left_of(unit) == []


def test_command_is_signaled_once_even_if_the_shell_above_it_exits_first(tmp_path):
    """A learner that gets a second SIGTERM leaves without sending what is not merged yet."""
    shell = ("sh", "-c", '"$0" -c "$1"; echo never', sys.executable, COUNTING)
    with kept(tmp_path, "", command=shell) as unit:
        unit.says("here")
        first = child_of(unit)
        assert len(left_of(unit)) == 2
        unit.launcher.stop(unit.handle)
        assert not is_alive(first)
        assert unit.said() == ["here", "signaled"]
        assert unit.status().cause == "", "it was not killed"


def test_leftovers_of_killed_supervisor_are_signaled_once(tmp_path):
    with kept(tmp_path, COUNTING) as unit:
        unit.says("here")
        send_signal(supervisor_of(unit), signal.SIGKILL)
        unit.stands(UnitState.FAILED)
        unit.launcher.stop(unit.handle)
        assert unit.said() == ["here", "signaled"]


def test_a_supervisor_that_is_killed_takes_its_unit_along_and_is_noticed(tmp_path):
    with kept(tmp_path, POLITE) as unit:
        unit.says("here")
        child = child_of(unit)
        send_signal(supervisor_of(unit), signal.SIGKILL)
        status = unit.stands(UnitState.FAILED)
        assert status.cause.startswith("its supervisor was killed")
        until(lambda: not is_alive(child))
        assert unit.said()[-1] == "goodbye"
        again = KeptUnit(unit.unit)
        again.stands(UnitState.RUNNING)
        assert [path.name for path in again.launcher.log(again.handle)] == ["start-0001.log", "start-0002.log"]


def test_what_is_left_of_a_killed_supervisor_ends_before_the_unit_is_started_again(tmp_path):
    with kept(tmp_path, STUBBORN, notice_s=0.5) as unit:
        unit.says("here")
        child = child_of(unit)
        send_signal(supervisor_of(unit), signal.SIGKILL)
        assert unit.stands(UnitState.FAILED).cause == "its supervisor was killed; its command is being stopped"
        again = KeptUnit(unit.unit)
        again.stands(UnitState.RUNNING)
        assert not is_alive(child)
        assert len(left_of(unit)) == 1


def test_what_is_left_of_a_killed_supervisor_can_be_stopped(tmp_path):
    with kept(tmp_path, STUBBORN, notice_s=0.5) as unit:
        unit.says("here")
        send_signal(supervisor_of(unit), signal.SIGKILL)
        unit.stands(UnitState.FAILED)
        unit.launcher.stop(unit.handle)
        assert unit.status().state is UnitState.STOPPED
        assert left_of(unit) == []


def test_killed_supervisor_gives_ranks_their_notice_and_then_nothing_is_left(tmp_path):
    """No other command of Atoll runs: the guard does it alone."""
    with kept(tmp_path, WITH_RANK, notice_s=0.5) as unit:
        unit.says("rank")
        left = left_of(unit)
        assert len(left) == 2
        send_signal(supervisor_of(unit), signal.SIGKILL)
        until(lambda: not any(map(is_alive, left)) and not is_locked(unit.unit.directory / LOCK_FILE))


def test_supervisor_killed_during_the_notice_does_not_shorten_it(tmp_path):
    with kept(tmp_path, COUNTING) as unit:
        unit.says("here")
        child = child_of(unit)
        send_signal(supervisor_of(unit), signal.SIGTERM)
        unit.says("signaled")
        send_signal(supervisor_of(unit), signal.SIGKILL)
        until(lambda: not is_alive(child))
        until(lambda: not is_locked(unit.unit.directory / LOCK_FILE))
        assert unit.said() == ["here", "signaled"]


def test_guard_that_is_killed_takes_the_command_and_its_ranks_along(tmp_path):
    with kept(tmp_path, WITH_RANK) as unit:
        unit.says("rank")
        left = left_of(unit)
        assert len(left) == 2
        send_signal(guard_of(unit), signal.SIGKILL)
        unit.stands(UnitState.RUNNING, restarts=1)
        assert not any(map(is_alive, left))
        assert "[atoll] its guard was killed; restarting in 1 s" in unit.said()


@pytest.mark.parametrize("written", ["supervisor.json", "start-0001.log"])
def test_supervisor_killed_while_it_starts_its_command_leaves_nothing(tmp_path, written):
    """As soon as the supervisor is there, or its guard has opened the log: the command may or may not run."""
    directory = tmp_path / "units" / "a"
    directory.mkdir(parents=True)
    spec = {"command": python(WITH_RANK), "restarts": 0, "notice_s": 0.5, "syncer": None, "ends_with_syncer": False}
    write_json(directory / "unit.json", {**spec, "devices": []})
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-m", "atoll.launch.local_supervisor", str(directory)], stdout=subprocess.DEVNULL
        ):
            until(lambda: (directory / written).exists())
            send_signal(until(lambda: local_units.supervisor_of(directory)), signal.SIGKILL)
        until(lambda: not is_locked(directory / LOCK_FILE))
        assert processes_of(directory) == []
        for path in directory.glob("*.log"):
            path.unlink()
        (directory / "supervisor.json").unlink()


def test_unit_outlives_process_that_started_it(tmp_path):
    unit = Unit("test", "a", python(FOREVER), tmp_path / "units/a")
    command = [sys.executable, "-c", START_AND_DIE, str(unit.directory), *unit.command]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == -signal.SIGKILL, said.stderr
    handle = json.loads(said.stdout)
    assert until(lambda: LocalLauncher().status(handle).state is UnitState.RUNNING)
    supervisor = (read_state(unit.directory) or {})["supervisor"]
    assert LocalLauncher().start(unit) == handle  # it has no record of the start, and is the same unit
    assert (read_state(unit.directory) or {})["supervisor"] == supervisor
    with pytest.raises(ValueError, match=f"a runs already with another command, under process {supervisor['pid']}"):
        LocalLauncher().start(Unit("test", "a", python("pass"), unit.directory))
    LocalLauncher().stop(handle)
    assert LocalLauncher().status(handle).state is UnitState.STOPPED


def test_reused_process_id_is_never_signaled(tmp_path):
    with kept(tmp_path, POLITE) as unit:
        unit.says("here")
        unit.launcher.stop(unit.handle)
        # The state of a supervisor that was killed, whose number belongs to another process by now.
        with subprocess.Popen([sys.executable, "-c", FOREVER], stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            found = read_state(unit.unit.directory)
            assert found is not None
            stale = {"pid": other.pid, "start_time": "another boot:1"}
            path = unit.unit.directory / "supervisor.json"
            write_json(path, {**found, "state": "running", "supervisor": stale, "child": stale})
            assert unit.status().cause == "its supervisor was killed"
            unit.launcher.stop(unit.handle)
            assert unit.status().state is UnitState.STOPPED
            assert other.poll() is None
            known = identify_process(other.pid)
            assert known is not None
            assert send_signal(known, signal.SIGTERM)
            assert other.wait(300) == -signal.SIGTERM
            assert not send_signal(known, signal.SIGTERM)


def test_an_island_is_not_started_again_when_its_run_is_over(tmp_path):
    syncer = tmp_path / "units" / "syncer"
    with kept(tmp_path, "pass", name="syncer", directory=syncer) as ended:
        ended.stands(UnitState.ENDED)
        with kept(tmp_path, "raise SystemExit(1)") as island:
            assert island.stands(UnitState.STOPPED).cause == "the run is over: its syncer has ended (exit code 1)"


@pytest.mark.parametrize(
    ("name", "words"), [("ray.json", '{"state": "ended"}'), ("slurm/state", "state=ended\ncause=exit code 0\n")]
)
def test_nor_is_it_where_another_engine_keeps_the_syncer(tmp_path, name, words):
    found = tmp_path / "units" / "syncer" / name
    found.parent.mkdir(parents=True)
    found.write_text(words)
    with kept(tmp_path, "raise SystemExit(1)") as island:
        assert island.stands(UnitState.STOPPED).cause.startswith("the run is over")


def test_a_shard_ends_with_its_syncer(tmp_path):
    folder = tmp_path / "units"
    with kept(tmp_path, FOREVER, name="shard-0", directory=folder / "shard-0") as shard:
        shard.says("here")
        with kept(tmp_path, "pass", name="syncer", directory=folder / "syncer"):
            status = shard.stands(UnitState.ENDED)
            assert status.cause == "the run is over"
            assert left_of(shard) == []


def test_a_shard_that_left_before_its_syncer_comes_back(tmp_path):
    with kept(tmp_path, POLITE, name="shard-0", directory=tmp_path / "units/shard-0") as shard:
        shard.says("here")
        send_signal(child_of(shard), signal.SIGTERM)
        shard.stands(UnitState.RUNNING, restarts=1)
        assert shard.said()[1:3] == ["goodbye", "[atoll] it has left, and its run continues; restarting in 1 s"]


def test_a_unit_that_ends_well_as_it_is_stopped_is_stopped(tmp_path):
    """Everybody hears SIGTERM at once when a machine goes down."""
    with kept(tmp_path, POLITE) as unit:
        unit.says("here")
        supervisor, child = supervisor_of(unit), child_of(unit)
        send_signal(supervisor, signal.SIGSTOP)
        send_signal(supervisor, signal.SIGTERM)
        send_signal(child, signal.SIGTERM)
        until(lambda: not is_alive(child))
        send_signal(supervisor, signal.SIGCONT)
        assert unit.stands(UnitState.STOPPED).cause == ""
        assert unit.said() == ["here", "goodbye"]


@pytest.mark.parametrize("damaged", ["", '{"supervisor": ', "[]"])
def test_a_damaged_state_is_that_of_a_killed_supervisor(tmp_path, damaged):
    with kept(tmp_path, STUBBORN, notice_s=0.5) as unit:
        unit.says("here")
        supervisor, child = supervisor_of(unit), child_of(unit)
        path = unit.unit.directory / "supervisor.json"
        path.write_text(damaged)
        with pytest.raises(OSError, match=r"supervisor\.json is damaged, and its supervisor runs: stop it"):
            unit.status()
        send_signal(supervisor, signal.SIGKILL)
        until(lambda: not is_alive(supervisor))
        assert unit.status().cause == "its supervisor was killed; its command is being stopped"
        KeptUnit(unit.unit).stands(UnitState.RUNNING)
        assert not is_alive(child)


def test_delays_before_restarts_grow_to_a_minute():
    restarts = RestartPolicy(BACKOFF_FIRST_S, BACKOFF_MAX_S, max_failures=10_001)
    delays = [restarts.record_failure(was_healthy=False) for _ in range(10_000)]
    assert [delays[place] for place in (0, 1, 2, 6, -1)] == [1.0, 2.0, 4.0, 60.0, 60.0]
    assert restarts.record_failure(was_healthy=True) == 1.0
    assert restarts.record_failure(was_healthy=True) is None


def test_what_this_machine_cannot_run_is_refused_before_anything_starts(tmp_path):
    def refused(command: tuple[str, ...] = ("python",), directory: Path = tmp_path / "a", **fields: object) -> str:
        with pytest.raises(ValueError, match=r"^a: ") as error:
            LocalLauncher().check(Unit("test", "a", command, directory, **fields))  # type: ignore[arg-type]
        return str(error.value)

    assert "there is no program 'no-such'" in refused(("no-such",))
    assert "nodes is 2, but launcher local has one machine" in refused(nodes=2)
    assert "launcher local has no options: remove partition" in refused(options={"partition": "x"})
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'} is not a directory" in refused(directory=tmp_path / "file" / "a")
    assert not (tmp_path / "a").exists()
    LocalLauncher().check(Unit("test", "a", ("torchrun",), tmp_path / "a"))  # next to the interpreter


def test_devices_are_dealt_out_and_never_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    code = "import os, signal; print('has', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); signal.pause()"
    folder = tmp_path / "units"
    with kept(tmp_path, code, devices=2) as first:
        first.says("has 4,5")
        with kept(tmp_path, code, name="b", directory=folder / "b", devices=1) as second:
            second.says("has 6")
            third = Unit("test", "c", python(code), folder / "c", devices=1)
            with pytest.raises(ValueError, match="c needs 1 devices, and 0 of 3 are free"):
                LocalLauncher().start(third)
        with kept(tmp_path, code, name="d", directory=folder / "d", devices=1) as fourth:
            fourth.says("has 6")  # which b has given back
    launcher = LocalLauncher()
    launcher.check(Unit("test", "a", ("python",), folder / "a", devices=2))
    with pytest.raises(ValueError, match="need 4 devices together, and this machine has 3"):
        launcher.check(Unit("test", "b", ("python",), folder / "b", devices=2))


def test_a_unit_of_another_machine_is_not_taken_for_lost(tmp_path):
    handle = {"directory": str(tmp_path), "host": "elsewhere", "notice_s": 1.0}
    for ask in (LocalLauncher().status, LocalLauncher().stop, LocalLauncher().log):
        with pytest.raises(OSError, match="it runs on elsewhere"):
            ask(handle)
    here = {**handle, "host": os.uname().nodename}
    assert LocalLauncher().status(here).state is UnitState.LOST


def test_a_full_disk_is_said_by_who_starts(tmp_path):
    unit = Unit("test", "a", python("pass"), tmp_path / "units/a")
    unit.directory.mkdir(parents=True)
    (unit.directory / "supervisor.lock").mkdir()  # no user can open that for writing
    with pytest.raises(OSError, match=r"a cannot be supervised: .*supervisor\.lock"):
        LocalLauncher().start(unit)


def test_what_is_rendered_shows_no_secret(tmp_path):
    unit = Unit(
        *("test", "a", ("python", "a b.py"), tmp_path / "a"),
        environment={"ATOLL_TOKEN": "hush", "ATOLL_LEARNER": "1"},
        secret_names=frozenset({"ATOLL_TOKEN"}),
        devices=1,
    )
    shown = LocalLauncher().render(unit)
    assert "hush" not in shown
    assert "ATOLL_TOKEN='(secret)'" in shown
    assert "ATOLL_LEARNER=1" in shown
    assert "python 'a b.py'" in shown
