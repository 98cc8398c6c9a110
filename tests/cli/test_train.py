"""`atoll train` and related commands with real processes on loopback: about a second of training each, with faults."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys

import pytest

from atoll.checkpoint.model_file import model_digest
from atoll.cli import options, train
from atoll.cli.check import check_with_progress
from atoll.cli.main import main
from atoll.core.settings import declared_settings
from atoll.dashboard.terminal import LiveView
from atoll.logs import LOG_FORMAT_VARIABLE
from atoll.reference.child_processes import JobFailedError
from atoll.reference.job import AlreadyFinishedError, resume_job, start_job
from atoll.reference.job_settings import ADAMW_NUMERICS, SNAPSHOT_MERGES_PER_FRAGMENT, JobSettings, PlannedKill
from atoll.reference.loop import read_metrics
from atoll.reference.saved_models import load_model
from atoll.sim.checkers import create_checkers
from atoll.tape.files import RunTapes
from tests.reference.small_jobs import LIMIT_S, find_processes, load_corpus, silent_view, small_settings, small_text
from tests.shared_runs import make_once

STEP = 2 * 16  # tokens of one step of one learner
STEPS = 200  # of each learner of the whole job


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("data") / "text")


def small(text, *arguments):
    """Return the options of a job that takes about a second."""
    return [
        *("--data", str(text), "--model", "100k", "--context", "16", "--batch", "2", "--eval-tokens", "256"),
        *("--every", "8", "--fragments", "8", "--step-time", "5ms"),
        *arguments,
    ]


def assert_tapes_are_sound(run):
    """Check every invariant except independence, because a busy machine may delay a step."""
    tapes = RunTapes(run)
    verdict = check_with_progress(
        tapes, [each for each in create_checkers(tapes.config) if each.name != "independence"]
    )
    assert verdict.violation is None, verdict.violation.message
    return verdict


# --------------------------------------------------------------------------------------------------------------------
# The whole job


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A run of three learners, of which the second was killed and restarted."""
    folder, (report, lines) = make_once(
        tmp_path_factory, "finished", lambda folder: train_with_kill(text, folder / "run")
    )
    return folder / "run", report, lines


