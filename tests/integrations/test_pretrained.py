"""`atoll export --to transformers` and `atoll import --from transformers`: directories that `from_pretrained` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, ResNetConfig, ResNetForImageClassification

from atoll.cli.main import main
from atoll.integrations.pretrained import export_pretrained
from atoll.integrations.transformers import AtollCallback
from atoll.learner.api import Learner
from atoll.syncer.initial_model import INIT_FILE
from atoll.tensors.plan import describe_tensors, named_tensors
from tests.integrations.small_texts import gpt2, texts, trainer
from tests.integrations.test_peft import with_lora
from tests.learner.runs import LIMIT_S, Run, config
from tests.learner.test_published import same

pytestmark = pytest.mark.usefixtures("no_leaked_threads", "one_thread")


def report(capsys: Any, *arguments: object) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1] or "{}")
    return found


def error_message(capsys: Any, *arguments: object) -> str:
    """Return the message of a command that fails."""
    assert main([*map(str, arguments)]) == 2
    return " ".join(str(capsys.readouterr().err).split())


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.stack([each["input_ids"] for each in texts(3)])).logits
    return found


def trained(directory: Path, model: Any, **settings: Any) -> Any:
    """Train the model to the end of a run with one learner, in directory/run."""
    with Run(directory / "run", config(budget_merges=6)) as run:
        callback = AtollCallback(run.address, learner=1, join_timeout_s=LIMIT_S)
        trainer(directory / "out", callback, model=model, **settings).train()
        assert callback.learner.finished
        assert run.syncer.expect("ended") is True
    return model


def test_from_pretrained_loads_the_published_model_with_its_head_tied(tmp_path, capsys):
    model = trained(tmp_path, gpt2())
    model.config.save_pretrained(tmp_path / "config")
    path = tmp_path / "config/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["GPT2LMHeadModel"]}))
    for number, config_path in enumerate((path, path.parent)):
        out = tmp_path / f"exported-{number}"
        report(capsys, "export", tmp_path / "run", "--to", "transformers", "--config", config_path, "--out", out)
        loaded: Any = AutoModelForCausalLM.from_pretrained(out)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        assert torch.equal(outputs(model), outputs(loaded))
        with safe_open(out / "model.safetensors", framework="pt") as file:
            assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a dictionary
    assert "exists and is not overwritten" in error_message(
        capsys, "export", tmp_path / "run", "--to", "transformers", "--config", path, "--out", tmp_path / "exported-0"
    )


def test_pretrained_model_provides_the_initial_weights(tmp_path, capsys):
    """The tied head gets the name that the model's class uses, also if the files use another one."""
    model = gpt2(5).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "pretrained")
    start = tmp_path / "start.safetensors"
    summary = report(capsys, "import", "--from", "transformers", tmp_path / "pretrained", "--out", start)
    found = load_file(start)
    assert same(found, {name: each.detach() for name, each in named_tensors(model).items()})
    assert summary["tensors"] == len(found)
    assert "lm_head.weight" in found
    assert all(each.dtype == torch.bfloat16 for each in found.values())
    (tmp_path / "run").mkdir()
    start.rename(tmp_path / "run" / INIT_FILE)
    island = gpt2(6)
    optimizer = torch.optim.AdamW(island.parameters())
    with Run(tmp_path / "run") as run, Learner(island, optimizer, run.address, learner=1, join_timeout_s=LIMIT_S):
        initial = {name: each.detach() for name, each in named_tensors(island).items()}
        assert same(initial, {name: each.float() for name, each in found.items()})
        assert island.lm_head.weight is island.transformer.wte.weight


def test_frozen_tensors_are_exported_from_the_directory_that_learners_loaded(tmp_path, capsys):
    base = gpt2(3)
    base.save_pretrained(tmp_path / "pretrained")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
    model.transformer.wte.requires_grad_(False)
    model.transformer.h[0].requires_grad_(False)
    trained(tmp_path, model)
    export = ("export", tmp_path / "run", "--to", "transformers", "--out", tmp_path / "exported", "--config")
    report(capsys, *export, tmp_path / "pretrained")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(outputs(model), outputs(loaded))
    assert not torch.equal(outputs(base), outputs(loaded))
    gpt2(4).save_pretrained(tmp_path / "another")
    message = error_message(capsys, *export[:-2], tmp_path / "other", "--config", tmp_path / "another")
    assert "and differs from the run" in message
    (tmp_path / "alone").mkdir()
    (tmp_path / "pretrained/config.json").rename(tmp_path / "alone/config.json")
    message = error_message(capsys, *export[:-2], tmp_path / "other", "--config", tmp_path / "alone")
    assert "because it was frozen" in message


