"""The example files for Kubernetes and SkyPilot: parts agree with each other and with Atoll, scripts run."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import time
from typing import Any

import pytest
import yaml

from atoll.learner import environment
from tests.test_docs import unknown_commands
from tests.test_examples import EXAMPLES

TEXTS = {name: (EXAMPLES / f"{name}.yaml").read_text() for name in ("kubernetes", "skypilot")}
VARIABLES = {value for name, value in vars(environment).items() if name.isupper() and isinstance(value, str)}


def kubernetes() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(TEXTS["kubernetes"]) if document}


def skypilot() -> dict[str, Any]:
    return {task["name"]: task for task in yaml.safe_load_all(TEXTS["skypilot"]) if task}


def syncer_pod() -> Any:
    return kubernetes()["Deployment"]["spec"]["template"]["spec"]


def learner_job() -> Any:
    return kubernetes()["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]


def learner_pod() -> Any:
    return learner_job()["template"]["spec"]


def variables(pod: Any) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}


def after(option: str, words: list[str]) -> str:
    return words[words.index(option) + 1]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_variable_is_one_that_a_learner_reads(text):
    assert VARIABLES >= set(re.findall(r"ATOLL_\w+", text)) > {"ATOLL_SYNCER", "ATOLL_LEARNER"}


def test_every_option_of_the_syncer_exists():
    args = syncer_pod()["containers"][0]["args"]
    run = skypilot()["north-syncer"]["run"].strip().removeprefix("exec ")
    for command in (shlex.join(args), run):
        assert command.startswith("atoll syncer --out ")
        assert list(unknown_commands(command)) == []
    assert list(unknown_commands("atoll syncer --outward")) != []


def test_learners_find_the_syncer_of_kubernetes():
    service, deployment = kubernetes()["Service"], kubernetes()["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    port = service["spec"]["ports"][0]["port"]
    assert after("--port", syncer_pod()["containers"][0]["args"]) == str(port)
    assert variables(learner_pod())["ATOLL_SYNCER"] == f"{service['metadata']['name']}:{port}"
    claim = syncer_pod()["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == kubernetes()["PersistentVolumeClaim"]["metadata"]["name"]


def test_directories_and_keys_of_kubernetes_are_mounted_where_they_are_read():
    args, learner = syncer_pod()["containers"][0]["args"], variables(learner_pod())
    read = {"syncer": (after("--out", args), after("--keys", args))}
    read["left"] = (learner["ATOLL_RUN_DIRECTORY"], learner["ATOLL_KEYS"])
    made = dict(re.findall(r"create secret generic (\S+) --from-file=(\S+)", TEXTS["kubernetes"]))
    for name, pod in (("syncer", syncer_pod()), ("left", learner_pod())):
        mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
        assert (mounts["run"], mounts["keys"]) == read[name]
        assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
        secret = pod["volumes"][1]["secret"]
        assert secret["defaultMode"] == 0o400
        assert made[secret["secretName"]] == f"keys/{name}"


def test_the_pods_of_a_learner_meet_and_leave_in_time():
    job, learner = learner_job(), variables(learner_pod())
    assert str(job["parallelism"]) == str(job["completions"]) == learner["PET_NNODES"]
    name = kubernetes()["JobSet"]["metadata"]["name"]
    assert learner["PET_MASTER_ADDR"] == f"{name}-nodes-0-0.{name}"
    assert float(learner["ATOLL_NOTICE_S"]) < learner_pod()["terminationGracePeriodSeconds"]


def test_tasks_of_skypilot_agree():
    syncer, learner = skypilot()["north-syncer"], skypilot()["north-left"]
    words = shlex.split(syncer["run"])
    assert syncer["resources"]["ports"] == [int(after("--port", words))]
    assert learner["envs"]["ATOLL_SYNCER"].endswith(f":{after('--port', words)}")
    assert list(syncer["file_mounts"]) == [after("--keys", words)]
    assert list(learner["file_mounts"]) == [learner["envs"]["ATOLL_KEYS"]]
    assert all(isinstance(value, str) for task in (syncer, learner) for value in task["envs"].values())


# --------------------------------------------------------------------------------------------------------------------
# Scripts


def started(script: str, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(["sh", "-c", script, "unit", *command], stdout=subprocess.PIPE, text=True)


def learner_scripts() -> list[str]:
    run = skypilot()["north-left"]["run"]
    shared, found = re.subn(r"^(export PET_|set -- ).*\n", "", run, flags=re.MULTILINE)
    assert found == 3
    return [learner_pod()["containers"][0]["command"][2], shared]


@pytest.mark.parametrize("script", learner_scripts(), ids=TEXTS)
def test_the_exit_code_is_that_of_the_command_unless_it_was_stopped(script):
    for code in (0, 3):
        plain = started(script, "sh", "-c", f"exit {code}")
        plain.communicate(timeout=300)
        assert plain.returncode == code
    learner = started(script, "bash", "-c", "trap 'echo goodbye; exit 0' TERM; echo begun; while :; do sleep 0.1; done")
    assert learner.stdout is not None
    assert learner.stdout.readline() == "begun\n"
    learner.send_signal(signal.SIGTERM)
    assert learner.communicate(timeout=300)[0] == "goodbye\n"
    assert learner.returncode == 143, "with 0 its cluster would take the learner for finished"


def test_syncer_of_finished_run_is_not_restarted_forever():
    script = syncer_pod()["containers"][0]["command"][2]
    idle = started(script, "true")
    assert idle.stdout is not None
    assert idle.stdout.readline() == "the run is over\n"
    end = time.monotonic() + 60
    while idle.poll() is None and time.monotonic() < end:
        idle.send_signal(signal.SIGTERM)  # the first may come before it waits
        try:
            idle.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    assert idle.returncode not in (None, 0)
    idle.stdout.close()
    failed = started(script, "false")
    failed.communicate(timeout=300)
    assert failed.returncode == 1
