"""Units as manifests for Kubernetes and SkyPilot: written here, validated against schemas by the tests, applied by you.

An island is a JobSet, or a task of SkyPilot; the syncer is a Deployment with a volume, or a task on a machine that
stays. Both bring an image of their own, in which the command has to be found.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from atoll.launch.engine import Status, Unit

SYNCER, SHARD = "syncer", "shard-"  # names of units in a run; all others are islands
MOST_LETTERS = 40  # of RUN-UNIT: names of pods are longer by what JobSet adds, and have 63
PORT = "7400"
KEYS_AT = "/atoll/keys"
MEETING_PORT = "29500"  # every pod has an address of its own, so islands do not share it

# An island that was told to leave and did so with 0 has not finished its run: 143 says so to whoever decides about the
# next start. Without a signal the exit code is the command's: nothing interrupts `wait` then.
TOLD = """told=
trap 'told=yes; kill -TERM "$child" 2>/dev/null' TERM
"$@" &
child=$!
[ -z "$told" ] || kill -TERM "$child"
while :; do wait "$child"; code=$?; kill -0 "$child" 2>/dev/null || break; done
[ -z "$told" ] || exit 143
"""
PLAINLY = TOLD + 'exit "$code"\n'
THEN_IDLE = (
    TOLD + '[ "$code" -eq 0 ] || exit "$code"\necho "the run is over"\nsleep 2147483647 & child=$!\nwait "$child"\n'
)
"""For a Deployment, which starts again what has ended: a syncer whose run is over would be started for ever."""


class _Manifests(ABC):
    """What both have in common: they write, and somebody else runs."""

    name = ""
    options: tuple[str, ...] = ()
    apply = ""

    def check(self, unit: Unit) -> None:
        if not re.fullmatch(rf"[a-z]([a-z0-9-]{{0,{MOST_LETTERS - 2}}}[a-z0-9])?", _name(unit)):
            raise ValueError(
                f"{unit.name}: {_name(unit)!r} is no name in a cluster: small letters, digits and dashes, at most"
                f" {MOST_LETTERS}, a letter first"
            )
        unknown = sorted(set(unit.options) - set(self.options))
        if unknown:
            known = ", ".join(self.options)
            raise ValueError(f"{unit.name}: {self.name} has no option {', '.join(unknown)}; there are {known}")
        if not unit.command:
            raise ValueError(f"{unit.name} has no command")

    @abstractmethod
    def documents(self, unit: Unit) -> list[dict[str, Any]]: ...

    def render(self, unit: Unit) -> str:
        """One or more documents of YAML; secrets by name only."""
        self.check(unit)
        return "---\n".join(_yaml(document) for document in self.documents(unit))

    def start(self, unit: Unit) -> dict[str, Any]:
        self._refuse(unit.name)

    def status(self, handle: Mapping[str, Any]) -> Status:
        self._refuse(str(handle.get("name", "a unit")))

    def stop(self, handle: Mapping[str, Any]) -> None:
        self._refuse(str(handle.get("name", "a unit")))

    def log(self, handle: Mapping[str, Any]) -> list[Path]:
        self._refuse(str(handle.get("name", "a unit")))

    def _refuse(self, name: str) -> NoReturn:
        raise ValueError(
            f"{name}: manifests for {self.name} are written here, and run by you: atoll up FILE --dry-run > run.yaml,"
            f" then {self.apply}"
        )


class KubernetesEngine(_Manifests):
    name = "kubernetes"
    options = (
        *("image", "namespace", "memory", "device", "node_selector", "tolerations", "secret", "storage"),
        *("storage_class", "working_dir"),
    )
    apply = "kubectl apply -f run.yaml"

    def check(self, unit: Unit) -> None:
        super().check(unit)
        if not isinstance(unit.options.get("image"), str):
            raise ValueError(f'{unit.name}: kubernetes needs options = {{ image = "..." }} with Atoll and the command')

    def documents(self, unit: Unit) -> list[dict[str, Any]]:
        unit = _inside(unit, f"/atoll/runs/{unit.run}")
        kept = unit.name == SYNCER or unit.name.startswith(SHARD)
        return [_claim(unit), _service(unit), _deployment(unit)] if kept else [_jobset(unit)]


class SkyPilotEngine(_Manifests):
    name = "skypilot"
    options = (
        *("cloud", "region", "accelerator", "use_spot", "image", "disk_size", "memory", "workdir", "setup", "strategy"),
        "instance_type",
    )
    apply = "sky jobs launch for each island, sky launch for the syncer"

    def check(self, unit: Unit) -> None:
        super().check(unit)
        if unit.devices and not isinstance(unit.options.get("accelerator"), str):
            raise ValueError(f'{unit.name}: devices of which kind? Give options = {{ accelerator = "H100" }}')

    def documents(self, unit: Unit) -> list[dict[str, Any]]:
        task = _task(_inside(unit, f"runs/{unit.run}"))  # beside the files of `workdir`, where tasks begin
        if keys := _keys(unit):
            task["file_mounts"] = {_keys_inside(keys): keys}
        return [task]


def _inside(unit: Unit, run: str) -> Unit:
    """With the paths that it has there: those of this machine mean nothing in an image."""
    places = {str(unit.directory.parent.parent): run}
    if keys := _keys(unit):
        places = {keys: _keys_inside(keys)} | places  # which may be in the run's directory

    def there(text: str) -> str:
        for here, place in places.items():
            if text == here or text.startswith(f"{here}/"):
                return place + text.removeprefix(here)
        return text

    environment = {name: there(value) for name, value in unit.environment.items()}
    command = tuple(map(there, unit.command))
    return replace(unit, command=command, environment=environment, directory=Path(there(str(unit.directory))))


def _keys(unit: Unit) -> str | None:
    return unit.environment.get("ATOLL_KEYS") or _word_after(unit, "--keys")


def _keys_inside(keys: str) -> str:
    return f"{KEYS_AT}/{Path(keys).name}"


# --------------------------------------------------------------------------------------------------------------------
# Kubernetes


def _name(unit: Unit) -> str:
    return f"{unit.run}-{unit.name}"


def _metadata(unit: Unit) -> dict[str, Any]:
    named: dict[str, Any] = {"name": _name(unit), "labels": _labels(unit)}
    return named | ({"namespace": unit.options["namespace"]} if "namespace" in unit.options else {})


def _labels(unit: Unit) -> dict[str, str]:
    return {"app.kubernetes.io/name": "atoll", "atoll/run": unit.run, "atoll/unit": unit.name}


def _jobset(unit: Unit) -> dict[str, Any]:
    job = {
        "parallelism": unit.nodes,
        "completions": unit.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # the JobSet starts all nodes again, never one of them
        "podFailurePolicy": {
            # A node that is drained or taken back is nobody's failure.
            "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": {"metadata": {"labels": _labels(unit)}, "spec": _pod(unit, PLAINLY) | {"restartPolicy": "Never"}},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(unit),
        "spec": {
            "failurePolicy": {"maxRestarts": unit.restarts},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": "nodes", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod(unit: Unit, script: str) -> dict[str, Any]:
    options = unit.options
    wanted = {"cpu": str(unit.cpus)} | ({"memory": str(options["memory"])} if "memory" in options else {})
    devices = {str(options.get("device", "nvidia.com/gpu")): str(unit.devices)} if unit.devices else {}
    volumes, mounts = _volumes(unit)
    container: dict[str, Any] = {
        "name": "unit",
        "image": options["image"],
        "command": ["/bin/sh", "-c", script, "unit"],
        "args": [_literal(word) for word in unit.command],
        "env": _variables(unit),
        "resources": {"requests": wanted | devices} | ({"limits": devices} if devices else {}),
        "volumeMounts": mounts,
    }
    if "working_dir" in options:
        container["workingDir"] = options["working_dir"]
    pod: dict[str, Any] = {
        "enableServiceLinks": False,  # variables that nobody asked for
        "terminationGracePeriodSeconds": math.ceil(unit.notice_s),
        "containers": [container],
        "volumes": volumes,
    }
    places = ({"topology.kubernetes.io/region": unit.site} if unit.site else {}) | dict(
        options.get("node_selector", {})
    )
    if places:
        pod["nodeSelector"] = places
    if "tolerations" in options:
        pod["tolerations"] = list(options["tolerations"])
    return pod


def _variables(unit: Unit) -> list[dict[str, Any]]:
    """Those of the unit; secrets by the name of a Secret. For torchrun also where the nodes of an island meet: JobSet
    gives each pod a name, and Kubernetes the number of its node."""
    secret = str(unit.options.get("secret", unit.run))
    told: list[dict[str, Any]] = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}
        if name in unit.secret
        else {"name": name, "value": _literal(value)}
        for name, value in sorted(unit.environment.items())
    ]
    if unit.name == SYNCER or unit.name.startswith(SHARD):
        return told
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    first = f"{_name(unit)}-nodes-0-0.{_name(unit)}" if unit.nodes > 1 else "127.0.0.1"
    meet = {"MASTER_ADDR": first, "MASTER_PORT": MEETING_PORT, "NNODES": str(unit.nodes)}
    told.append({"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}})
    told += [{"name": name, "value": value} for name, value in meet.items()]
    told += [{"name": f"PET_{name}", "value": f"$({name})"} for name in ("NODE_RANK", *meet)]
    return told


def _literal(text: str) -> str:
    """Kubernetes would fill in $(NAME) by itself."""
    return text.replace("$(", "$$(")


def _volumes(unit: Unit) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Under the paths that the command names: the run's directory, durable for the syncer, and keys."""
    run = str(unit.directory.parent.parent)
    kept = unit.name == SYNCER or unit.name.startswith(SHARD)
    source: dict[str, Any] = {"persistentVolumeClaim": {"claimName": _name(unit)}} if kept else {"emptyDir": {}}
    volumes, mounts = [{"name": "run", **source}], [{"name": "run", "mountPath": run}]
    keys = _keys(unit)
    if keys:
        volumes.append({"name": "keys", "secret": {"secretName": f"{_name(unit)}-keys", "defaultMode": 0o400}})
        mounts.append({"name": "keys", "mountPath": keys})
    return volumes, mounts


