"""Lightning's Trainer as a learner of a real run. The syncer is a process of its own, the trainer is in this one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

with warnings.catch_warnings():  # raised by its imports
    warnings.simplefilter("ignore")
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from atoll.integrations.data import leased_batches
from atoll.integrations.lightning import BATCHES_READ, AtollCallback
from atoll.integrations.schedules import linear, progress_schedule
from tests.integrations.reading_islands import PartRequest
from tests.learner.runs import LIMIT_S, Run, config, endless

# Lightning warns about workers, Slurm and directories, torchdata about deprecated functions of torch.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("no_leftovers")]

ROWS, BATCH = 40, 4
STEPS = 20_000  # far more than needed: a test fails if its training does not end before


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    torch.set_num_threads(1)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith(("atoll", "asyncio"))]
    assert left == []


class Rows(Dataset[Tensor]):
    """Dataset whose row n begins with n."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.sin(torch.arange(8.0) * (index + 1))])


class EndlessRows(IterableDataset[Tensor]):
    """Dataset without a length that can save its position."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.next += 1
            yield Rows()[(self.next - 1) % ROWS]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Small(LightningModule):
    """Module that records its rows and its validated weights. It calls `fault` at batch `at`."""

    def __init__(self, fault: Callable[[], Any] | None = None, at: int = 5) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))
        self.fault = fault
        self.fault_at = at
        self.seen: list[list[int]] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.validated: list[dict[str, Tensor]] = []

    def training_step(self, batch: Tensor) -> Tensor:
        self.seen.append([int(row) for row in batch[:, 0]])
        if self.fault is not None and len(self.seen) == self.fault_at:
            self.fault()
        loss: Tensor = (self.layers(batch[:, 1:]) - batch[:, 1:5]).float().square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        if grads:
            self.norms.append(float(torch.stack([grad.norm() for grad in grads]).norm()))

    def validation_step(self, batch: Tensor, number: int) -> None:
        if number == 0:
            self.validated.append(values(self))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return {"optimizer": optimizer, "lr_scheduler": progress_schedule(optimizer, linear(end=0.5))}


class Watch(Callback):
    """Record what a test checks. Call `on_batch_end` after every batch, after the Atoll callback."""

    def __init__(self, island: AtollCallback, on_batch_end: Callable[[Trainer, Small], None] | None = None) -> None:
        self.island = island
        self.on_batch_end = on_batch_end
        self.moments = 0.0
        self.initial: dict[str, Tensor] = {}
        self.published: dict[str, Tensor] = {}
        self.rates: list[tuple[float, float]] = []
        self.reported: list[tuple[int, float]] = []  # batches so far, and the loss

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        states = trainer.optimizers[0].state.values()
        self.moments = max((float(state["step"]) for state in states), default=0.0)
        self.initial = values(pl_module)
        with self.island.learner.published():
            self.published = values(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Small)
        learner = self.island.learner
        loss = learner._background.last_loss
        assert loss is None or isinstance(loss, Tensor)
        if loss is not None:
            self.reported.append((len(pl_module.losses), float(loss)))
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.rates.append((rate, 0.02 * linear(end=0.5)(learner.progress) * learner.lr_scale))
        if self.on_batch_end is not None:
            self.on_batch_end(trainer, pl_module)


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def island_of(run: Run, kind: type[AtollCallback] = AtollCallback, **settings: Any) -> AtollCallback:
    return kind(run.address, **({"learner": 1, "join_timeout_s": LIMIT_S} | settings))


def trainer_of(*callbacks: Callback, **settings: Any) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return Trainer(
        accelerator="cpu", callbacks=list(callbacks), **({"max_epochs": -1, "max_steps": STEPS} | quiet | settings)
    )


def loader(kind: type[DataLoader[Tensor]] = StatefulDataLoader) -> DataLoader[Tensor]:
    return kind(Rows(), batch_size=BATCH, shuffle=True)


# --------------------------------------------------------------------------------------------------------------------
# Training


class EveryBatch(AtollCallback):
    """Planted bug: each batch is reported as a step, although gradients are accumulated."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._steps = -1
        super().on_train_batch_end(trainer, *args)


