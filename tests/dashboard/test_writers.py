"""Export of curves, read back with the readers of each format."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.dashboard.curves import compute_curve, list_series
from atoll.dashboard.run_history import RunHistory
from atoll.dashboard.writers import CsvWriter, Exporter, export, is_finished
from tests.tiny_run import eventful_run

FOUNDED_AT = 1_700_000_000.0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return an eventful run with metrics next to its tapes."""
    directory = eventful_run().save(tmp_path_factory.mktemp("eventful"))
    (directory / "store").mkdir(exist_ok=True)
    (directory / "store/run.json").write_text(json.dumps({"value": {"founded_at": FOUNDED_AT}}))
    (directory / "metrics").mkdir(exist_ok=True)
    with open(directory / "metrics/eval.jsonl", "w") as file:
        for second in (5, 15):
            print(json.dumps({"at": FOUNDED_AT + second, "loss": 2.0 - second / 20, "tokens": 256}), file=file)
    with open(directory / "metrics/syncer.jsonl", "w") as file:
        for second in range(1, 30):
            times = {"at": second, "wall": FOUNDED_AT + second}
            measured = {"cosine": 0.5, "delta_norm": 1.0 / second, "norms": {"1": 2.0, "2": 3.0}}
            print(json.dumps({"kind": "learner", "learner": 1, **times, "loss": 3.0 - second / 20}), file=file)
            print(json.dumps({"kind": "merge", "fragment": second % 3, **times, **measured}), file=file)
    return directory


@pytest.fixture(scope="module")
def history(run):
    found = RunHistory(run)
    while found.update():
        pass
    return found


def read_csv_folder(folder: Path) -> dict[str, list[dict[str, str]]]:
    found = {}
    for path in sorted(folder.glob("*.csv")):
        with open(path, newline="") as file:
            found[path.name.removesuffix(".csv")] = list(csv.DictReader(file))
    return found


def assert_equals_curve(rows, history, name):
    expected = compute_curve(history, name, points=1_000_000)
    assert [float(row["value"]) for row in rows] == pytest.approx(list(expected.y), rel=1e-6)
    assert [float(row["at"]) for row in rows] == pytest.approx(list(expected.x), abs=1e-3)
    assert [float(row["wall"]) for row in rows] == pytest.approx([FOUNDED_AT + at for at in expected.x], abs=1e-2)
    assert [int(row["tokens"]) for row in rows] == [round(history.tokens_until(at)) for at in expected.x]


def test_csv_has_every_curve(run, history, tmp_path, capsys):
    assert main(["curves", str(run), "--csv", str(tmp_path / "table"), "--json"]) == 0
    reply = json.loads(capsys.readouterr().out)
    found = read_csv_folder(tmp_path / "table")
    assert sorted(found) == reply["curves"]
    drawn = {series.name for series in list_series(history) if compute_curve(history, series.name).x}
    assert set(found) == drawn
    for name in (
        "loss.learner.1",
        "loss.published",
        "merge.cosine",
        "norm.learner.2",
        "merges.contributions",
        "grace.used",
    ):
        assert_equals_curve(found[name], history, name)
    assert sum(map(len, found.values())) == reply["points"]
    assert 10 < len(found["goodput"]) <= 600


ALL = float("inf")


def entry_time(line: bytes) -> float:
    """Return the time of a tape entry or metrics line; any other line counts as present from the start."""
    found = json.loads(line)
    at = found[1][0] if isinstance(found, list) else found.get("at", 0.0)
    if not isinstance(at, int | float):
        return 0.0
    return at - FOUNDED_AT if at > FOUNDED_AT else at


