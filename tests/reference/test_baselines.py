"""Tests of the baselines, as jobs of real processes, against reference implementations in this file."""

from __future__ import annotations

import io
import os
import signal
from dataclasses import replace

import pytest
import torch

from atoll.checkpoint.model_file import model_digest
from atoll.dashboard.terminal import LiveView
from atoll.reference.baselines import ring_bytes
from atoll.reference.child_processes import JobFailedError
from atoll.reference.data import Sampler
from atoll.reference.job import start_job
from atoll.reference.loop import model_config, read_metrics
from atoll.reference.models import build_model, clip_gradients, inner_optimizer, lr_factor, set_lr
from atoll.reference.saved_models import load_model
from atoll.tensors.settings import Numerics
from tests.reference.small_jobs import find_processes, load_corpus, silent_view, small_settings, small_text


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("data") / "text")


def train(settings, run):
    view, _ = silent_view()
    report = start_job(settings, run, view, load_corpus(settings))
    return report, load_model(run)[1]


class Reference:
    """Learners of a lockstep method in one process, implemented without the loop of the reference trainer."""

    def __init__(self, settings):
        self.settings = settings
        config = model_config(settings)
        corpus = load_corpus(settings)
        count = settings.learners
        self.models = [build_model(config, settings.seed) for _ in range(count)]
        self.optimizers = [
            inner_optimizer(model, settings.inner, settings.lr, settings.beta2, settings.weight_decay)
            for model in self.models
        ]
        self.sampler = Sampler(corpus, settings.seed, config.context)
        self.total = settings.lockstep_steps(config.context)

    def step(self, step, mean_gradients=False):
        for optimizer in self.optimizers:
            set_lr(optimizer, self.settings.lr * lr_factor((step + 1) / self.total, self.settings.warmup))
        for i, model in enumerate(self.models):
            begin = (step * len(self.models) + i) * self.settings.batch
            model.zero_grad()
            model(*self.sampler.batch(range(begin, begin + self.settings.batch))).backward()
        if mean_gradients:
            for same in zip(*(model.parameters() for model in self.models), strict=True):
                mean = torch.stack([p.grad for p in same]).mean(0)
                for parameter in same:
                    parameter.grad = mean.clone()
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            clip_gradients(model.parameters(), self.settings.clip)
            optimizer.step()


def assert_same(model, reference, atol=2e-5):
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-4, msg=f"{name} differs")


def test_single_equals_plain_training(text, tmp_path):
    settings = small_settings(text, method="single", learners=1)
    report, model = train(settings, tmp_path / "run")
    reference = Reference(settings)
    for step in range(reference.total):
        reference.step(step)
    assert model_digest(model) == model_digest(reference.models[0])
    assert report.bytes.up == report.rounds == 0
    assert report.effective_h is None
    assert report.tokens.trained == settings.tokens


def test_ddp_steps_on_the_mean_gradient_of_all_batches(text, tmp_path):
    settings = small_settings(text, method="ddp")
    report, model = train(settings, tmp_path / "run")
    reference = Reference(settings)
    for step in range(reference.total):
        reference.step(step, mean_gradients=True)
    assert_same(model, reference.models[0])
    assert report.effective_h == 1.0
    assert report.contributions_per_merge == 2.0
    assert report.bytes.up == 2 * reference.total * ring_bytes(report.parameters, 2)


def test_diloco_applies_the_outer_step_to_the_mean_delta_every_h_steps(text, tmp_path):
    settings = small_settings(
        text, method="diloco", numerics=Numerics(outer_lr=0.7, outer_momentum=0.9), tokens=2 * 2 * 16 * 20
    )
    report, model = train(settings, tmp_path / "run")
    reference = Reference(settings)
    anchor = [p.detach().clone() for p in reference.models[0].parameters()]
    momentum = [torch.zeros_like(a) for a in anchor]
    for step in range(reference.total):
        reference.step(step)
        if (step + 1) % settings.every_steps and step + 1 < reference.total:
            continue
        with torch.no_grad():
            for a, b, *theta in zip(anchor, momentum, *(m.parameters() for m in reference.models), strict=True):
                delta = sum(a - each for each in theta) / len(theta)
                b.mul_(0.9).add_(delta)
                a.sub_(0.7 * (delta + 0.9 * b))
                for each in theta:
                    each.copy_(a)
    assert_same(model, reference.models[0])
    assert report.rounds == 3  # after 8 and 16 steps, and at the end after 20


@pytest.mark.long
def test_streaming_exchanges_one_fragment_at_a_time_and_adopts_it_later(text, tmp_path):
    settings = small_settings(text, method="streaming", adopt="blend", overlap_steps=2)
    first, model = train(settings, tmp_path / "run")
    again, _ = train(settings, tmp_path / "again")
    assert first.final_digest == again.final_digest == model_digest(model)
    assert first.eval_loss < first.eval_loss_before
    # 40 steps, fragments at offsets 2, 4, 6 and 8 every 8 steps, the last round of each at the end
    assert first.rounds == 4 * 5 + 3
    assert first.bytes.up < 0.2 * train(replace(settings, method="ddp"), tmp_path / "ddp")[0].bytes.up


def test_error_of_a_process_is_in_the_error_of_the_job(text, tmp_path):
    settings = small_settings(text, method="ddp", inner="nonsense")
    with pytest.raises(JobFailedError, match=r"ends with: learner \d: inner optimizer 'nonsense' is unknown"):
        train(settings, tmp_path / "run")


def test_fast_learner_waits_for_the_straggler_in_paced_ddp(text, tmp_path):
    paced = small_settings(text, method="ddp", step_time_s=0.08, speeds=(1.0, 0.5), tokens=2 * 2 * 16 * 10)
    report, _ = train(paced, tmp_path / "run")
    assert report.paced is not None
    assert report.wall_s >= 10 * 0.16
    fast, slow = report.islands
    assert fast.waited_s > slow.waited_s
    assert report.goodput < 0.95


class KillOne(LiveView):
    """View that kills a process of the run once both processes train."""

    def __init__(self, run):
        super().__init__(io.StringIO())
        self.run = run
        self.killed: list[int] = []

    def show(self, shown, bands=None, now=None):
        if all(each["state"] == "training" for each in shown["islands"]) and not self.killed:
            self.killed = find_processes(self.run)[:1]
            os.kill(self.killed[0], signal.SIGKILL)


def test_baseline_fails_and_stops_all_processes_when_one_is_killed(text, tmp_path):
    run = tmp_path / "run"
    settings = small_settings(text, method="ddp", tokens=2 * 2 * 16 * 100_000)
    view = KillOne(run)
    with pytest.raises(JobFailedError, match="and ddp cannot continue without it"):
        start_job(settings, run, view, load_corpus(settings))
    assert view.killed, "no process was killed"
    assert find_processes(run) == []
    assert read_metrics(run, 1)
