"""Train a small model of bytes on the sources of Python's standard library."""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import atoll

BATCH, CONTEXT, WIDTH, LR = 16, 32, 64, 1e-2

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--syncer", default=os.environ.get("ATOLL_SYNCER", "127.0.0.1:7400"), help="where it listens")
parser.add_argument("--learner", type=int, help="number of this island, from 1")
parser.add_argument("--out", default="model.pt", help="where to save the model")
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)

sources = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
text = torch.frombuffer(bytearray(sources), dtype=torch.uint8).long()
held_out, training = text[: 1000 * (CONTEXT + 1)].view(1000, CONTEXT + 1), text[100_000:]


class ByteModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 256)
        self.head.weight = self.embed.weight  # tied
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:  # [batch, CONTEXT + 1] -> loss
        states, _ = self.rnn(self.embed(x[:, :-1]))
        return cross_entropy(self.head(states).flatten(0, 1), x[:, 1:].flatten())


def next_batch() -> Tensor:
    starts = torch.randint(len(training) - CONTEXT, (BATCH, 1))
    return training[starts + torch.arange(CONTEXT + 1)]  # [BATCH, CONTEXT + 1]


model = ByteModel()
optimizer = torch.optim.AdamW(model.parameters())
step = 0
with atoll.Learner(model, optimizer, options.syncer, os.environ.get("ATOLL_TOKEN"), learner=options.learner) as learner:
    torch.manual_seed(1000 * learner.id + learner.incarnation)  # every island draws batches of its own
    while not learner.finished:
        optimizer.param_groups[0]["lr"] = LR * (1 - 0.9 * learner.progress) * learner.lr_scale
        loss = model(next_batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(tokens=BATCH * CONTEXT, loss=loss)
        step += 1
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

with torch.no_grad():
    print(f"held-out loss {model(held_out).item():.4f}")
torch.save(model.state_dict(), options.out)