def test_export_of_growing_run_equals_export_at_end(run, tmp_path):
    """The exporter sees the tapes and metrics as they were at four times."""
    growing = tmp_path / "growing"
    files = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}

    def copy(until: float) -> None:
        for path, data in files.items():
            stored = [line for line in data.splitlines(keepends=True) if entry_time(line) <= until]
            if stored and (len(stored) > 1 or path.suffix == ".json"):
                (growing / path).parent.mkdir(parents=True, exist_ok=True)
                (growing / path).write_bytes(b"".join(stored))
        if until == ALL:
            (growing / "report.json").write_text('{"eval_loss_before": 9.0, "eval_loss": 1.0}')

    moments = iter((13.0, 21.0))
    copy(5.0)
    (tmp_path / "parts").mkdir()
    (tmp_path / "once").mkdir()
    counts = []
    history = RunHistory(growing)
    done = export(
        history,
        [CsvWriter(tmp_path / "parts")],
        follow=True,
        on_poll=lambda exporter: counts.append(exporter.points),
        wait=lambda seconds: copy(next(moments, ALL)),
    )
    assert is_finished(history)
    assert len(set(counts)) == 4
    assert counts == sorted(counts)
    export(RunHistory(run), [CsvWriter(tmp_path / "once")])
    parts, once = read_csv_folder(tmp_path / "parts"), read_csv_folder(tmp_path / "once")
    for name in ("loss.learner.1", "merge.cosine", "merges.contributions", "merges.alive"):
        assert [row["value"] for row in parts[name]] == [row["value"] for row in once[name]]
    assert [float(row["value"]) for row in parts["loss.published"]] == [1.75, 1.25, 9.0, 1.0]
    assert done.points == counts[-1]
    times = [float(row["at"]) for row in parts["throughput"]]
    assert times == sorted(times)


def test_exporter_writes_no_point_twice(run, tmp_path):
    history = RunHistory(run)
    while history.update():
        pass
    exporter = Exporter(history, [])
    exporter.export()
    points = exporter.points
    exporter.export()
    assert exporter.points == points > 0


def test_tensorboard_reads_event_file(run, history, tmp_path, capsys):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main(["curves", str(run), "--tensorboard", str(tmp_path)]) == 0
    assert f"tensorboard --logdir {tmp_path}" in capsys.readouterr().out
    board = EventAccumulator(str(tmp_path / run.name), size_guidance={"scalars": 0})
    board.Reload()
    assert "loss/learner.1" in board.Tags()["scalars"]
    for name in ("loss.learner.1", "merge.delta_norm", "merges.contributions"):
        expected = compute_curve(history, name, points=1_000_000)
        found = board.Scalars(name.replace(".", "/", 1))
        assert [scalar.value for scalar in found] == pytest.approx(list(expected.y), rel=1e-6)
        assert [scalar.step for scalar in found] == [round(history.tokens_until(at)) for at in expected.x]
        assert [scalar.wall_time for scalar in found] == pytest.approx([FOUNDED_AT + at for at in expected.x])


class Listener:
    """Server that counts connections. Every address that data could be sent to leads to it."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.connections = 0
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            connection.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def environment_for(port: int) -> dict[str, str]:
    """Return an environment in which every request goes to this port: through proxies, or as the service itself."""
    address = f"http://127.0.0.1:{port}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
    known = {name: value for name, value in os.environ.items() if not name.lower().startswith(("wandb", "no_proxy"))}
    settings = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40, "OTEL_EXPORTER_OTLP_ENDPOINT": address}
    return known | dict.fromkeys(names, address) | settings


@pytest.mark.long
def test_wandb_export_is_offline_and_opens_no_connection(run, tmp_path):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    listener = Listener()
    environment = environment_for(listener.port) | {"HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "atoll", "curves", str(run), "--wandb", str(tmp_path / "wb"), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "loss.learner.1" in json.loads(done.stdout)["curves"]
    (folder,) = (tmp_path / "wb/wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    data = file.read_bytes()
    assert b"loss/learner.1" in data
    assert b"merge/cosine" in data
    assert listener.connections == 0, "something was sent"
    script = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{listener.port}', timeout=5)"
    subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, timeout=300, check=False)
    assert listener.connections > 0, "the listener receives no connections"
    listener.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no format is given"),
        (["--csv", "{full}"], "is not empty"),
        (["--tensorboard", "{full}"], "is not empty"),
    ],
)
def test_invalid_options_are_refused_before_writing(run, tmp_path, capsys, options, message):
    full = tmp_path / "full"
    (full / run.name).mkdir(parents=True)
    (full / run.name / "kept").write_text("")
    assert main(["curves", str(run), *(option.format(full=full) for option in options)]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in full.rglob("*")] == [run.name, "kept"]


@pytest.mark.parametrize(("option", "package"), [("--tensorboard", "tensorboard"), ("--wandb", "wandb")])
def test_missing_package_names_the_extra_to_install(run, tmp_path, capsys, monkeypatch, option, package):
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert main(["curves", str(run), option, str(tmp_path / "out")]) == 2
    assert f"pip install 'atoll[{package}]'" in capsys.readouterr().err


def test_curves_refuses_directory_without_tapes(tmp_path, capsys):
    assert main(["curves", str(tmp_path), "--csv", str(tmp_path / "out")]) == 2
    assert "no folder" in capsys.readouterr().err
