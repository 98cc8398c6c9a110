"""An island of the tests: a model of a few numbers, and a launcher's word for everything else.

The run does not end before the file GO exists in the run's directory.
"""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import torch

import atoll

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
go = Path(os.environ["ATOLL_RUN_DIRECTORY"], "GO")
with atoll.Learner(model, optimizer) as learner:
    print(f"incarnation {learner.incarnation}", flush=True)
    pace = threading.Event()  # never set: two cores have to carry the tests too
    while not learner.finished:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        learner.step(tokens=5000 if go.exists() else 1)
        step += 1
        pace.wait(0.005)
        if step % 50 == 0:
            print(f"step {step}", flush=True)
values = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
print(f"digest {hashlib.sha256(values).hexdigest()}", flush=True)