def _claim(unit: Unit) -> dict[str, Any]:
    wanted: dict[str, Any] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": str(unit.options.get("storage", "100Gi"))}},
    }
    if "storage_class" in unit.options:
        wanted["storageClassName"] = unit.options["storage_class"]
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": _metadata(unit), "spec": wanted}


def _service(unit: Unit) -> dict[str, Any]:
    port = int(_word_after(unit, "--port") or PORT)
    spec = {"selector": _labels(unit), "ports": [{"name": "atoll", "port": port, "targetPort": port}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(unit), "spec": spec}


def _deployment(unit: Unit) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(unit),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # never two on one directory
            "selector": {"matchLabels": _labels(unit)},
            "template": {"metadata": {"labels": _labels(unit)}, "spec": _pod(unit, THEN_IDLE)},
        },
    }


def _word_after(unit: Unit, option: str) -> str | None:
    for word, following in zip(unit.command, (*unit.command[1:], ""), strict=True):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


# --------------------------------------------------------------------------------------------------------------------
# SkyPilot

MEET = """export NNODES="$SKYPILOT_NUM_NODES" NODE_RANK="$SKYPILOT_NODE_RANK"
export MASTER_ADDR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" MASTER_PORT=29500
export PET_NNODES="$NNODES" PET_NODE_RANK="$NODE_RANK" PET_MASTER_ADDR="$MASTER_ADDR" PET_MASTER_PORT="$MASTER_PORT"
"""


