"""One island with an accelerate loop: a small Llama on the bytes of Python's standard library.

    python examples/with_accelerate.py --learner 1

Nothing is downloaded: the model is built from a configuration, and each byte is a token.
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from atoll.integrations.accelerate import AcceleratedLearner
from atoll.integrations.batches import count_tokens_on_device
from atoll.integrations.data import epochs
from atoll.integrations.schedules import progress_schedule

CONTEXT = 64

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--syncer", help="address of the syncer; default: ATOLL_SYNCER")
parser.add_argument("--learner", type=int, help="number of this learner, from 1")
parser.add_argument("--out", default="accelerate-island", help="where to save the model")
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(options.learner or 0)  # every island draws its own batches

sources = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
text = torch.frombuffer(bytearray(sources), dtype=torch.uint8).long()
rows: Any = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)

sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=0, **sizes)
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
plain = LlamaForCausalLM(config)
model, optimizer, loader = accelerator.prepare(
    plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), DataLoader(rows[1000:], batch_size=8, shuffle=True)
)


@torch.no_grad()
def held_out_loss() -> float:
    model.eval()
    loss = model(input_ids=rows[:64], labels=rows[:64]).loss.item()
    model.train()
    return float(loss)


batches = epochs(loader)
with AcceleratedLearner(accelerator, model, optimizer, options.syncer, learner=options.learner) as learner:
    scheduler = progress_schedule(optimizer, lambda progress: 0.1 + 0.45 * (1 + math.cos(math.pi * progress)), learner)
    while not learner.finished:
        batch = next(batches)
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        learner.step(
            tokens=count_tokens_on_device(batch), loss=loss
        )  # called per micro-batch; two of them are one step
        steps = learner.stats().steps
        if accelerator.sync_gradients and steps % 10 == 0:
            with learner.published():
                print(f"step {steps}: held-out loss of the published model {held_out_loss():.3f}", flush=True)

stats = learner.stats()
print(f"{stats.steps} steps here, {stats.tokens} tokens; held-out loss {held_out_loss():.4f}")
accelerator.unwrap_model(model).save_pretrained(options.out)
