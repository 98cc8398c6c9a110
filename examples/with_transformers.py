"""One island with transformers.Trainer: a small GPT-2 on the bytes of Python's standard library.

    python examples/with_transformers.py --learner 1
    torchrun --nproc-per-node 2 examples/with_transformers.py --learner 2

Nothing is downloaded: the model is built from a configuration, and each byte is a token.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from atoll.integrations.transformers import AtollCallback

CONTEXT = 64

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--syncer", help="address of the syncer; default: ATOLL_SYNCER")
parser.add_argument("--learner", type=int, help="number of this learner, from 1")
parser.add_argument("--out", default="transformers-island", help="where to save checkpoints and the model")
options = parser.parse_args()
torch.set_num_threads(1)

sources = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
text = torch.frombuffer(bytearray(sources), dtype=torch.uint8).long()
samples = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)


def dataset(rows: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in rows]


config = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
arguments = TrainingArguments(
    options.out,
    use_cpu=True,
    seed=options.learner or 0,  # every island draws its own batches
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",  # over the run, not over max_steps
    warmup_steps=5,
    max_steps=100_000,  # the budget of the run ends training earlier
    eval_strategy="steps",
    eval_steps=10,
    save_strategy="no",
    logging_steps=10,
    report_to="none",
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
atoll_island = AtollCallback(options.syncer, learner=options.learner)
trainer = Trainer(
    model,
    arguments,
    train_dataset=dataset(samples[1000:]),
    eval_dataset=dataset(samples[:64]),
    callbacks=[atoll_island],
)
trainer.train()  # evaluates the published model, and ends with it
loss = trainer.evaluate()["eval_loss"]
if trainer.is_world_process_zero():
    stats = atoll_island.learner.stats()
    print(f"{stats.steps} steps here, {stats.tokens} tokens; held-out loss {loss:.4f}", flush=True)
    trainer.save_model()
trainer.end()