def train_with_kill(text, run):
    out, err = io.StringIO(), io.StringIO()
    arguments = small(text, "--learners", "3", "--tokens", str(3 * STEPS * STEP), "--kill", "2@0.15+0.1", "--json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        assert main(["train", "--out", str(run), "--log-format", "json", *arguments]) == 0, err.getvalue()
    assert LOG_FORMAT_VARIABLE not in os.environ
    return json.loads(out.getvalue()), err.getvalue()


def test_the_learner_was_killed_and_came_back(finished):
    _, report, lines = finished
    (fault,) = report["faults"]
    assert (fault["who"], fault["what"], fault["planned"]) == ("learner 2", "SIGKILL", True)
    assert fault["away_s"] > 0.1
    assert [island["starts"] for island in report["islands"]] == [1, 2, 1]
    assert "learner 2 was killed on purpose" in lines
    assert "learner 2 is restarted" in lines


def test_report_equals_its_file_and_covers_the_budget(finished):
    run, report, _ = finished
    assert json.loads((run / "report.json").read_text(encoding="utf-8")) == report
    tokens = report["tokens"]
    assert tokens["trained"] >= 3 * STEPS * STEP
    assert tokens["trained"] == tokens["merged"] + tokens["pending"] + tokens["dropped"]
    assert report["steps"] * STEP == sum(island["tokens"] for island in report["islands"])
    assert report["rounds"] > STEPS / 6
    assert 0.5 < report["goodput"] <= 1.0
    assert report["eval_loss"] < report["eval_loss_before"]
    assert report["paced"] == {"step_time_s": 0.005, "speeds": []}
    assert report["bytes"]["up"] > 0 < report["bytes"]["down"]


def test_the_run_leaves_a_model_tapes_logs_metrics_and_its_settings(finished):
    run, report, _ = finished
    settings, model = load_model(run)
    assert settings.learners == 3
    assert model_digest(model) == report["final_digest"]
    verdict = assert_tapes_are_sound(run)
    assert verdict.finished
    assert verdict.gaps == []
    assert sorted(path.name for path in (run / "logs").iterdir()) == [
        *(f"learner-{n}.log" for n in (1, 2, 3)),
        "syncer.log",
    ]
    assert {line["start"] for line in read_metrics(run, 2)} == {1, 2}
    assert find_processes(run) == []


def ledger_of(run, capsys):
    """Return the output of `atoll ledger`, and assert that it balances."""
    capsys.readouterr()
    assert main(["ledger", str(run), "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["balanced"]
    assert fields["problems"] == fields["incomplete"] == []
    assert fields["samples"]["merged"] > 0
    return fields


def test_unmerged_samples_of_a_killed_learner_are_trained_by_others(finished, capsys):
    run, report, _ = finished
    fields = ledger_of(run, capsys)
    returned = [each for each in fields["ranges"] if any(lease["outcome"] == "returned" for lease in each["history"])]
    assert returned, "the killed learner had leases"
    for each in returned:
        first, then = each["history"][0], each["history"][-1]
        assert (first["learner"], first["incarnation"], first["cause"]) == (2, 1, "replaced by incarnation 2")
        assert then != first
    lost = [each for each in returned if each["history"][0]["trained"]]
    assert all(each["place"] == "merged" for each in lost), (
        "returned samples are leased again first, so they are merged"
    )
    trained = fields["samples"]["merged"] + fields["samples"]["held_trained"] + sum(e["end"] - e["begin"] for e in lost)
    assert trained == 2 * (report["steps"] - fields["repeated_steps"])  # samples of all steps, including lost ones
    assert main(["ledger", str(run)]) == 0
    assert "the ledger balances" in capsys.readouterr().out


@pytest.mark.long
def test_a_run_replays_to_the_same_effects(finished, capsys):
    assert main(["replay", str(finished[0])]) == 0
    assert "every effect is as recorded" in capsys.readouterr().out


def test_resuming_a_finished_run_prints_its_report(finished, capsys):
    run, report, _ = finished
    assert main(["train", "--out", str(run), "--resume"]) == 0
    assert capsys.readouterr().out.startswith(f"The run in {run} is finished")
    assert main(["train", "--out", str(run), "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert main(["train", "--out", str(run)]) == 2
    assert "is there already: choose another --out, go on with --resume" in capsys.readouterr().err


def test_summary_names_faults_figures_and_next_commands(finished):
    from atoll.cli.train import summary_lines
    from atoll.reference.report import ByteTotals, IslandReport, JobReport, PaceSettings, ProcessFault, TokenTotals

    run, fields, _ = finished
    report = JobReport(
        **{
            **fields,
            "tokens": TokenTotals(**fields["tokens"]),
            "bytes": ByteTotals(**fields["bytes"]),
            "paced": PaceSettings(0.005, ()),
            "faults": tuple(ProcessFault(**each) for each in fields["faults"]),
            "islands": tuple(IslandReport(**each) for each in fields["islands"]),
        }
    )
    sentences = " ".join(" ".join(summary_lines(report, load_model(run)[0], run)).split())
    for part in (
        "Learner 2 was killed on purpose",
        "Its unmerged samples were leased again",
        "The others ",
        "are merged into the model",
        "times as much",
        f"atoll check {run}",
        "atoll story",
        "atoll generate",
    ):
        assert part in sentences, sentences


# --------------------------------------------------------------------------------------------------------------------
# Interruptions and deaths


class At(LiveView):
    """A view that calls an action once, when the run has reached this progress."""

    def __init__(self, progress, action, after=None):
        super().__init__(io.StringIO())
        self.progress = progress
        self.action = action
        self.after = after  # file that must exist before the action
        self.fired = False

    def show(self, shown, bands=None, now=None):
        due = shown["progress"] >= self.progress and (self.after is None or self.after.exists())
        if due and not self.fired:
            self.fired = True
            self.action()


def ctrl_c():
    raise KeyboardInterrupt


def test_an_interrupted_run_ends_cleanly_and_goes_on(text, tmp_path, capsys):
    run = tmp_path / "run"
    settings = small_settings(text, tokens=2 * 300 * STEP, step_time_s=0.005, kills=(PlannedKill(1, 0.05, 0.0),))
    view = At(0.2, ctrl_c, after=run / "faults.jsonl")
    with pytest.raises(KeyboardInterrupt):
        start_job(settings, run, view, load_corpus(settings))
    assert view.fired
    assert find_processes(run) == []
    assert not (run / "report.json").exists()
    assert main(["generate", str(run), "a"]) == 2
    assert "finish the run with atoll train" in capsys.readouterr().err

    report = resume_job(run, silent_view()[0])
    assert report.tokens.trained >= settings.tokens
    assert report.islands[1].starts == 2
    ledger_of(run, capsys)
    assert [fault.planned for fault in report.faults] == [True]  # the planned kill is not repeated
    assert (run / "tapes/syncer-e2.tape").exists()
    assert assert_tapes_are_sound(run).finished
    with pytest.raises(AlreadyFinishedError):
        resume_job(run, silent_view()[0])


@pytest.mark.long
def test_a_syncer_that_dies_is_started_again_and_the_run_ends(text, tmp_path, capsys):
    run = tmp_path / "run"
    settings = small_settings(text, tokens=2 * 400 * STEP, step_time_s=0.005)

    def kill_the_syncer():
        (pid,) = (p for p in find_processes(run) if os.readlink(f"/proc/{p}/fd/2").endswith("syncer.log"))
        os.kill(pid, signal.SIGKILL)

    view = At(0.2, kill_the_syncer)
    report = start_job(settings, run, view, load_corpus(settings))
    assert view.fired
    assert [(fault.who, fault.what, fault.planned) for fault in report.faults] == [("syncer", "SIGKILL", False)]
    assert [island.starts for island in report.islands] == [1, 1]  # the learners continued to train
    assert report.tokens.trained >= settings.tokens
    assert assert_tapes_are_sound(run).finished
    assert all(len(each["history"]) == 1 for each in ledger_of(run, capsys)["ranges"])  # no learner was replaced


@pytest.mark.long
def test_processes_of_a_killed_job_exit(text, tmp_path):
    run = tmp_path / "run"
    arguments = small(text, "--learners", "2", "--tokens", "1G", "--out", str(run))
    with subprocess.Popen(
        [sys.executable, "-m", "atoll", "train", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stderr is not None
        while "1: step" not in job.stderr.readline():
            assert job.poll() is None
        children = [os.pidfd_open(pid) for pid in find_processes(run)]
        job.kill()
    assert len(children) == 3
    for child in children:
        ended, _, _ = select.select([child], [], [], LIMIT_S)
        os.close(child)
        assert ended, "a process of the job still runs"


def test_learners_that_cannot_start_end_the_job_with_their_error(text, tmp_path):
    run = tmp_path / "run"
    settings = small_settings(text, inner="nonsense")
    with pytest.raises(JobFailedError, match=r"learner \d cannot join: .*inner optimizer 'nonsense' is unknown"):
        start_job(settings, run, silent_view()[0], load_corpus(settings))
    assert find_processes(run) == []


# --------------------------------------------------------------------------------------------------------------------
# Several hosts


@pytest.mark.long
def test_a_syncer_and_learners_that_dial_in(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ATOLL_TOKEN", "a long secret")
    run = tmp_path / "run"
    arguments = small(text, "--learners", "2", "--tokens", str(2 * 100 * STEP), "--seed", "3")
    served = subprocess.Popen(
        [sys.executable, "-m", "atoll", "syncer", "--out", str(run), "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert served.stdout is not None
        address = served.stdout.readline().split()[-1].rstrip(".")
        assert main(["learner", "--syncer", address, "--token", "a wrong secret"]) == 2
        assert "refused" in capsys.readouterr().err
        code = main(["learner", "--syncer", address, "--out", str(tmp_path / "island"), "--json"])
        fields = json.loads(capsys.readouterr().out)
        assert (code, fields["learner"]) == (0, 1)
        assert fields["tokens"] >= 2 * 100 * STEP
        assert "is finished; its model is" in served.communicate(timeout=300)[0]
    finally:
        served.kill()
        served.wait()
    assert served.returncode == 0
    assert load_model(run)[0].seed == 3
    assert (tmp_path / "island/tapes/learner-1-i1.tape").exists()


@pytest.mark.long
def test_a_syncer_with_keys_for_other_machines_and_the_commands_that_reach_it(text, tmp_path, capsys):
    """The setup of docs/several-hosts.md: all addresses of this machine, with keys and a remote operator."""
    ring, run = tmp_path / "keys", tmp_path / "run"
    assert main(["keys", "init", str(ring), "--host", "localhost"]) == 0
    assert main(["keys", "add", str(ring), "far"]) == 0
    assert main(["keys", "add", str(ring), "ada", "--operator"]) == 0
    arguments = small(text, "--learners", "1", "--tokens", str(100 * STEP), "--step-time", "5ms")
    outside = ["syncer", "--out", str(run), "--host", "0.0.0.0", "--port", "0"]
    assert main([*outside, *arguments]) == 2
    assert "`atoll keys init DIR`" in capsys.readouterr().err
    assert not run.exists()
    served = subprocess.Popen(
        [sys.executable, "-m", "atoll", *outside, "--keys", str(ring), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert served.stdout is not None
        port = served.stdout.readline().split()[-1].rstrip(".").rpartition(":")[2]
        assert f"atoll learner --syncer HOST:{port} --keys DIR" in served.stdout.readline()
        head = f"localhost:{port}"
        capsys.readouterr()
        assert main(["control", head, "grace", "0.5", "--keys", str(ring / "ada")]) == 1
        assert "has no model yet" in capsys.readouterr().err
        assert main(["control", head, "grace", "0.5", "--keys", str(ring / "far")]) == 2
        assert "not one of an operator" in capsys.readouterr().err
        assert main(["control", str(run), "grace", "0.5"]) == 1, "the machine of the syncer needs no --keys"
        assert "has no model yet" in capsys.readouterr().err
        assert main(["snapshot", "--syncer", f"https://{head}", "--token", "a long secret"]) == 2
        assert "authority that is not trusted here" in capsys.readouterr().err
        assert main(["learner", "--syncer", head]) == 2
        assert "this port requires TLS" in capsys.readouterr().err
        island = ["--keys", str(ring / "far"), "--out", str(tmp_path / "island"), "--json"]
        assert main(["learner", "--syncer", head, *island]) == 0
        assert json.loads(capsys.readouterr().out)["learner"] == 1
        assert "is finished; its model is" in served.communicate(timeout=300)[0]
    finally:
        served.kill()
        served.wait()
    assert served.returncode == 0


def test_invalid_syncer_address_is_refused(capsys):
    assert main(["learner", "--syncer", "nowhere"]) == 2
    assert "give host:port" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------------
# Invalid options


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--method", "sail"], "--method 'sail' is unknown"),
        (["--model", "7b"], "there is no model '7b'; give one of 100k, 360k, 1m"),
        (["--tokens", "many"], "--tokens 'many' is not a count"),
        (["--step-time", "soon"], "--step-time 'soon' is not a duration"),
        (["--speeds", "1,x", "--step-time", "1ms"], "--speeds '1,x' is not valid"),
        (["--speeds", "1,1"], "2 speeds for 4 learners"),
        (["--kill", "9@0.4"], "learner 9 of 4"),
        (["--kill", "soon"], "--kill 'soon' is not valid"),
        (["--method", "ddp", "--kill", "1@0.4"], "would end a run of --method ddp"),
        (["--data", "no/such/place"], "neither a folder nor a file"),
        (["--up", "int2"], "up is 'int2'; give one of auto, f32"),
        (["--streams", "17"], "streams is 17; give a number of connections from 1 to 16"),
        (["--resume", "--lr", "1"], "--lr has no effect with --resume"),
        (["--resume", "--context", "8"], "--context has no effect with --resume"),
        (["--resume"], "is not a run of atoll train"),
    ],
)
def test_invalid_option_is_refused_with_one_line(arguments, sentence, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "--out", str(out), *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert sentence in shown.err
    assert shown.err.count("\n") == 1
    assert not out.exists()


def test_resume_needs_a_run(capsys):
    assert main(["train", "--resume"]) == 2
    assert "--resume needs the directory of the run" in capsys.readouterr().err


def test_default_run_directory_is_the_first_unused_one(tmp_path):
    assert train.next_run_directory(tmp_path, "ddp") == tmp_path / "ddp-1"
    (tmp_path / "ddp-1").mkdir()
    assert train.next_run_directory(tmp_path, "ddp") == tmp_path / "ddp-2"


def test_help_shows_the_defaults_of_a_job(capsys):
    """The help has the defaults as text, because some of them depend on the method."""
    assert main(["train", "--help"]) == 0
    fields = re.sub(r" --no-\S+", "", " ".join(capsys.readouterr().out.split()))  # the negative form of a flag
    settings = JobSettings()
    shown: dict[str, object] = {"tokens": f"{settings.tokens / 1e6:g}M", "norm_clip": 0}
    shown["snapshot_every"] = f"{SNAPSHOT_MERGES_PER_FRAGMENT} of each fragment"
    shown["max_rate"] = "no limit"
    shown["streams"] = 4
    missing = []
    for each in declared_settings(JobSettings):
        if not each.setting.help or each.name in ("context", "data", "speeds", "step_time_s"):
            continue
        part = fields.partition(f" {each.flag} ")[2].partition(" --")[0]
        if f"[default: {shown.get(each.name, each.default)}" not in part:
            missing.append((each.flag, each.default, part))
    assert missing == []


def test_methods_have_their_own_defaults():
    assert options.make_job({"method": "diloco"}).numerics.outer_lr == 0.7
    assert options.make_job({"method": "streaming"}).adopt == "blend"
    assert options.make_job({"inner": "adamw"}).numerics == ADAMW_NUMERICS
    assert options.make_job({"inner": "adamw"}).lr == 0.004
    assert options.make_job({"inner": "adamw"}).beta2 == 0.99
    mixed = options.make_job({"inner": "adamw", "method": "diloco", "outer_lr": 0.3}).numerics
    assert (mixed.merge, mixed.outer_lr, mixed.outer_momentum, mixed.outer_ramp) == ("average", 0.3, 0.9, 0)
    assert options.make_job({"method": "streaming", "adopt": "carry"}).adopt == "carry"
    assert options.make_job({"method": "single"}).learners == 1
    assert not options.make_job({"outer_breadth": False}).numerics.outer_breadth
    assert options.make_job({}) == JobSettings()


# --------------------------------------------------------------------------------------------------------------------
# generate


def test_generate_is_deterministic_and_seeds_differ(finished, capsys):
    run = str(finished[0])

    def made(*arguments):
        assert main(["generate", run, "island ", "--tokens", "40", *arguments]) == 0
        return capsys.readouterr().out

    assert made() == made()
    assert made("--seed", "1") != made("--seed", "2")
    assert made("--temperature", "0", "--seed", "1") == made("--temperature", "0", "--seed", "2")
    assert made().startswith("island ")
    fields = json.loads(made("--json"))
    assert made() == f"island {fields['added']}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["", "--tokens", "5"], "at least one character"), (["a", "--temperature", "-1"], "temperature is -1")],
)
def test_generate_refuses(finished, arguments, sentence, capsys):
    assert main(["generate", str(finished[0]), *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert sentence in shown.err


def test_generate_needs_a_run(tmp_path, capsys):
    assert main(["generate", str(tmp_path / "gone"), "a"]) == 2
    assert "no such run directory" in capsys.readouterr().err
    assert main(["generate", str(tmp_path), "a"]) == 2
    assert "it has no config.json" in capsys.readouterr().err
