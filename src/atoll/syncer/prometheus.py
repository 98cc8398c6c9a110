"""`GET /metrics` of a syncer in the text format of Prometheus. docs/metrics.md lists the names.

The values come from the status (`build_status`) and from measurements at the newest merges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll import __version__
from atoll.syncer.status import build_status

if TYPE_CHECKING:
    from atoll.syncer.process import SyncerProcess

NOT_INSTALLED = (
    "prometheus_client is not installed, so this syncer has no /metrics; install it with pip install 'atoll[dash]'"
)

MAX_LABELLED = 256
"""Learners and fragments with their own series: those with the lowest numbers."""


class MetricInfo(NamedTuple):
    """Metric: its help text and the names of its labels. It is a counter if its name ends with `_total`."""

    help: str
    labels: tuple[str, ...] = ()


METRICS: Mapping[str, MetricInfo] = {
    # health
    "atoll_run_info": MetricInfo("constant 1; labels carry the run and the version of Atoll", ("run", "version")),
    "atoll_run_stage": MetricInfo("1 for the current stage of the run", ("stage",)),
    "atoll_run_seconds": MetricInfo("clock of the run: seconds since it was created"),
    "atoll_run_progress_ratio": MetricInfo("used share of the budget, 0 to 1"),
    "atoll_syncer_epoch": MetricInfo("epoch of the syncer; increases each time a syncer takes over the run"),
    "atoll_learners_alive": MetricInfo("learners that train"),
    "atoll_learners_pulled": MetricInfo("learners pulled in the largest open round"),
    "atoll_learners_merged": MetricInfo("largest number of contributions among the newest merges of all fragments"),
    "atoll_quorum_learners": MetricInfo("K: minimum number of contributions of a merge"),
    "atoll_learner_standing": MetricInfo("1 for the current state of each learner", ("learner", "standing")),
    "atoll_learner_link_up": MetricInfo("1 while the learner is connected", ("learner",)),
    "atoll_learner_incarnation": MetricInfo("current incarnation of the learner", ("learner",)),
    "atoll_learner_strikes": MetricInfo("invalid messages and contributions counted against the learner", ("learner",)),
    # throughput
    "atoll_trained_tokens": MetricInfo("tokens trained by all learners; may decrease slightly when a syncer restarts"),
    "atoll_step_seconds": MetricInfo("step time that the syncer uses to schedule rounds"),
    "atoll_learner_steps": MetricInfo("steps of the current incarnation", ("learner",)),
    "atoll_learner_loss": MetricInfo("loss of the newest step", ("learner",)),
    "atoll_learner_tokens_per_second": MetricInfo("training throughput in tokens per second", ("learner",)),
    "atoll_learner_tokens_total": MetricInfo("tokens trained by the current incarnation", ("learner",)),
    "atoll_learner_boundary_seconds_total": MetricInfo("time that Atoll spent in the training thread", ("learner",)),
    # merges
    "atoll_merges_total": MetricInfo("durable merges"),
    "atoll_contributions_total": MetricInfo("contributions merged by this syncer process"),
    "atoll_merge_seconds_total": MetricInfo("time that this syncer process spent in merges"),
    "atoll_last_merge_timestamp_seconds": MetricInfo("Unix time of the newest merge of this syncer process"),
    "atoll_rounds_in_flight": MetricInfo("open rounds"),
    "atoll_rounds_in_flight_limit": MetricInfo("maximum number of open rounds"),
    "atoll_quorum_seconds": MetricInfo("mean time from the opening of a round to its quorum"),
    "atoll_sync_seconds": MetricInfo("mean time from a merge to its arrival at the learners"),
    "atoll_fragment_version": MetricInfo("durable version of the fragment", ("fragment",)),
    "atoll_merge_delta_norm": MetricInfo("norm of the merged delta, mean over the newest merge of each fragment"),
    "atoll_merge_cosine": MetricInfo("cosine similarity between the deltas of learners, mean over fragments"),
    "atoll_merge_momentum_norm": MetricInfo("norm of the outer momentum, mean over fragments"),
    "atoll_merge_step_norm": MetricInfo("norm of the published update, mean over fragments"),
    "atoll_merge_left_out_ratio": MetricInfo("quantization error of the published update, mean over fragments"),
    # ledger
    "atoll_ledger_merged_tokens": MetricInfo("trained tokens that are merged, mean over fragments"),
    "atoll_ledger_pending_tokens": MetricInfo("trained tokens that are not merged yet, mean over fragments"),
    "atoll_ledger_dropped_tokens": MetricInfo("trained tokens that were dropped, mean over fragments", ("reason",)),
    "atoll_ledger_balanced": MetricInfo("1 if trained = merged + pending + dropped in every fragment"),
    # links
    "atoll_syncer_received_bytes_total": MetricInfo("bytes of contributions received by this syncer process"),
    "atoll_syncer_sent_bytes_total": MetricInfo("bytes of fragments sent by this syncer process"),
    "atoll_learner_sent_bytes_total": MetricInfo("bytes sent by the current incarnation", ("learner",)),
    "atoll_learner_received_bytes_total": MetricInfo("bytes received by the current incarnation", ("learner",)),
    "atoll_refused_total": MetricInfo("invalid requests and messages refused by this syncer process", ("code",)),
    "atoll_ignored_total": MetricInfo("messages that arrived too late to have an effect", ("reason",)),
}

Sample = tuple[str, tuple[str, ...], float | None]


def render_metrics(syncer: SyncerProcess, accept: str) -> tuple[bytes, str]:
    """Return the metrics as text, and its content type.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

    class SyncerCollector(Collector):
        def collect(self) -> Iterable[Metric]:
            families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
            for name, kind in METRICS.items():
                family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                families[name] = family(name, kind.help, labels=kind.labels)
            for name, labels, value in collect_samples(syncer):
                if value is not None:
                    families[name].add_metric(labels, float(value))
            return families.values()

    registry = CollectorRegistry(auto_describe=False)
    registry.register(SyncerCollector())
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def collect_samples(syncer: SyncerProcess) -> Iterator[Sample]:
    """Yield the name, the label values and the value of each sample. The value is None while it is unknown."""
    status = build_status(syncer)
    yield "atoll_run_info", (status["run"], __version__), 1.0
    yield "atoll_run_stage", (status["stage"],), 1.0
    yield "atoll_run_seconds", (), status["wall_s"]
    yield "atoll_run_progress_ratio", (), status["progress"]
    yield "atoll_syncer_epoch", (), status["epoch"]
    yield "atoll_syncer_received_bytes_total", (), status["bytes"]["up"]
    yield "atoll_syncer_sent_bytes_total", (), status["bytes"]["down"]
    for code, count in status["refused"].items():
        yield "atoll_refused_total", (code,), count
    if not status["founded"]:
        return
    yield from _run_samples(status)
    yield "atoll_contributions_total", (), syncer.merged_contributions
    yield from _merge_samples(syncer)
    yield from _ledger_samples(status["ledger"])
    for learner in status["learners"][:MAX_LABELLED]:
        yield from _learner_samples(learner)