def test_a_trainer_trains_until_the_run_is_over_and_has_the_published_model(tmp_path):
    """A step has three batches, the last one of an epoch has one. Mixed precision, clipping and a schedule are on."""
    with Run(tmp_path, config()) as run:
        module, island = Small(), island_of(run)
        watch = Watch(island)
        trainer = trainer_of(island, watch, accumulate_grad_batches=3, precision="bf16-mixed", gradient_clip_val=0.1)
        trainer.fit(module, loader())
        assert island.learner.finished
        assert run.syncer.expect("ended") is True
        assert same(values(module), load_file(tmp_path / "published.safetensors"))
    assert_counted(module, trainer, watch)
    for rate, expected in watch.rates:
        assert rate == pytest.approx(expected)
    assert watch.rates[-1][0] < 0.015
    assert max(module.norms) <= 0.1 + 1e-4, "gradients were not clipped"


def test_planted_callback_that_counts_batches_as_steps_is_found(tmp_path):
    with Run(tmp_path, config()) as run:
        module, island = Small(), island_of(run, EveryBatch)
        watch = Watch(island)
        trainer = trainer_of(island, watch, accumulate_grad_batches=3)
        trainer.fit(module, loader())
    with pytest.raises(AssertionError, match="optimizer steps"):
        assert_counted(module, trainer, watch)


def assert_counted(module: Small, trainer: Trainer, watch: Watch) -> None:
    """Assert the counts of steps and tokens: an epoch has ten batches, in steps of three, three, three and one."""
    stats = watch.island.learner.stats()
    epochs, rest = divmod(len(module.seen), 10)
    assert len(module.seen) > 20
    assert trainer.global_step == 4 * epochs + rest // 3
    # The step at which the learner finds that the run is over is not counted.
    assert trainer.global_step - stats.steps in (0, 1), "optimizer steps differ from the steps of the learner"
    assert 0 <= BATCH * len(module.seen) - stats.tokens <= 3 * BATCH, "tokens of some batches are missing"
    compared = 0
    for batches, loss in watch.reported:
        of_epoch = (batches - 1) % 10 + 1
        if of_epoch % 3 == 0 or of_epoch == 10:  # a step was taken here
            window = module.losses[batches - (1 if of_epoch == 10 else 3) : batches]
            assert loss == pytest.approx(sum(window) / len(window), abs=1e-4)
            compared += 1
    assert compared > 5


class ByHand(Small):
    """Module that steps its optimizer itself, twice for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor) -> Tensor:
        for _ in range(2):
            loss = super().training_step(batch)
            optimizer = self.optimizers()
            assert not isinstance(optimizer, list)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


def test_a_module_that_steps_by_hand_takes_one_step_of_the_island_for_each_batch(tmp_path):
    with Run(tmp_path, endless()) as run:
        module, island = ByHand(), island_of(run)
        watch = Watch(island)
        trainer_of(island, watch, max_steps=14).fit(module, loader())
        stats = island.learner.stats()
    assert (stats.steps, stats.tokens, watch.moments) == (7, 7 * BATCH, 0)
    assert [loss for _, loss in watch.reported] == pytest.approx(module.losses[1::2])


class Overflowing(Small):
    """Module whose third step has infinite gradients."""

    def training_step(self, batch: Tensor) -> Tensor:
        loss = super().training_step(batch)
        return loss * float("inf") if len(self.seen) == 5 else loss


def test_skipped_step_is_not_reported(tmp_path):
    """The trainer counts a step whose fp16 gradients overflow, but nothing was learned from its tokens."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with Run(tmp_path, endless()) as run:
        island = island_of(run)
        watch = Watch(island)
        mixed = MixedPrecision("16-mixed", "cpu", scaler)
        trainer = trainer_of(island, watch, max_steps=5, accumulate_grad_batches=2, plugins=[mixed])
        trainer.fit(Overflowing(), loader())
        stats = island.learner.stats()
    assert trainer.global_step == 5
    assert scaler.get_scale() == 2.0, "no overflow happened"
    assert (stats.steps, stats.tokens) == (4, 4 * 2 * BATCH)
    assert max(loss for _, loss in watch.reported) < float("inf")


