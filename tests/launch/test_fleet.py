"""What `atoll up`, `down` and `logs` decide, with launchers that start nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from atoll.cli import fleet as fleet_commands
from atoll.cli.fleet import run_down, run_logs, run_up
from atoll.launch import fleet as of_fleet
from atoll.launch import launcher as launchers
from atoll.launch.fleet import Fleet
from atoll.launch.islands_file import IslandsFile
from atoll.launch.launcher import UnitState
from atoll.launch.units import build_units
from tests.launch.fake_launcher import FakeLauncher, use_fake_launchers

TWO = '[islands.a]\ncommand = "x"\n[islands.b]\ncommand = "x"\n'


@pytest.fixture(autouse=True)
def fakes(monkeypatch, tmp_path):
    use_fake_launchers(monkeypatch, tmp_path)
    for module, name in (
        (of_fleet, "POLL_INTERVAL_S"),
        (of_fleet, "REMOTE_POLL_INTERVAL_S"),
        (fleet_commands, "LOG_POLL_INTERVAL_S"),
    ):
        monkeypatch.setattr(module, name, 0.0)


def fleet_of(folder: Path, islands: str = TWO, launcher: str = "fake", syncer: str = "") -> Fleet:
    path = folder / "islands.toml"
    path.write_text(f'[syncer]\nlauncher = "{launcher}"\n{syncer}\n{islands}')
    return Fleet(IslandsFile.load(path))


def up(fleet: Fleet) -> dict[str, str]:
    said: dict[str, str] = {}
    fleet.up(build_units(fleet.file, "a token"), said.__setitem__)
    return said


def finish(fleet: Fleet) -> None:
    (fleet.file.directory / "store").mkdir(parents=True)
    (fleet.file.directory / "store/manifest.json").touch()


def test_up_restarts_island_that_left_while_run_goes_on(tmp_path):
    fleet = fleet_of(tmp_path)
    up(fleet)
    FakeLauncher.states["a"] = UnitState.ENDED
    assert up(fleet) == {"syncer": "is running: unchanged", "a": "restarted", "b": "is running: unchanged"}
    FakeLauncher.states["a"] = UnitState.ENDED
    finish(fleet)
    assert up(fleet)["a"] == "has ended: unchanged"


def test_ended_islands_stay_ended_while_model_of_shards_is_gathered(tmp_path):
    fleet = fleet_of(tmp_path, syncer="shards = 1")
    up(fleet)
    finish(fleet)
    FakeLauncher.states |= {"a": UnitState.ENDED, "shard-0": UnitState.ENDED}
    said = up(fleet)
    assert (said["a"], said["shard-0"]) == ("has ended: unchanged", "restarted")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_unit_is_stored_before_a_signal_ends_its_starter(tmp_path, number):
    """As when a terminal is closed."""
    fleet = fleet_of(tmp_path)
    known_then: list[list[str]] = []

    def end(*_: object) -> None:
        known_then.append(list(fleet.read_units()))
        raise InterruptedError

    before = signal.signal(number, end)
    try:
        FakeLauncher.on_start.append(lambda: signal.raise_signal(number))
        with pytest.raises(InterruptedError):
            up(fleet)
    finally:
        signal.signal(number, before)
    assert FakeLauncher.submitted == [("syncer",)]
    assert known_then == [["syncer"]]
    FakeLauncher.on_start.clear()
    assert up(fleet)["syncer"] == "is running: unchanged"


def test_islands_of_one_table_are_one_array_if_launcher_supports_it(tmp_path):
    many = '[islands.many]\ncommand = "x"\ncount = 3\n'
    fleet = fleet_of(tmp_path, TWO + many, launcher="arrays")
    assert up(fleet)["many-2"] == "started by launcher arrays"
    assert FakeLauncher.submitted == [("syncer",), ("a",), ("b",), ("many-1", "many-2", "many-3")]
    assert fleet.read_units()["many-2"].handle == {"name": "many-2"}
    FakeLauncher.submitted.clear()
    FakeLauncher.states |= {"many-1": UnitState.FAILED, "many-3": UnitState.STOPPED}
    up(fleet)
    assert FakeLauncher.submitted == [("many-1", "many-3")]

    other = tmp_path / "other"
    other.mkdir()
    FakeLauncher.submitted.clear()
    up(fleet_of(other, many))
    assert FakeLauncher.submitted == [("syncer",), ("many-1",), ("many-2",), ("many-3",)]


def test_up_warns_of_address_unreachable_from_other_machines(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(launchers.LAUNCHERS, "slurm", launchers.LAUNCHERS["fake"])
    run_up(fleet_of(tmp_path, launcher="slurm").file.path, dry_run=True)
    assert capsys.readouterr().err.startswith("atoll: syncer.address is 127.0.0.1:7400, which is a loopback address")
    run_up(fleet_of(tmp_path).file.path, dry_run=True)
    assert capsys.readouterr().err == ""


def test_unit_on_lost_machine_can_be_forgotten(tmp_path, capsys):
    fleet = fleet_of(tmp_path)
    up(fleet)
    path = fleet.file.path
    FakeLauncher.silent.append("a")
    how = f"if it is lost for good: atoll down {path} a --forget"
    assert up(fleet)["a"] == f"no status: no answer; unchanged; {how}"

    FakeLauncher.silent += ["a", "a"]
    said: dict[str, str] = {}
    assert not fleet.down(["a"], said.__setitem__)
    assert said == {"a": f"cannot be stopped: no answer; {how}"}

    with pytest.raises(ValueError, match=r"--forget needs the names of the lost units"):
        run_down(path, forget=True)
    FakeLauncher.silent.append("a")
    run_down(path, ["a"], forget=True)
    assert "a: forgotten: no status: no answer; if it still runs there, stop it there" in capsys.readouterr().out
    assert list(fleet.read_units()) == ["syncer", "b"]
    assert up(fleet)["a"] == "started by launcher fake"

    assert not fleet.forget(["b"], said.__setitem__)
    assert said["b"] == f"is running, and its launcher replies: run atoll down {path} b"


def test_silent_launcher_at_end_of_run_does_not_fail_the_run(tmp_path):
    fleet = fleet_of(tmp_path)
    up(fleet)
    FakeLauncher.states |= {"syncer": UnitState.ENDED, "a": UnitState.ENDED, "b": UnitState.WAITING}
    refused = iter((True, False))

    def show(looks: object) -> None:
        if next(refused, False):
            FakeLauncher.silent.append("b")  # during stop

    assert {look.name: look.state for look in fleet.follow(show)} == {
        "syncer": "ended",
        "a": "ended",
        "b": "stopped",
    }
    assert FakeLauncher.silent == [], "the fault fired"


def test_logs_are_followed_after_one_failed_request(tmp_path, capsys):
    fleet = fleet_of(tmp_path)
    up(fleet)
    (tmp_path / "a.log").write_text("first\n")
    FakeLauncher.silent.append("a")
    FakeLauncher.asked.clear()

    class Ends(dict[str, UnitState]):
        """It prints once more, and has ended."""

        def get(self, name, default=None):
            (tmp_path / "a.log").write_text("first\nlast\n")
            return UnitState.ENDED

    FakeLauncher.states = Ends()
    run_logs(fleet.file.path, ["a"], follow=True)
    assert capsys.readouterr().out == "a | first\na | last\n"
    assert FakeLauncher.asked == ["a", "a"], "no other unit is requested"
