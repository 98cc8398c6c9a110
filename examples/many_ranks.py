"""One island of several ranks: a small byte model under torchrun, sharded with FSDP2 or replicated with DDP.

    torchrun --nproc-per-node 2 examples/many_ranks.py --learner 1

Without torchrun the island has one rank. Islands of all kinds can train one model together.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import atoll

BATCH, CONTEXT, WIDTH, LR = 64, 8, 64, 3e-3

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--syncer", default=os.environ.get("ATOLL_SYNCER", "127.0.0.1:7400"), help="address of the syncer")
parser.add_argument("--learner", type=int, help="number of this learner, from 1")
parser.add_argument("--ddp", action="store_true", help="replicate the model with DDP; default: shard it with FSDP2")
parser.add_argument("--out", default="model.pt", help="where to save the model")
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
if "RANK" in os.environ:  # set by torchrun; on GPUs use "nccl"
    dist.init_process_group("gloo")
rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

sources = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
text = torch.frombuffer(bytearray(sources), dtype=torch.uint8).long()
held_out, training = text[: 1000 * (CONTEXT + 1)].view(1000, CONTEXT + 1), text[100_000:]


class ByteModel(nn.Module):
    """Predict the next byte from the last few bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.hidden = nn.Linear(CONTEXT * WIDTH, 4 * WIDTH)
        self.head = nn.Linear(4 * WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:  # [batch, CONTEXT + 1] -> loss
        hidden = torch.relu(self.hidden(self.embed(x[:, :-1]).flatten(1)))
        return cross_entropy(self.head(hidden), x[:, -1])


def next_batch() -> Tensor:
    starts = torch.randint(len(training) - CONTEXT, (BATCH, 1))
    return training[starts + torch.arange(CONTEXT + 1)]  # [BATCH, CONTEXT + 1]


plain = ByteModel()
model: nn.Module = plain
if dist.is_initialized() and options.ddp:
    model = DistributedDataParallel(plain)
elif dist.is_initialized():
    for layer in (plain.embed, plain.hidden, plain.head):
        fully_shard(layer)
    fully_shard(plain)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
step = 0
with atoll.Learner(model, optimizer, options.syncer, os.environ.get("ATOLL_TOKEN"), learner=options.learner) as learner:
    torch.manual_seed((1000 * learner.id + learner.incarnation) * 64 + rank)  # every rank draws its own batches
    if rank == 0:
        print(f"incarnation {learner.incarnation}, ranks: {ranks}", flush=True)
    while not learner.finished:
        loss = model(next_batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(tokens=BATCH, loss=loss)  # tokens of this rank; the learner adds up all ranks
        step += 1
        if rank == 0 and step % 50 == 0:
            print(f"step {step} of incarnation {learner.incarnation}: loss {loss.item():.3f}", flush=True)

with torch.no_grad():
    loss = model(held_out)
state = plain.state_dict().items()
whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state}
if rank == 0:
    print(f"held-out loss {loss.item():.4f}", flush=True)
    torch.save(whole, options.out)
if dist.is_initialized():
    dist.destroy_process_group()
    # Threads of gloo may still reference tensors of the last collective, and abort the process when the interpreter
    # shuts down (docs/islands.md). os._exit skips the shutdown.
    sys.stdout.flush()
    os._exit(0)
