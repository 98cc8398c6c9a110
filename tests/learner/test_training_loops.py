"""The training loop of README, docs, docstrings and examples checks `finished` before each step, and it runs."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from tests.learner.runs import Run, config, endless
from tests.learner.small_models import Work, values, work

pytestmark = pytest.mark.usefixtures("no_leaked_threads")

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    "README.md",
    "docs/data.md",
    "docs/index.md",
    "docs/spot.md",
    "docs/transformers.md",
    "examples/finetune.py",
    "examples/many_ranks.py",
    "examples/with_accelerate.py",
    "examples/with_atoll.py",
    "src/atoll/integrations/accelerate.py",
    "src/atoll/integrations/data.py",
    "src/atoll/learner/api.py",
]
"""Files with a loop inside of `with ...Learner(...) as learner:`. The tutorial quotes examples/with_atoll.py."""


def codes(path: Path) -> Iterator[str]:
    """Yield the Python code that users copy: code blocks of a page, an example file, indented code of docstrings."""
    text = path.read_text(encoding="utf-8")
    if "Learner(" not in text:
        return
    if path.suffix == ".md":
        yield from re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    elif path.parent.name == "examples":
        yield text
    else:
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef)]
        for docstring in filter(None, map(ast.get_docstring, nodes)):
            for paragraph in re.findall(r"(?:^ .*\n?)+", docstring, re.MULTILINE):
                yield textwrap.dedent(paragraph)


def loops(code: str) -> list[ast.While | ast.For]:
    """Return the loops directly inside of `with ...Learner(...) as learner:`."""
    if "Learner(" not in code:
        return []
    blocks = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.With)]
    entered = [block for block in blocks if "Learner(" in ast.unparse(block.items[0].context_expr)]
    return [node for block in entered for node in block.body if isinstance(node, ast.While | ast.For)]


def mistakes(code: str) -> list[str]:
    """Return the mistakes in the loops of this code."""
    found = []
    for loop in loops(code):
        if not isinstance(loop, ast.While) or ast.unparse(loop.test) != "not learner.finished":
            found.append(f"line {loop.lineno}: the loop must be `while not learner.finished:`")
        if "learner.finished" in "\n".join(map(ast.unparse, loop.body)):
            found.append(f"line {loop.lineno}: finished is checked inside of the loop, after a batch or a step")
    return found


def test_every_page_example_and_docstring_checks_finished_before_the_step():
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py"), *ROOT.rglob("src/atoll/**/*.py")]
    codes_by_path = {str(path.relative_to(ROOT)): [code for code in codes(path) if loops(code)] for path in paths}
    assert sorted(path for path, found in codes_by_path.items() if found) == SOURCES
    assert [
        f"{path}, {invalid}" for path, found in codes_by_path.items() for code in found for invalid in mistakes(code)
    ] == []


@pytest.mark.parametrize(
    "planted",
    [
        "for batch in loader:\n  learner.step(tokens=1)\n  if learner.finished:\n   break",
        "for batch in epochs(loader):\n  learner.step(tokens=1)",
        "while True:\n  learner.step(tokens=1)\n  if learner.finished:\n   break",
    ],
)
def test_planted_loop_that_checks_finished_late_or_never_is_found(planted):
    assert mistakes(f"with atoll.Learner(model, optimizer) as learner:\n {planted}")


# --------------------------------------------------------------------------------------------------------------------
# The loop of the README, executed without changes


class Script:
    """Run the README's loop on a run. Its loader has three batches: the data ends long before the run."""

    def __init__(self, run: Run, seed: int) -> None:
        self.job: Work = work("plain", seed)
        self.steps = 0
        self.learner: Any = None
        self._run = run

    def train_step(self, batch: Tensor) -> Tensor:
        self.steps += 1
        self.on_step()
        loss: Tensor = (self.job.model(batch) - batch[:, :4].sin()).square().mean()
        self.job.optimizer.zero_grad()
        loss.backward()
        self.job.optimizer.step()
        return loss.detach()

    def on_step(self) -> None:
        pass

    def main(self) -> None:
        (code,) = [code for code in codes(ROOT / "README.md") if loops(code)]
        arguments = 'syncer="head:7400", keys="keys/far"'
        assert arguments in code
        code = code.replace(arguments, f'syncer="{self._run.address}", join_timeout_s=60.0')
        names: dict[str, Any] = {
            "model": self.job.model,
            "optimizer": self.job.optimizer,
            "loader": DataLoader(torch.randn(12, 8), batch_size=4),  # type: ignore[arg-type]
            "train_step": self.train_step,
        }
        exec(code, names)
        self.learner = names["learner"]

    def assert_published(self, published: dict[str, Tensor]) -> None:
        for name, value in values(self.job.model).items():
            assert torch.equal(value, published[name]), name


def test_the_loop_of_the_readme_trains_over_epochs_and_ends_with_the_published_model(tmp_path):
    with Run(tmp_path, config()) as run:
        script = Script(run, 1)
        script.main()
        assert run.syncer.expect("ended") is True
        assert run.syncer.ended() == 0
        assert script.learner.finished
        assert script.steps > 3
        published = load_file(tmp_path / "published.safetensors")
        script.assert_published(published)

        run.start_syncer()
        late = Script(run, 2)
        late.main()
        assert late.learner.finished
        assert late.steps == 0, "the run was over when it joined: the final model must not be trained further"
        late.assert_published(published)


def test_the_loop_of_the_readme_ends_when_the_learner_is_drained(tmp_path):
    with Run(tmp_path, endless()) as run:
        script = Script(run, 1)
        requested = []

        def drain() -> None:
            if script.steps == 5:
                body = json.dumps({"kind": "drain", "value": 1, "requested_by": "test"}).encode()
                requested.append(run.request("POST", "/v1/control", body)[0])

        script.on_step = drain  # type: ignore[method-assign]
        script.main()
        assert requested == [200]
        assert (script.learner.finished, script.learner.drained) == (True, True)
