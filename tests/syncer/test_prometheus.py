"""`GET /metrics` of a real syncer, the page that lists its names, and the dashboard that draws them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from atoll import __version__
from atoll.core.states import MemberState, RunStage
from atoll.syncer.prometheus import METRICS
from tests.learner.runs import Run, endless

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
GRAFANA = ROOT / "docs/grafana.json"
RULES = ROOT / "docs/alerts.rules.yml"
ROW = re.compile(r"^\| `(atoll_\w+)` \| (\w+) \| (.*?) \| (.+) \|$", re.MULTILINE)
TOKEN = "a token of the run"


def documented_metrics(page: str) -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Return type, labels and meaning of every metric in the tables of the page."""
    rows = ROW.findall(page)
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels)), meaning) for name, kind, labels, meaning in rows}


def served_metrics(text: str) -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Return the same for a response. The parser removes `_total` from the names of counters."""
    found = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {tuple(sample.labels) for sample in family.samples}
        assert len(labels) <= 1, f"{name} has samples with different labels"
        found[name] = (family.type, labels.pop() if labels else (), family.documentation)
    return found


def values(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(text)
    return {
        (sample.name, tuple(sample.labels.values())): sample.value for family in families for sample in family.samples
    }


def differences(page: str, text: str) -> Iterator[str]:
    listed, real = documented_metrics(page), served_metrics(text)
    for name in sorted(listed.keys() | real.keys()):
        if name not in listed or name not in real:
            yield f"{name} is {'served, not documented' if name in real else 'documented, not served'}"
            continue
        (kind, labels, meaning), (real_kind, real_labels, real_meaning) = listed[name], real[name]
        if (kind, meaning) != (real_kind, real_meaning) or real_labels not in ((), labels):
            yield f"{name}: {listed[name]} is documented, {real[name]} is served"


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return metrics before the run has a model, and while it trains with a refused request and a killed learner."""
    directory = tmp_path_factory.mktemp("prometheus")
    with Run(directory, endless(quorum=2), token=TOKEN) as run:
        first = run.request("GET", "/metrics")
        learners = run.joined(1, 2, 3)
        run.go(*learners)
        assert run.request("GET", "/metrics", Authorization="Bearer wrong")[0] == 401
        learners[2].kill()
        run.until(run.merges(9), "merges")
        run.until(lambda status: all("loss" in each for each in status["learners"][:2]), "both have sent metrics")
        later = run.request("GET", "/metrics")
        newer = run.request("GET", "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        status = run.status()
    return first, later, newer, status


def test_metrics_of_real_syncer_match_the_page(answers):
    _, (code, body), _, _ = answers
    assert code == 200
    assert list(differences(PAGE, body.decode())) == []
    assert documented_metrics(PAGE).keys() == METRICS.keys()


@pytest.mark.parametrize(
    ("correct", "planted"),
    [
        ("| `atoll_merges_total` | counter |", "| `atoll_merges_total` | gauge |"),
        ("| `atoll_learner_loss` | gauge | `learner` |", "| `atoll_learner_loss` | gauge | |"),
        ("| `atoll_run_seconds` |", "| `atoll_run_minutes` |"),
        ("| loss of the newest step |", "| loss of the best step |"),
    ],
)
def test_planted_error_in_page_is_found(answers, correct, planted):
    assert correct in PAGE
    assert list(differences(PAGE.replace(correct, planted), answers[1][1].decode())) != []


def test_metrics_match_status(answers):
    _, (_, body), _, status = answers
    found = values(body.decode())
    assert found["atoll_run_info", ("test", __version__)] == 1
    assert found["atoll_run_stage", ("running",)] == 1
    assert 9 <= found["atoll_merges_total", ()] <= status["merges"]
    assert found["atoll_contributions_total", ()] >= 18
    assert found["atoll_refused_total", ("token",)] == 1
    assert found["atoll_ledger_balanced", ()] == 1
    assert -1 <= found["atoll_merge_cosine", ()] <= 1
    assert found["atoll_merge_delta_norm", ()] > 0 < found["atoll_merge_step_norm", ()]
    for number in ("1", "2"):
        assert found["atoll_learner_tokens_total", (number,)] > 0
        assert found["atoll_learner_link_up", (number,)] == 1
    assert {fragment for name, fragment in found if name == "atoll_fragment_version"} == {("0",), ("1",), ("2",)}


def test_metrics_before_model_have_no_run_values(answers):
    (code, body), *_ = answers
    assert code == 200
    assert ("atoll_run_stage", ("waiting for a model",)) in values(body.decode())
    assert served_metrics(body.decode()).keys() == METRICS.keys()


def test_open_metrics_are_served_on_request(answers):
    code, body = answers[2]
    assert code == 200
    assert body.endswith(b"# EOF\n")


def test_missing_prometheus_client_is_reported_with_fix(tmp_path):
    with Run(tmp_path, endless(), planted="no-prometheus") as run:
        code, body = run.request("GET", "/metrics")
        assert code == 501
        assert "pip install 'atoll[dash]'" in json.loads(body)["error"]
        assert run.request("GET", "/v1/status")[0] == 200


# --------------------------------------------------------------------------------------------------------------------
# docs/alerts.rules.yml


def alerting_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_alerting_rules_use_existing_metrics_and_labels():
    for rule in alerting_rules():
        expr = re.sub(r'^up\{job="atoll"\}', "", rule["expr"])  # of Prometheus itself
        assert named_in(expr) != set()
        assert named_in(expr) - METRICS.keys() == set()
        assert expr.count("(") == expr.count(")")
        for name, label, values in re.findall(r'(\w+)\{(\w+)=~?"([^"]+)"\}', expr):
            assert label in METRICS[name].labels
            assert set(values.split("|")) <= ({*RunStage} if label == "stage" else {*MemberState})
        (subject,) = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]) or [None]
        assert subject in (None, "instance", *METRICS[re.findall(r"atoll_\w+", expr)[0]].labels)