def test_trainer_of_pytorch_lightning_works(tmp_path):
    import pytorch_lightning

    class Older(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.small = Small()

        def training_step(self, batch: Tensor) -> Tensor:
            return self.small.training_step(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.02)

    with Run(tmp_path, config(budget_merges=4)) as run:
        island = island_of(run)
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        trainer = pytorch_lightning.Trainer(max_epochs=-1, accelerator="cpu", callbacks=[island], **quiet)
        trainer.fit(Older(), loader())
        assert island.learner.finished


def test_trainer_trains_on_leased_samples(tmp_path):
    """The loader must not read ahead: otherwise steps would count samples that are trained later."""
    # On a slow machine 12 merges can happen within ten steps, and an epoch has ten batches.
    with Run(tmp_path, config(budget_merges=36, lease_samples=3 * BATCH + 1, leases_ahead=3)) as run:
        module, island = Small(), island_of(run)
        counts: list[tuple[int, int]] = []
        watch = Watch(island, lambda trainer, small: counts.append((len(small.seen), island.learner.stats().samples)))
        trainer_of(island, watch).fit(module, leased_batches(Rows(), island, BATCH, seed=5))
        assert island.learner.finished
        repeated = island.learner.stats().repeated_steps
    if not repeated:
        assert all(samples in (BATCH * batches, BATCH * (batches - 1)) for batches, samples in counts), counts
        first = sorted(row for rows in module.seen[: ROWS // BATCH] for row in rows)
        assert first == list(range(ROWS)), "each row once in the first epoch"


# --------------------------------------------------------------------------------------------------------------------
# The published model


def broken() -> None:
    raise ArithmeticError("an error in the user's module")


class Blind(AtollCallback):
    """Planted bug: validation uses the learner's own weights."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None: ...


@pytest.mark.parametrize("kind", [AtollCallback, Blind])
def test_published_model_is_validated(tmp_path, kind):
    published: list[dict[str, Tensor]] = []
    own: list[dict[str, Tensor]] = []

    island: AtollCallback

    def record(trainer: Trainer, module: Small) -> None:
        if len(own) > len(published):
            raise AssertionError("a step was not recorded")
        with island.learner.published():
            published.append(values(module))
        own.append(values(module))

    class Before(Callback):
        """Check the weights at the start of the next batch, after the Atoll callback."""

        def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
            if own:
                assert same(values(module), own[-1]), "training does not continue with its own weights"

    with Run(tmp_path, config()) as run:
        module, island = Small(), island_of(run, kind)
        trainer = trainer_of(island, Watch(island, record), Before(), val_check_interval=1, num_sanity_val_steps=0)
        trainer.fit(module, loader(), DataLoader(Rows(), batch_size=ROWS))
        assert island.learner.finished
    assert len(module.validated) == len(published) > 10
    steps_ahead = sum(not same(one, other) for one, other in zip(own, published, strict=True))
    assert steps_ahead > 5, "the weights were never ahead of the published ones"
    is_published = all(same(one, other) for one, other in zip(module.validated, published, strict=True))
    assert is_published is (kind is AtollCallback)


def test_checkpoints_hold_the_published_model_and_the_run_wins_when_one_is_loaded(tmp_path):
    """The model is always that of the run. The counters of the trainer are those of the checkpoint.

    Optimizer state comes from a peer, else from the newest part of the learner, else from the checkpoint.
    """
    published: dict[int, dict[str, Tensor]] = {}
    island: AtollCallback
    trainer: Trainer

    def record(trainer: Trainer, module: Small) -> None:
        with island.learner.published():
            published[trainer.global_step] = values(module)
        trainer.should_stop = trainer.global_step >= 7 and has_part() and trainer.global_step >= 12

    full = ModelCheckpoint(tmp_path / "full", "{step}", every_n_train_steps=6, save_top_k=-1)
    light = ModelCheckpoint(tmp_path / "light", "{step}", every_n_train_steps=3, save_top_k=-1, save_weights_only=True)
    with Run(tmp_path, endless()) as run:
        has_part = PartRequest(run)
        module, island = (
            Small(),
            island_of(run, run_directory=tmp_path, extra_state=lambda: {"step": trainer.global_step}),
        )
        trainer = trainer_of(island, Watch(island, record), full, light, enable_checkpointing=True)
        trainer.fit(module, loader())
        checkpoint = tmp_path / "full/step=6.ckpt"
        for path in (checkpoint, tmp_path / "light/step=6.ckpt"):
            assert same(torch.load(path)["state_dict"], published[6])
        last_step = max(published)

        def resumed(**settings: Any) -> tuple[Watch, Trainer]:
            restarted = island_of(run, **settings)
            watch = Watch(restarted)
            trainer = trainer_of(restarted, watch, max_steps=9)
            trainer.fit(Small(), loader(), ckpt_path=checkpoint)
            return watch, trainer

        watch, trainer = resumed()
        assert watch.moments == 6, "no other learner can send its optimizer state"
        assert same(watch.initial, watch.published)
        assert not same(watch.initial, published[6]), "the run is ahead of the checkpoint"
        assert trainer.global_step == 9
        assert len(watch.rates) == 3, "steps after those of the checkpoint"
        watch, _ = resumed(run_directory=tmp_path)
        assert 6 < watch.moments <= last_step, "its own part is newer than the checkpoint"
        assert watch.island.restored_state == {"step": watch.moments}


@pytest.mark.parametrize("fault", [None, broken])
def test_published_model_is_saved_when_training_has_ended(tmp_path, fault):
    """The learner has left before that checkpoint is written."""
    seen: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    island: AtollCallback

    def record(trainer: Trainer, module: Small) -> None:
        with island.learner.published():
            published = values(module)
        seen.append((published, values(module)))

    last = ModelCheckpoint(tmp_path, "last", every_n_train_steps=STEPS, save_last=True, save_on_exception=True)
    with Run(tmp_path, endless()) as run:
        island = island_of(run)
        trainer = trainer_of(island, Watch(island, record), last, enable_checkpointing=True, max_steps=8)
        with pytest.raises(ArithmeticError) if fault is not None else contextlib.nullcontext():
            trainer.fit(Small(fault), loader())
    published, own = seen[-1]
    saved = torch.load(tmp_path / "last.ckpt")["state_dict"]
    assert same(saved, published)
    assert not same(saved, own), "its own weights equal the published ones"
    if fault is None:
        assert same(trainer.strategy.lightning_module_state_dict(), own), "afterwards it must save its own weights"


# --------------------------------------------------------------------------------------------------------------------
# Positions of loaders


class ResumedData:
    """Samples of a first incarnation after its part was saved, and samples of the second one."""

    def __init__(self, run: Run, make_loader: Callable[[], DataLoader[Tensor]]) -> None:
        first, has_part, self.last = Small(), PartRequest(run), 0
        island = island_of(run, run_directory=run.directory, extra_state=lambda: len(first.seen))

        def record(trainer: Trainer, module: Small) -> None:
            if len(module.seen) > 5 and not self.last and has_part():
                self.last = len(module.seen) + 3
            trainer.should_stop = len(module.seen) == self.last

        trainer_of(island, Watch(island, record)).fit(first, make_loader())
        second = Small()
        island = island_of(run, run_directory=run.directory)
        trainer_of(island, max_steps=14).fit(second, make_loader())
        assert isinstance(island.restored_state, int)
        self.followed = first.seen[island.restored_state :]  # samples of the first incarnation after its part was saved
        self.resumed = second.seen
        assert self.followed, "it did not train after the snapshot"

    @property
    def is_right(self) -> bool:
        return self.resumed[: len(self.followed)] == self.followed[: len(self.resumed)]


def endless_loader() -> DataLoader[Tensor]:
    created: DataLoader[Tensor] = StatefulDataLoader(EndlessRows(), batch_size=BATCH)
    return created


@pytest.mark.parametrize(
    ("make_loader", "is_right"),
    [(loader, True), (endless_loader, True), (lambda: loader(DataLoader), False)],
    ids=["of known length", "read ahead", "planted: without a position"],
)
def test_loader_resumes_at_its_position(tmp_path, make_loader, is_right):
    with Run(tmp_path, endless()) as run:
        found = ResumedData(run, make_loader)
    assert found.is_right is is_right, (found.followed, found.resumed)


@pytest.mark.parametrize(("has_count", "batches"), [(True, 14), (False, 16)], ids=["", "of a part without the number"])
def test_last_step_of_a_resumed_epoch_is_taken(tmp_path, has_count, batches):
    """Resume after six of ten batches, which make steps of three, three, three and one.

    If the trainer cannot know that the tenth batch is the last, its gradients are dropped and its tokens not counted.
    """
    saved: dict[str, Any] = {}
    first: AtollCallback

    class Resuming(AtollCallback):
        def _restore_positions(self, trainer: Trainer, restored: Any) -> None:
            super()._restore_positions(trainer, saved)

    def record(trainer: Trainer, module: Small) -> None:
        if len(module.seen) == 6:
            saved.update(first._extra_state(trainer, None))

    def ordered() -> DataLoader[Tensor]:
        created: DataLoader[Tensor] = StatefulDataLoader(Rows(), batch_size=BATCH)
        return created

    with Run(tmp_path, endless()) as run:
        first = island_of(run)
        trainer_of(first, Watch(first, record), max_steps=3, accumulate_grad_batches=3).fit(Small(), ordered())
        if not has_count:
            del saved[BATCHES_READ]
        module, island = Small(), island_of(run, Resuming)
        trainer_of(island, max_steps=6, accumulate_grad_batches=3).fit(module, ordered())
        stats = island.learner.stats()
    assert [rows[0] // BATCH for rows in module.seen] == [6, 7, 8, 9, *range(10), 0, 1, 2][: len(module.seen)]
    assert (stats.steps, stats.tokens) == (6, batches * BATCH)


# --------------------------------------------------------------------------------------------------------------------
# Leaving


def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("fault", "raised", "cause"),
    [(broken, ArithmeticError, "ArithmeticError"), (interrupted, SystemExit, "KeyboardInterrupt")],
)
def test_an_island_that_fails_or_is_interrupted_leaves_the_run(tmp_path, fault, raised, cause):
    with Run(tmp_path, endless()) as run:
        island = island_of(run)
        with pytest.raises(raised):
            trainer_of(island).fit(Small(fault), loader())
        assert len(run.log_lines(run.syncer, f"its loop ended with {cause}")) == 1, run.syncer.logged()
        assert not island.learner.finished


def preempted() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Fails(AtollCallback):
    """Planted bug: Lightning's exception for SIGTERM is handled as a failure."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave(exception)


@pytest.mark.parametrize(("kind", "at", "lost"), [(AtollCallback, 7, 0), (AtollCallback, 8, 0), (Fails, 7, 3)])
def test_notice_is_handled_in_batches_with_and_without_a_step(tmp_path, kind, at, lost):
    """Every second batch makes a step. No round is due before the notice, so all work is merged after it."""
    with Run(tmp_path, endless(every_steps=100)) as run:
        island = island_of(run, kind, notice_s=LIMIT_S)
        with pytest.raises(SIGTERMException):
            trainer_of(island, accumulate_grad_batches=2).fit(Small(preempted, at), loader())
        stats = island.learner.stats()
    assert (stats.steps, stats.tokens) == (at // 2, at // 2 * 2 * BATCH)
    assert stats.unmerged_tokens == lost * 2 * BATCH


def test_steps_of_the_trainer_end_it_too_and_the_run_goes_on(tmp_path):
    with Run(tmp_path, endless()) as run:
        island = island_of(run)
        trainer_of(island, max_steps=7).fit(Small(), loader())
        assert island.learner.stats().steps == 7
        assert len(run.log_lines(run.syncer, "its loop ended")) == 1, run.syncer.logged()
        assert run.status()["stage"] == "running"


# --------------------------------------------------------------------------------------------------------------------
# Unsupported trainers


class TwoOptimizers(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.layers[0], self.layers[2])]


class FSDPStrategy(SingleDeviceStrategy):
    """Stand-in, found by its name: the real one requires accelerators."""


def test_unsupported_trainers_are_refused_with_advice(tmp_path):
    with pytest.raises(ValueError, match=r"no setting 'learners'; use one of .*learner, "):
        AtollCallback(learners=3)
    with pytest.raises(ValueError, match="has not joined yet"):
        AtollCallback().take(3)
    with pytest.raises(ValueError, match="has 2 optimizers, and the callback takes one: return one optimizer, with"):
        trainer_of(AtollCallback("127.0.0.1:9")).fit(TwoOptimizers(), loader())
    with pytest.raises(ValueError, match=r'its own flat buffers.*use strategy="ddp"'):
        trainer_of(AtollCallback("127.0.0.1:9"), strategy=FSDPStrategy()).fit(Small(), loader())