def small_resnet() -> Any:
    """Return a model whose norms have buffers. Its stem is frozen, as is usual in fine-tuning of image models."""
    sizes: dict[str, Any] = {"embedding_size": 4, "hidden_sizes": [4], "depths": [1], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(**sizes))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            torch.nn.init.normal_(buffer)
    model.resnet.embedder.requires_grad_(False)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_frozen_norms_keep_their_buffers_with_every_dtype_of_the_learners(tmp_path, dtype):
    base = small_resnet()
    base.save_pretrained(tmp_path / "pretrained")
    island = small_resnet()
    island.load_state_dict(base.state_dict())
    island.to(dtype)
    infos, tensors = describe_tensors(island), named_tensors(island)
    trained = {info.name: tensors[info.name].detach() + 0.5 for info in infos if info.is_synced}
    frozen = {info.name: info for info in infos if info.kind == "frozen"}
    export_pretrained(trained, frozen, tmp_path / "pretrained", tmp_path / "exported")
    loaded = named_tensors(ResNetForImageClassification.from_pretrained(tmp_path / "exported", dtype="auto"))
    local = set(tensors) - set(trained) - set(frozen)
    assert {name.rpartition(".")[2] for name in local} == {"running_mean", "running_var"}
    expected = trained | {name: tensors[name].detach() for name in (*frozen, *local)}
    assert same({name: each.detach().to(dtype) for name, each in loaded.items()}, expected)
    small_resnet().save_pretrained(tmp_path / "another")
    with pytest.raises(ValueError, match="and differs from the run, where it was"):
        export_pretrained(trained, frozen, tmp_path / "another", tmp_path / "other")


def test_run_that_trained_an_adapter_exports_the_adapter(tmp_path, capsys):
    model = with_lora(gpt2())
    model.save_pretrained(tmp_path / "untrained")
    trained(tmp_path, model)
    export = ("export", tmp_path / "run", "--to", "transformers", "--out", tmp_path / "adapter", "--config")
    report(capsys, *export, tmp_path / "untrained")
    loaded = PeftModel.from_pretrained(gpt2(), tmp_path / "adapter")
    assert torch.equal(outputs(model), outputs(loaded))
    assert not torch.equal(outputs(gpt2()), outputs(loaded))
    gpt2().config.save_pretrained(tmp_path / "config")
    message = error_message(capsys, *export[:-2], tmp_path / "other", "--config", tmp_path / "config")
    assert "pass as --config its adapter_config.json" in message


def test_mistakes_raise_an_error_in_one_sentence(tmp_path, capsys):
    trained(tmp_path, gpt2())
    larger = gpt2(n_embd=32)
    larger.save_pretrained(tmp_path / "larger")
    gpt2().config.save_pretrained(tmp_path / "unnamed")
    path = tmp_path / "unnamed/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": None}))
    export = ("export", tmp_path / "run", "--out", tmp_path / "other")
    for arguments, cause in [
        (("--to", "transformers"), "--to transformers needs --config"),
        (("--to", "dcp", "--config", tmp_path / "larger"), "--config is for --to transformers"),
        (("--to", "transformers", "--config", tmp_path / "larger"), "in the run and"),
        (("--to", "transformers", "--config", tmp_path / "unnamed"), "names no class"),
        (("--to", "transformers", "--config", tmp_path / "nowhere.json"), "does not exist"),
    ]:
        assert cause in error_message(capsys, *export, *arguments)
    read = ("import", tmp_path / "larger", "--out", tmp_path / "start.safetensors", "--from")
    assert "--from keras is unknown" in error_message(capsys, *read, "keras")
    assert "omit --prefix" in error_message(capsys, *read, "transformers", "--prefix", "x")
    unnamed = ("import", tmp_path / "unnamed", "--out", tmp_path / "start.safetensors", "--from", "transformers")
    assert "contains none of" in error_message(capsys, *unnamed)
