"""`atoll simulate`: figures, tables, tapes, and refused options."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import pytest

from atoll.cli.main import main
from atoll.cli.output import run_tasks
from atoll.tape.files import RunTapes

SHORT = ("--learners", "4", "--chips", "400000", "--days", "0.01")
METHODS_WITHOUT_CORES = ("data-parallel", "elastic", "diloco", "streaming")


def run_command(capsys, *arguments: str):
    """Run the command, and return its stdout; it must succeed."""
    code = main(["simulate", *arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def fields(capsys, *arguments: str):
    return json.loads(run_command(capsys, *arguments, "--json"))


def python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)


# --------------------------------------------------------------------------------------------------------------------
# One run


def test_json_has_every_figure_with_its_interval(capsys):
    run = fields(capsys, *SHORT, "--jobs", "1")
    assert (run["method"], run["learners"], run["chips"], run["days"]) == ("decoupled", 4, 400_000, 0.01)
    assert run["seeds"] == [0, 1, 2]
    for name in ("goodput", "uptime"):
        low, high = run[f"{name}_ci"]
        assert 0 <= low <= run[name] <= high <= 1
    tokens = run["tokens"]
    assert set(tokens) == {"trained", "merged", "pending", "dropped"}
    assert tokens["trained"] == pytest.approx(tokens["merged"] + tokens["pending"] + tokens["dropped"])
    assert 1 <= run["contributions_per_merge"] <= 4
    assert 15 < run["effective_h"] < 30
    assert 1 <= run["staleness_steps"] < 3
    assert run["failures"] > 0
    assert run["settings"]["quorum"] == 1
    assert run["settings"]["fragments"] == 24
    assert run["simulated"]["full"] is True
    assert run["simulated"]["protocol_hours"] == pytest.approx(0.24)
    assert run["tape"] is None


def test_long_run_reports_which_part_ran_on_the_cores(capsys):
    run = fields(capsys, "--days", "2", "--seeds", "2", "--protocol-hours", "2", "--jobs", "1")
    how = run["simulated"]
    assert (how["goodput_by"], how["goodput_days"], how["protocol_hours"]) == ("fleet", 2.0, 2.0)
    assert (how["full"], how["fragments"], how["steps_per_event"]) == (False, 1, 3)
    assert how["core_goodput_in_protocol_hours"] == pytest.approx(how["fleet_goodput_in_protocol_hours"], abs=0.002)
    assert "first 2 hours with 1 of 24 fragments" in how["sentence"]
    assert run["goodput"] == pytest.approx(0.88, abs=0.02)
    assert run["published"] == {"goodput": 0.88, "uptime": 1.0}
    assert run["tokens_trained_in_goodput_days"] > 20 * run["tokens"]["trained"]


def test_summary_has_all_figures_as_text(capsys):
    output = run_command(capsys, "--days", "2", "--seeds", "2", "--protocol-hours", "0.5", "--jobs", "1")
    arguments = " ".join(output.split())
    for expected in (
        "decoupled: 8 learners on 1,200,000 chips for 2 days, seeds 0 to 1",
        "goodput: chip time in steps that counted 88.",
        "95 % interval",
        "merged",
        "contributions per merge, of 8",
        "staleness",
        "effective H",
        "the first 30 minutes with every fragment and every step",
        "For that time goodput is",
        "Published for this case: goodput 88 %, uptime 100 %.",
    ):
        assert expected in arguments
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.long
def test_one_seed_has_no_interval(capsys):
    run = fields(capsys, *SHORT, "--seeds", "1")
    assert run["goodput_ci"] is None
    assert "95 %" not in run_command(capsys, *SHORT, "--seeds", "1")


@pytest.mark.parametrize("method", METHODS_WITHOUT_CORES)
def test_undefined_figures_of_a_method_are_null(method, capsys):
    run = fields(capsys, "--method", method, "--learners", "8", "--days", "0.2", "--seeds", "2", "--jobs", "1")
    waits = method in ("diloco", "streaming")
    assert run["learners"] == (8 if waits else 1)
    assert run["contributions_per_merge"] == (8 if waits else None)
    assert run["effective_h"] == (24 if waits else None)
    assert run["staleness_steps"] is None
    assert run["tokens"]["trained"] > 0
    assert run["tokens"]["merged"] is None
    assert 0.2 < run["goodput"] < 0.7
    assert run["simulated"]["goodput_by"] == "fleet"
    assert method in run_command(capsys, "--method", method, "--days", "0.05", "--seeds", "2", "--jobs", "1")


@pytest.mark.long
def test_goodput_of_methods_has_the_published_order(capsys):
    arguments = ("--days", "0.3", "--seeds", "2", "--jobs", "1", "--protocol-hours", "0.2")
    goodput = {m: fields(capsys, "--method", m, *arguments[: 6 if m != "decoupled" else 8])["goodput"] for m in METHODS}
    assert goodput["decoupled"] > goodput["elastic"] > goodput["data-parallel"]
    assert goodput["decoupled"] > goodput["diloco"]


METHODS = ("decoupled", *METHODS_WITHOUT_CORES)


def test_every_setting_of_the_model_reaches_the_model(capsys):
    plain = fields(capsys, *SHORT, "--seeds", "1")
    worse = fields(
        capsys,
        *(*SHORT, "--seeds", "1", "--jitter", "0.1", "--chip-variance", "0.02", "--slow-downs", "60:0.5:30"),
        *("--speeds", "1.0x2,0.5x2", "--extra", "2x0.8@0-300", "--extra", "1@100-200,300-400", "--quorum", "2"),
        *("--grace", "0.2", "--every", "12", "--fragments", "6", "--tau", "3", "--adopt", "overwrite"),
        *("--delay", "0.1", "--fragment-time", "0.3", "--step-time", "2", "--mtbi-days", "100"),
    )
    settings = worse["settings"]
    assert settings["speeds"] == [1.0, 1.0, 0.5, 0.5]
    assert settings["extra"][1] == {"count": 1, "speed": 1.0, "windows_s": [[100.0, 200.0], [300.0, 400.0]]}
    assert (settings["slow_downs_per_hour"], settings["slow_down_factor"], settings["slow_down_mean_s"]) == (
        60,
        0.5,
        30,
    )
    assert (settings["quorum"], settings["grace"], settings["every_steps"], settings["fragments"]) == (2, 0.2, 12, 6)
    assert (settings["tau_steps"], settings["adopt"], settings["jitter"]) == (3, "overwrite", 0.1)
    assert (settings["delay_s"], settings["fragment_time_s"], settings["step_time_s"]) == (0.1, 0.3, 2.0)
    assert worse["tokens"]["dropped"] > 0 == plain["tokens"]["dropped"]
    assert set(worse["tokens_dropped_by_reason"]) == {"overwritten-on-adopt", "left"}
    assert worse["effective_h"] < plain["effective_h"]
    assert worse["failures"] > plain["failures"]
    assert worse["published"] is None


def test_lockstep_has_its_goodput_from_the_cores(capsys):
    arguments = (
        "--quorum",
        "4",
        "--grace",
        "0",
        "--lockstep",
        "--days",
        "2",
        "--protocol-hours",
        "0.2",
        "--seeds",
        "1",
    )
    run = fields(capsys, "--learners", "4", "--chips", "400000", *arguments)
    assert run["simulated"]["goodput_by"] == "cores"
    assert run["simulated"]["goodput_days"] == pytest.approx(0.2 / 24)
    assert "lockstep" in run["simulated"]["sentence"]
    assert run["contributions_per_merge"] == 4.0


@pytest.mark.long
def test_full_simulates_every_fragment_and_step(capsys):
    arguments = ("--learners", "16", "--chips", "160000", "--days", "0.05", "--seeds", "1")
    assert fields(capsys, *arguments)["simulated"]["full"] is False
    run = fields(capsys, *arguments, "--full", "--every", "6", "--fragments", "2")
    assert (run["simulated"]["full"], run["simulated"]["fragments"]) == (True, 2)


@pytest.mark.long
def test_the_same_seed_prints_the_same_on_one_core_and_on_two():
    arguments = ["simulate", *SHORT, "--days", "0.003", "--jitter", "0.1", "--seed", "5"]
    runs = [
        subprocess.run(
            [sys.executable, "-m", "atoll", *arguments, *more], capture_output=True, text=True, timeout=300, check=True
        )
        for more in (["--json", "--jobs", "1"], ["--json", "--jobs", "2"], ["--jobs", "2"])
    ]
    assert runs[0].stdout == runs[1].stdout
    assert json.loads(runs[0].stdout)["seeds"] == [5, 6, 7]
    assert [run.stderr for run in runs] == ["", "", ""]  # no progress bar without a terminal


# --------------------------------------------------------------------------------------------------------------------
# Tables and figures


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    plot = tmp_path_factory.mktemp("plot") / "table.svg"
    arguments = ["simulate", "--table", "--days", "1", "--seeds", "3", "--json", "--plot", str(plot)]
    done = subprocess.run(
        [sys.executable, "-m", "atoll", *arguments], capture_output=True, text=True, timeout=300, check=True
    )
    return json.loads(done.stdout), plot


@pytest.mark.long
def test_every_published_cell_is_within_three_points(cells):
    published = [cell for cell in cells[0]["cells"] if cell["published_percent"] is not None]
    assert len(published) == 16
    for cell in published:
        assert abs(cell["difference"]) < 3.0, cell
        assert cell["difference"] == pytest.approx(cell["percent"] - cell["published_percent"])


def test_the_table_has_all_rows_and_columns(cells):
    places = {(cell["metric"], cell["method"], cell["learners"], cell["chips"]) for cell in cells[0]["cells"]}
    assert len(places) == 2 * 6 * 5
    rows = {(method, learners) for _, method, learners, _ in places}
    assert rows == {("data-parallel", 1), ("elastic", 1), *(("decoupled", m) for m in (2, 4, 8, 16))}
    assert {chips for *_, chips in places} == {150_000, 300_000, 600_000, 1_200_000, 2_400_000}


def test_the_figure_names_what_it_shows(cells):
    output = cells[1].read_text()
    assert "<svg" in output
    assert cells[0]["plot"] == str(cells[1])
    for word in ("Goodput", "Uptime", "one job, not elastic", "M = 16", "published", "95 % interval", "1.2M"):
        assert f"<!-- {word}" in output


def test_the_tables_fit_a_terminal(capsys):
    output = run_command(capsys, "--table", "--days", "0.05", "--seeds", "2", "--jobs", "1")
    assert max(map(len, output.splitlines())) <= 80
    for word in ("goodput, %", "uptime, %", "one job, elastic", "M = 16", "2.4M", "±", "predictions"):
        assert word in output


@pytest.mark.long
def test_a_run_is_marked_in_the_figure(capsys, tmp_path):
    plot = tmp_path / "run.png"
    arguments = (*SHORT, "--seeds", "1", "--jobs", "1", "--mtbi-days", "20000", "--plot", str(plot))
    assert f"The figure is in {plot}." in run_command(capsys, *arguments)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_mixed_hardware_is_shown_next_to_the_published_row(capsys):
    arguments = ("--mixed", "--days", "0.01", "--seeds", "2", "--jobs", "1")
    rows = fields(capsys, *arguments)["rows"]
    assert [(row["quorum"], row["grace"]) for row in rows] == [(8, False), (1, False), (1, True)]
    assert [row["published_goodput"] for row in rows] == [0.84, 1.0, 1.0]
    assert 0.80 < rows[0]["goodput_fast"] < 0.86
    assert rows[1]["goodput"] > 0.99 < rows[2]["goodput"]
    assert rows[0]["contributions_per_merge"] == 8.0
    assert rows[1]["contributions_per_merge"] == 1.0
    assert 5.0 < rows[2]["contributions_per_merge"] < 8.0
    output = " ".join(run_command(capsys, *arguments, "--days", "0.004").split())
    assert "The paper does not define goodput for the published row." in output
    assert "contributions per merge 8.00 ±0.00 1.00 ±0.00" in output


# --------------------------------------------------------------------------------------------------------------------
# Tapes


def test_a_simulated_run_leaves_tapes_that_every_tool_reads(capsys, tmp_path):
    run = tmp_path / "run"
    arguments = ("--learners", "3", "--chips", "600000", "--days", "0.005", "--seed", "4", "--tape", str(run))
    output = fields(capsys, *arguments, "--extra", "1@60-200")
    assert output["seeds"] == [4]
    assert (output["tape"]["tapes"], output["tape"]["finished"]) == (5, True)
    tapes = RunTapes(run)
    assert sorted(path.name for path in (run / "tapes").iterdir()) == [
        *(f"learner-{n}-i1.tape" for n in (1, 2, 3, 4)),
        "syncer-e1.tape",
    ]
    headers = [reader.header for reader in tapes.readers.values()]
    assert {(header.seed, header.note) for header in headers} == {(4, "simulated")}
    assert {header.config.every_steps for header in headers} == {24}

    assert main(["check", str(run), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["violation"], verdict["finished"], verdict["missing"]) == (None, True, [])
    assert verdict["entries"] == output["tape"]["entries"]
    assert main(["replay", str(run)]) == 0
    assert "every effect is as recorded" in capsys.readouterr().out
    assert main(["story", str(run), "--learner", "1"]) == 0
    assert "learner 1: adopted version" in capsys.readouterr().out


@pytest.mark.long
def test_coarse_tapes_have_no_violation(capsys, tmp_path):
    run = tmp_path / "run"
    arguments = ("--learners", "2", "--chips", "600000", "--days", "3", "--protocol-hours", "6", "--tape", str(run))
    assert fields(capsys, *arguments)["simulated"]["full"] is False
    assert main(["check", str(run)]) == 0
    assert "no violation" in capsys.readouterr().out


def test_a_tape_is_never_overwritten(capsys, tmp_path):
    (tmp_path / "precious").write_text("")
    assert main(["simulate", *SHORT, "--tape", str(tmp_path)]) == 2
    assert "is not empty, and a tape is never overwritten" in capsys.readouterr().err
    assert main(["simulate", *SHORT, "--tape", str(tmp_path / "precious")]) == 2
    assert "is a file; give --tape a directory" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------------
# Invalid options


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--every 0", "every_steps must be a whole number of at least 1, got 0"),
        ("--quorum 9", "quorum 9 with 8 learners never merges; give at most 8"),
        ("--chips 7", "give at least one to each of the 8 learners"),
        ("--learners 0", "give 1 to 4096"),
        ("--learners 1100 --days 0.001 --seeds 1", "1024 learners at most"),
        ("--days 0", "days is 0; give a number above 0"),
        ("--days -1", "days is -1; give a number above 0"),
        ("--days nan", "give a number above 0"),
        ("--method sync", "unknown method 'sync'; give one of decoupled, data-parallel"),
        ("--speeds fast", "write SPEEDxCOUNT, such as 1.0x4,0.82x4"),
        ("--speeds 1x3", "give one for each of the 8 learners"),
        ("--extra 4", "write COUNT@JOIN-LEAVE"),
        ("--slow-downs 1:2", "write RATE:FACTOR:SECONDS"),
        ("--slow-downs 1:2:3", "slowdown_factor is 2.0"),
        ("--seeds 0", "give at least 1"),
        ("--jobs 0", "give at least 1"),
        ("--grace 1", "0 turns the grace window off"),
        ("--adopt maybe", "carry, overwrite or blend"),
        ("--mtbi-days 0", "give days above 0, or inf"),
        ("--protocol-hours 0", "give a number above 0"),
        ("--plot nowhere/figure.png", "there is no directory nowhere; create it first"),
        ("--plot figure.gif", "end its name with .png, .svg or .pdf"),
        ("--tape run --seeds 2", "--tape records one run, and 2 seeds are 2 runs; give --seeds 1"),
        ("--method elastic --tape run", "--tape has no effect with elastic; omit it"),
        ("--method elastic --speeds 1x8", "--speeds has no effect with elastic"),
        ("--method diloco --extra 1@0-9", "--extra has no effect with diloco"),
        ("--table --chips 5", "--chips has no effect with --table"),
        ("--table --seeds 1", "give --seeds 2 or more"),
        ("--table --method elastic", "--table has its own methods"),
        ("--table --mixed", "give only one of them"),
        ("--mixed --plot figure.png", "not of --mixed"),
        ("--mixed --quorum 2", "--quorum has no effect with --mixed"),
        ("--exchange-time 3", "--exchange-time has no effect with decoupled"),
    ],
)
def test_invalid_option_is_refused_with_one_line_and_the_fix(arguments, sentence, capsys):
    assert main(["simulate", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("atoll: ")
    assert sentence in err


def test_a_missing_matplotlib_names_the_extra():
    script = "import sys; sys.modules['matplotlib'] = None\nfrom atoll.cli.main import main\n"
    done = python(f"{script}sys.exit(main(['simulate', '--plot', 'figure.png']))")
    assert done.returncode == 2
    assert done.stderr == ("atoll: --plot needs matplotlib of the extra 'plot': pip install 'atoll[plot]'\n")


# --------------------------------------------------------------------------------------------------------------------
# Processes


def test_results_come_in_the_order_of_the_tasks():
    def square(number, report):
        report(1.0)
        return number * number

    tasks = [partial(square, number) for number in range(7)]
    for jobs in (1, 3):
        assert run_tasks("", tasks, jobs) == [0, 1, 4, 9, 16, 25, 36]


def test_exception_in_a_process_is_raised_by_run_tasks():
    def bad(report):
        report(0.5)
        raise ValueError("four is too few")

    with pytest.raises(ValueError, match="four is too few") as caught:
        run_tasks("", [bad, lambda report: 1], jobs=2)
    assert "in bad" in str(caught.value.__cause__)


def test_ctrl_c_ends_every_process():
    script = (
        "import multiprocessing, os, signal, sys\n"
        "from atoll.cli.output import run_tasks\n"
        "def interrupt(report):\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "    signal.pause()\n"
        "try:\n"
        "    run_tasks('', [interrupt, lambda report: signal.pause()], jobs=2)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted with', len(multiprocessing.active_children()), 'left')\n"
    )
    assert python(script).stdout == "interrupted with 0 left\n"


def test_a_process_that_was_killed_is_reported():
    script = (
        "import os, signal\n"
        "from atoll.cli.output import run_tasks\n"
        "try:\n"
        "    run_tasks('', [lambda report: os.kill(os.getpid(), signal.SIGKILL), lambda report: 1], jobs=2)\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    assert python(script).stdout.startswith("a process of the simulation was killed")
