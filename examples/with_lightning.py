"""One island with Lightning's Trainer: a small byte model on the sources of Python's standard library.

    python examples/with_lightning.py --learner 1
    torchrun --nproc-per-node 2 examples/with_lightning.py --learner 2

Under torchrun the island has several ranks (DDP). With `--leases` the syncer leases each sample to one island.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from atoll.integrations.data import leased_batches
from atoll.integrations.lightning import AtollCallback
from atoll.integrations.schedules import cosine, progress_schedule

BATCH, CONTEXT, WIDTH, LR = 16, 32, 64, 1e-2

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--syncer", default="127.0.0.1:7400", help="address of the syncer")
parser.add_argument("--learner", type=int, help="number of this learner, from 1")
parser.add_argument("--leases", action="store_true", help="train on samples leased by the syncer")
parser.add_argument("--precision", default="32-true", help="precision of Lightning, such as bf16-mixed")
parser.add_argument("--out", default="model.pt", help="where to save the model")
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
ranks = int(os.environ.get("WORLD_SIZE", 1))

sources = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
text = torch.frombuffer(bytearray(sources), dtype=torch.uint8).long()
rows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
held_out, training = rows[:500], rows[3000:]


class ByteModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:  # [batch, CONTEXT + 1] -> loss
        states, _ = self.rnn(self.embed(x[:, :-1]))
        return cross_entropy(self.head(states).flatten(0, 1), x[:, 1:].flatten())

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        loss: Tensor = self(batch)
        if number % 100 == 0 and self.global_rank == 0:
            print(f"step {self.global_step} of incarnation {island.learner.incarnation}: {loss.item():.3f}", flush=True)
        return loss

    def validation_step(self, batch: Tensor) -> None:
        self.log("published", self(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR)
        return {"optimizer": optimizer, "lr_scheduler": progress_schedule(optimizer, cosine(warmup=0.05))}


island = AtollCallback(options.syncer, learner=options.learner, tokens=lambda batch: batch[:, 1:].numel())
if options.leases:
    loader = leased_batches(training, island, BATCH)
else:
    torch.manual_seed(options.learner or 0)  # every island shuffles the rows differently
    loader = StatefulDataLoader(training, batch_size=BATCH, shuffle=True)
trainer = Trainer(
    max_epochs=-1,  # until the run ends
    callbacks=[island],
    accelerator="cpu",
    strategy="ddp" if ranks > 1 else "auto",
    devices=ranks,
    precision=options.precision,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    val_check_interval=100,
    check_val_every_n_epoch=None,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = ByteModel()
trainer.fit(model, loader, DataLoader(held_out, batch_size=250))  # type: ignore[arg-type]

if trainer.is_global_zero:
    with torch.no_grad():
        print(f"held-out loss {model(held_out).item():.4f}", flush=True)
    torch.save(model.state_dict(), options.out)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