def _run_samples(status: Mapping[str, Any]) -> Iterator[Sample]:
    for name in ("alive", "pulled", "merged"):
        yield f"atoll_learners_{name}", (), status[name]
    yield "atoll_quorum_learners", (), status["quorum"]
    yield "atoll_trained_tokens", (), status["trained"]
    yield "atoll_merges_total", (), status["merges"]
    yield "atoll_rounds_in_flight", (), status["rounds_in_flight"]
    yield "atoll_rounds_in_flight_limit", (), status["flight_limit"]
    for name in ("step", "quorum", "sync"):
        yield f"atoll_{name}_seconds", (), status[f"{name}_s"]
    for fragment in status["fragments"][:MAX_LABELLED]:
        yield "atoll_fragment_version", (str(fragment["fragment"]),), fragment["version"]
    for reason, count in status["ignored"].items():
        yield "atoll_ignored_total", (reason,), count


def _merge_samples(syncer: SyncerProcess) -> Iterator[Sample]:
    metrics = syncer.metrics
    yield "atoll_merge_seconds_total", (), metrics.merge_s
    yield "atoll_last_merge_timestamp_seconds", (), metrics.merged_at
    newest = list(metrics.newest_merges.values())
    yield "atoll_merge_delta_norm", (), _mean(stats.merged_norm for stats in newest)
    yield "atoll_merge_left_out_ratio", (), _mean(stats.quantization_error for stats in newest)
    for name in ("cosine", "momentum_norm", "step_norm"):
        yield f"atoll_merge_{name}", (), _mean(getattr(stats, name) for stats in newest)


def _ledger_samples(lines: list[Mapping[str, Any]]) -> Iterator[Sample]:
    dropped: dict[str, float] = {}
    for line in lines:
        for reason, tokens in line["dropped"].items():
            dropped[reason] = dropped.get(reason, 0.0) + tokens / len(lines)
    yield "atoll_ledger_merged_tokens", (), _mean(line["merged"] for line in lines)
    yield "atoll_ledger_pending_tokens", (), _mean(line["pending"] for line in lines)
    for reason, tokens in dropped.items():
        yield "atoll_ledger_dropped_tokens", (reason,), tokens
    balanced = all(
        line["pending"] >= 0 and line["trained"] == line["merged"] + line["pending"] + sum(line["dropped"].values())
        for line in lines
    )
    yield "atoll_ledger_balanced", (), float(balanced)


LEARNER_FIELD_METRICS = {
    "loss": "atoll_learner_loss",
    "tokens_per_s": "atoll_learner_tokens_per_second",
    "tokens": "atoll_learner_tokens_total",
    "boundary_s": "atoll_learner_boundary_seconds_total",
    "bytes_up": "atoll_learner_sent_bytes_total",
    "bytes_down": "atoll_learner_received_bytes_total",
    "incarnation": "atoll_learner_incarnation",
    "strikes": "atoll_learner_strikes",
    "step": "atoll_learner_steps",
}
"""Fields of a learner in the status, and their metrics."""


def _learner_samples(learner: Mapping[str, Any]) -> Iterator[Sample]:
    labels = (str(learner["learner"]),)
    yield "atoll_learner_standing", (*labels, learner["standing"]), 1.0
    yield "atoll_learner_link_up", labels, float(learner["link"] == "up")
    for field, name in LEARNER_FIELD_METRICS.items():
        yield name, labels, learner.get(field)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