def test_every_alert_expressible_in_metrics_has_a_rule():
    page = (ROOT / "docs/dash.md").read_text(encoding="utf-8").partition("## Alerts\n")[2].partition("\n## ")[0]
    on_page = dict(re.findall(r"^\| `([\w-]+)` \|[^|]*\| (\w+) \|", page, re.MULTILINE))
    assert len(on_page) == 8
    del on_page["learner-disconnected"]
    assert {each["labels"]["rule"]: each["labels"]["severity"] for each in alerting_rules()} == on_page


# --------------------------------------------------------------------------------------------------------------------
# docs/grafana.json


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(GRAFANA.read_text(encoding="utf-8"))["panels"]
    return found


def named_in(text: str) -> set[str]:
    return set(re.findall(r"\batoll_\w+", text))


def test_grafana_dashboard_uses_existing_metrics_and_draws_most():
    drawn = {name for panel in panels() for each in panel.get("targets", ()) for name in named_in(each["expr"])}
    assert drawn - METRICS.keys() == set()
    left_out = {*("atoll_run_info", "atoll_run_seconds", "atoll_learner_steps"), "atoll_learner_tokens_total"}
    assert METRICS.keys() - drawn == left_out | {"atoll_ignored_total"}
    assert named_in(GRAFANA.read_text(encoding="utf-8")) - METRICS.keys() == set()


def test_grafana_panels_do_not_overlap():
    assert [panel["title"] for panel in panels() if panel["type"] == "row"] == [
        *("Health", "Throughput", "Merges", "Ledger", "Links")
    ]
    assert len({panel["id"] for panel in panels()}) == len(panels())
    occupied: set[tuple[int, int]] = set()
    for panel in panels():
        position = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert not cells & occupied, panel["title"]
        assert position["x"] + position["w"] <= 24
        occupied |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["expr"].count("(") == target["expr"].count(")")