def _task(unit: Unit) -> dict[str, Any]:
    options, kept = unit.options, unit.name == SYNCER or unit.name.startswith(SHARD)
    names = ("cloud", "instance_type", "disk_size", "memory")
    resources = {name: options[name] for name in names if name in options} | {"cpus": f"{unit.cpus}+"}
    region = options.get("region", unit.site)
    if region:
        resources["region"] = region
    if unit.devices:
        resources["accelerators"] = {options["accelerator"]: unit.devices}
    if "image" in options:
        resources["image_id"] = f"docker:{options['image']}"
    if kept:
        resources["ports"] = [int(_word_after(unit, "--port") or PORT)]
    else:
        resources["use_spot"] = bool(options.get("use_spot", False))
        recovery: dict[str, Any] = {"max_restarts_on_errors": unit.restarts}
        resources["job_recovery"] = recovery | ({"strategy": options["strategy"]} if "strategy" in options else {})
    open_to_all = {name: value for name, value in sorted(unit.environment.items()) if name not in unit.secret}
    command = f"set -- {shlex.join(unit.command)}\n{PLAINLY}"
    task: dict[str, Any] = {
        "name": _name(unit),
        "resources": resources,
        "num_nodes": unit.nodes,
        "envs": open_to_all,
        "run": command if kept else MEET + command,
    }
    hidden = sorted(unit.secret & set(unit.environment))
    if hidden:
        task["secrets"] = dict.fromkeys(hidden)  # null: given when it is launched, with --secret NAME
    return task | {name: options[name] for name in ("workdir", "setup") if name in options}


# --------------------------------------------------------------------------------------------------------------------
# YAML: what JSON has, with lines that people read


def _yaml(value: Any) -> str:
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> list[str]:
    """
    >>> print("\\n".join(_lines({"a": [{"b": 1, "c": "x: y"}], "d": {}, "e": None})))
    a:
      - b: 1
        c: "x: y"
    d: {}
    e: null
    """
    if isinstance(value, Mapping) and value:
        return [line for key, item in value.items() for line in _entry(_key(str(key)) + ":", item)]
    if isinstance(value, list | tuple) and value:
        made = []
        for item in value:
            first, *rest = _lines(item)
            made += [f"- {first}", *(f"  {line}" for line in rest)]
        return made
    if isinstance(value, str) and "\n" in value and value.endswith("\n") and value[0] not in " \n":
        return ["|", *(f"  {line}" for line in value.splitlines())]
    return [_key(value) if isinstance(value, str) else json.dumps(value)]


def _entry(key: str, item: Any) -> list[str]:
    lines = _lines(item)
    nested = isinstance(item, Mapping | list | tuple) and item
    return [key, *(f"  {line}" for line in lines)] if nested else [f"{key} {lines[0]}", *lines[1:]]


def _key(text: str) -> str:
    """Plain where YAML could not take it for anything else."""
    plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9_./-]*", text) and text.lower() not in {
        *("null", "true", "false", "yes", "no", "on", "off", "y", "n")
    }
    return text if plain else json.dumps(text, ensure_ascii=False)


__all__ = ["KubernetesEngine", "SkyPilotEngine"]
