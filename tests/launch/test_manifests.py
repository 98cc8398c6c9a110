"""Manifests for Kubernetes and SkyPilot against what their schemas allow, as far as that is written down in `schemas/`;
and the few lines of shell in them, run by sh."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from atoll.launch.engine import Unit
from atoll.launch.islands_file import IslandsFile
from atoll.launch.manifests import PLAINLY, THEN_IDLE, KubernetesEngine, SkyPilotEngine
from atoll.launch.units import units_of

SCHEMAS = Path(__file__).parent / "schemas"
TOKEN = {"ATOLL_SYNCER": "run-syncer:7400", "ATOLL_TOKEN": "hush-hush", "ODD": "yes\n'$(HOME)' é: #"}
ISLAND = Unit(
    "run",
    "left",
    ("torchrun", "--nproc-per-node", "8", "train.py", "a b", "$(pwd)"),
    Path("/runs/run/units/left"),
    environment=TOKEN,
    secret=frozenset({"ATOLL_TOKEN"}),
    nodes=4,
    cpus=16,
    devices=8,
    site="europe-west4",
    restarts=7,
    notice_s=44.5,
    options={"image": "registry.example/atoll:1", "memory": "64Gi", "namespace": "research"},
)
SYNCER = Unit(
    "run",
    "syncer",
    ("atoll", "syncer", "--out", "/runs/run", "--port", "7411", "--keys", "/keys/syncer"),
    Path("/runs/run/units/syncer"),
    environment={"ATOLL_TOKEN": "hush-hush"},
    secret=frozenset({"ATOLL_TOKEN"}),
    options={"image": "registry.example/atoll:1", "storage": "20Gi", "storage_class": "fast"},
)
ON_SKY = {"cloud": "gcp", "accelerator": "H100", "use_spot": True, "image": "registry.example/atoll:1", "workdir": "."}


def schema(name: str) -> Any:
    return json.loads((SCHEMAS / f"{name}.json").read_text())


def wrong(document: Any, name: str) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema(name))
    found = [deeper for error in validator.iter_errors(document) for deeper in (error, *error.context)]
    return [error.message for error in found]


def written(engine: KubernetesEngine | SkyPilotEngine, unit: Unit) -> list[Any]:
    text = engine.render(unit)
    assert "hush" not in text
    documents = list(yaml.safe_load_all(text))
    assert documents == engine.documents(unit), "what is read is what was meant"
    return documents


def test_the_schemas_are_schemas():
    for name in ("kubernetes", "skypilot"):
        jsonschema.Draft202012Validator.check_schema(schema(name))


@pytest.mark.parametrize("unit", [ISLAND, replace(ISLAND, nodes=1, devices=0, site=None), SYNCER])
def test_manifests_for_kubernetes_keep_to_the_schema(unit):
    for document in written(KubernetesEngine(), unit):
        assert wrong(document, "kubernetes") == []


def test_an_island_of_kubernetes_is_a_jobset():
    (jobset,) = written(KubernetesEngine(), ISLAND)
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
    assert jobset["metadata"]["name"] == "run-left"
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 7}
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (4, 4, "Indexed")
    assert pod["terminationGracePeriodSeconds"] == 45
    assert pod["nodeSelector"] == {"topology.kubernetes.io/region": "europe-west4"}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert container["args"] == [*ISLAND.command[:-1], "$$(pwd)"]
    assert variables["ATOLL_TOKEN"] == {"secretKeyRef": {"name": "run", "key": "ATOLL_TOKEN"}}
    assert variables["PET_MASTER_ADDR"] == "$(MASTER_ADDR)"
    assert variables["MASTER_ADDR"] == "run-left-nodes-0-0.run-left"


def test_the_syncer_of_kubernetes_is_one_pod_with_a_volume():
    claim, service, deployment = written(KubernetesEngine(), SYNCER)
    pod = deployment["spec"]["template"]["spec"]
    assert claim["spec"]["resources"] == {"requests": {"storage": "20Gi"}}
    assert service["spec"]["ports"][0]["port"] == 7411
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    (container,) = pod["containers"]
    places = {"/atoll/runs/run", "/atoll/keys/syncer"}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == places
    assert places < set(container["args"])


@pytest.mark.parametrize(
    "unit",
    [replace(ISLAND, options=ON_SKY), replace(ISLAND, nodes=1, devices=0, options={}), replace(SYNCER, options={})],
)
def test_tasks_for_skypilot_keep_to_the_schema(unit):
    (task,) = written(SkyPilotEngine(), unit)
    assert wrong(task, "skypilot") == []


def test_an_island_of_skypilot_is_a_task_that_comes_back():
    (task,) = written(SkyPilotEngine(), replace(ISLAND, options=ON_SKY))
    assert task["resources"]["accelerators"] == {"H100": 8}
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 7}
    assert (task["num_nodes"], task["resources"]["region"]) == (4, "europe-west4")
    assert task["secrets"] == {"ATOLL_TOKEN": None}
    assert "ATOLL_TOKEN" not in task["envs"]


def test_keys_of_the_syncer_are_taken_along_by_skypilot():
    (task,) = written(SkyPilotEngine(), replace(SYNCER, options={}))
    assert task["file_mounts"] == {"/atoll/keys/syncer": "/keys/syncer"}
    assert "--keys /atoll/keys/syncer\n" in task["run"]
    assert task["resources"]["ports"] == [7411]


FILE = """
[syncer]
engine = "kubernetes"
address = "http://test-syncer:7400"
shards = 1
options = { image = "i" }
[defaults]
command = "python train.py ./data"
[islands.near]
options = { image = "i" }
secrets = ["WANDB_API_KEY"]
[islands.far]
engine = "skypilot"
options = { workdir = "." }
"""


def test_no_manifest_of_a_file_has_a_path_of_this_machine(tmp_path, monkeypatch):
    (tmp_path / "test.toml").write_text(FILE)
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("WANDB_API_KEY", "hush")
    file = IslandsFile.load(tmp_path / "test.toml")
    documents = {}
    for engine, unit in units_of(file, "hush-hush"):
        writes = KubernetesEngine() if engine == "kubernetes" else SkyPilotEngine()
        documents[unit.name] = written(writes, unit)
        assert str(tmp_path) not in writes.render(unit)
    pod = _spec(documents["near"][0])
    assert pod["containers"][0]["args"] == ["python", "train.py", "./data"]
    assert {"name": "ATOLL_RUN_DIRECTORY", "value": "/atoll/runs/test"} in pod["containers"][0]["env"]
    reference = {"secretKeyRef": {"name": "test", "key": "WANDB_API_KEY"}}
    assert {"name": "WANDB_API_KEY", "valueFrom": reference} in pod["containers"][0]["env"]
    (far,) = documents["far"]
    assert "set -- python train.py ./data\n" in far["run"]
    assert far["envs"]["ATOLL_RUN_DIRECTORY"] == "runs/test"
    _, service, deployment = documents["shard-0"]
    words = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "/atoll/runs/test/shards/0" in words
    advertised = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert words[words.index("--advertise") + 1] == advertised


def _planted(change: Callable[[Any], object]) -> Any:
    document = copy.deepcopy(KubernetesEngine().documents(ISLAND)[0])
    change(document)
    return document


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda it: it["spec"].update(failurePolicies={}), "'failurePolicies' was unexpected"),
        (lambda it: it["spec"]["failurePolicy"].update(maxRestarts="7"), "'7' is not of type 'integer'"),
        (lambda it: it.update(apiVersion="jobset.x-k8s.io/v1"), "'jobset.x-k8s.io/v1alpha2' was expected"),
        (lambda it: it["metadata"].update(name="Run_left"), "does not match"),
        (lambda it: _spec(it).pop("restartPolicy"), "'restartPolicy' is a required property"),
        (lambda it: _spec(it)["containers"][0].pop("image"), "'image' is a required property"),
        (lambda it: _spec(it)["containers"][0]["env"].append({"name": "A", "value": 1}), "1 is not of type 'string'"),
        (lambda it: _spec(it)["containers"][0].update(resource={}), "'resource' was unexpected"),
    ],
)
def test_a_planted_wrong_manifest_is_caught(change, complaint):
    assert any(complaint in message for message in wrong(_planted(change), "kubernetes"))


def _spec(jobset: Any) -> Any:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_nodes": 0}, "0 is less than the minimum"),
        ({"command": "train"}, "'command' was unexpected"),
        ({"resources": {"use_spot": "yes"}}, "'yes' is not of type 'boolean'"),
        ({"resources": {"accelerators": {"H100": 8, "A100": 8}}}, "too many properties"),
        ({"secrets": {"ATOLL-TOKEN": None}}, "does not match"),
    ],
)
def test_a_planted_wrong_task_is_caught(change, complaint):
    (task,) = SkyPilotEngine().documents(replace(ISLAND, options=ON_SKY))
    assert any(complaint in message for message in wrong({**task, **change}, "skypilot"))


@pytest.mark.parametrize(
    ("engine", "change", "words"),
    [
        (KubernetesEngine(), {"options": {}}, "kubernetes needs options"),
        (KubernetesEngine(), {"options": {"image": "a", "partition": "b"}}, "has no option partition; there are image"),
        (KubernetesEngine(), {"run": "Run"}, "is no name in a cluster"),
        (KubernetesEngine(), {"run": "r" * 40}, "is no name in a cluster"),
        (SkyPilotEngine(), {"options": {"cloud": "gcp"}}, "devices of which kind"),
    ],
)
def test_what_cannot_be_written_is_refused(engine, change, words):
    with pytest.raises(ValueError, match="left") as refused:
        engine.render(replace(ISLAND, **change))
    assert words in str(refused.value)


@pytest.mark.parametrize("engine", [KubernetesEngine(), SkyPilotEngine()])
def test_nothing_is_started_from_here(engine):
    for ask in (lambda: engine.start(ISLAND), lambda: engine.status({}), lambda: engine.stop({})):
        with pytest.raises(ValueError, match=r"atoll up FILE --dry-run > run\.yaml"):
            ask()


def _run(script: str, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(["sh", "-c", script, "unit", *command], stdout=subprocess.PIPE, text=True)


def test_the_exit_code_is_that_of_the_command_unless_it_was_told_to_leave():
    for code in (0, 3):
        plain = _run(PLAINLY, "sh", "-c", f"exit {code}")
        plain.communicate(timeout=300)
        assert plain.returncode == code
    told = _run(PLAINLY, "bash", "-c", "trap 'echo goodbye; exit 0' TERM; echo begun; while :; do sleep 0.1; done")
    assert told.stdout is not None
    assert told.stdout.readline() == "begun\n"
    told.send_signal(signal.SIGTERM)
    assert told.communicate(timeout=300)[0] == "goodbye\n"
    assert told.returncode == 143, "with 0 its cluster would take the island for finished"


def test_a_syncer_whose_run_is_over_is_not_started_again_for_ever():
    idle = _run(THEN_IDLE, "true")
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
    failed = _run(THEN_IDLE, "false")
    failed.communicate(timeout=300)
    assert failed.returncode == 1
