"""One island that fine-tunes with LoRA (peft): only the adapter is synchronized, the base model is not.

    python examples/with_lora.py --learner 1

The base is a small GPT-2 on bytes with a fixed seed, in place of a pretrained model that every island loads. With
--base it is loaded from a directory that save_pretrained wrote. Nothing is downloaded.
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from atoll.integrations.transformers import AtollCallback

CONTEXT = 64

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--syncer", help="address of the syncer; default: ATOLL_SYNCER")
parser.add_argument("--learner", type=int, help="number of this learner, from 1")
parser.add_argument("--base", help="directory of a transformers model, such as the output of with_transformers.py")
parser.add_argument("--out", default="lora-island", help="where to save the adapter")
options = parser.parse_args()
torch.set_num_threads(1)

sources = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
text = torch.frombuffer(bytearray(sources), dtype=torch.uint8).long()
samples = [{"input_ids": row, "labels": row} for row in text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)]

torch.manual_seed(0)
if options.base:
    base: Any = AutoModelForCausalLM.from_pretrained(options.base)
else:
    sizes: dict[str, Any] = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    base = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
adapter = LoraConfig(r=4, lora_alpha=16, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
model = get_peft_model(base, adapter)
arguments = TrainingArguments(
    options.out,
    use_cpu=True,
    seed=options.learner or 0,  # every island draws its own batches
    per_device_train_batch_size=8,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    max_steps=100_000,  # the budget of the run ends training earlier
    eval_strategy="steps",
    eval_steps=10,
    save_strategy="no",
    logging_steps=10,
    report_to="none",
    disable_tqdm=True,
    dataloader_pin_memory=False,
    label_names=["labels"],  # the Trainer cannot find them in a peft model
)
atoll_island = AtollCallback(options.syncer, learner=options.learner)
trainer = Trainer(model, arguments, train_dataset=samples[1000:], eval_dataset=samples[:64], callbacks=[atoll_island])
trainer.train()
loss, stats = trainer.evaluate()["eval_loss"], atoll_island.learner.stats()
print(
    f"{stats.steps} steps here; {stats.parameters} of {model.num_parameters()} parameters were synchronized", flush=True
)
print(f"held-out loss {loss:.4f}", flush=True)
model.save_pretrained(options.out)
