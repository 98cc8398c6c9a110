"""Fine-tune the byte model of plain.py to predict the token kind of each byte of a Python source.

Shows what a real job may have: a frozen backbone, a head in bfloat16, a norm whose running statistics are buffers,
parameter groups with their own learning rates, and a schedule with a warmup.
"""

import argparse
import io
import itertools
import keyword
import math
import os
import tokenize
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import atoll

BATCH, CONTEXT, WIDTH = 16, 64, 64
KINDS = ("SPACE", "NAME", "KEYWORD", "NUMBER", "OP", "STRING", "COMMENT")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--backbone", default="model.pt", help="model saved by plain.py or with_atoll.py")
parser.add_argument("--syncer", default=os.environ.get("ATOLL_SYNCER", "127.0.0.1:7400"), help="address of the syncer")
parser.add_argument("--learner", type=int, help="number of this learner, from 1")
parser.add_argument("--out", default="finetuned.pt", help="where to save the model")
options = parser.parse_args()
torch.set_num_threads(1)


def read_sources(*names: str) -> tuple[Tensor, Tensor]:
    """Return the bytes of standard library modules, and the token kind of each byte."""
    sources = [(Path(os.__file__).parent / f"{name}.py").read_bytes() for name in names]
    kinds = []
    for source in sources:
        line_starts = list(itertools.accumulate(map(len, source.splitlines(keepends=True)), initial=0))
        kinds.append(torch.zeros(len(source), dtype=torch.long))
        for token in tokenize.tokenize(io.BytesIO(source).readline):
            kind = "KEYWORD" if keyword.iskeyword(token.string) else tokenize.tok_name[token.type]
            kind = "STRING" if "STRING" in kind else kind  # also parts of an f-string
            if kind in KINDS:
                (row, column), (last_row, last_column) = token.start, token.end
                kinds[-1][line_starts[row - 1] + column : line_starts[last_row - 1] + last_column] = KINDS.index(kind)
    return torch.frombuffer(bytearray(b"".join(sources)), dtype=torch.uint8).long(), torch.cat(kinds)


class Highlighter(nn.Module):
    def __init__(self, backbone: dict[str, Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.load_state_dict({name: value for name, value in backbone.items() if not name.startswith("head")})
        self.requires_grad_(False)  # frozen: not synchronized, so it must be equal on every island
        self.norm = nn.BatchNorm1d(WIDTH)  # its running mean and variance are averaged over the islands
        self.head = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, len(KINDS))).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:  # [batch, CONTEXT] -> [batch * CONTEXT, kinds]
        states, _ = self.rnn(self.embed(x))
        scores: Tensor = self.head(self.norm(states.flatten(0, 1)).bfloat16())
        return scores.float()


text, kinds = read_sources("argparse", "inspect", "tarfile")
model = Highlighter(torch.load(options.backbone, weights_only=True))
groups = [{"params": model.norm.parameters(), "peak_lr": 1e-2}, {"params": model.head.parameters(), "peak_lr": 3e-3}]
optimizer = torch.optim.AdamW(groups)

with atoll.Learner(model, optimizer, options.syncer, os.environ.get("ATOLL_TOKEN"), learner=options.learner) as learner:
    torch.manual_seed(1000 * learner.id + learner.incarnation)
    while not learner.finished:
        # Progress is of the run, not of the island, so a learner that joins late continues the schedule. It is 0 until
        # the first merge, so the warmup must not start at 0.
        warmup = min(1.0, 0.1 + learner.progress / 0.1)
        rate = warmup * 0.5 * (1.0 + math.cos(math.pi * learner.progress)) * learner.lr_scale
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * rate
        window = torch.randint(len(text) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT)
        loss = cross_entropy(model(text[window]), kinds[window].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(tokens=window.numel(), loss=loss)
    steps = learner.stats().steps

model.eval()
text, kinds = read_sources("subprocess")
length = len(text) // CONTEXT * CONTEXT
with torch.no_grad():
    right = model(text[:length].view(-1, CONTEXT)).argmax(1) == kinds[:length]
print(f"{steps} steps here; of a module that was held out, {100 * right.float().mean().item():.2f} % is right")
torch.save(model.state_dict(), options.out)
