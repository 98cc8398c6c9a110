"""`atoll fragments`: output for models at any terminal width, and refused inputs."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from atoll.cli import fragments
from atoll.cli.main import Command, main

COMMANDS = {name: Command(fragments.run, "atoll fragments 1m") for name in ("fragments", "rest")}
SIZES = ("100k", "1m", "moe")


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "small.safetensors"
    tensors = {f"blocks.{layer}.weight": torch.zeros(8, 8) for layer in range(6)}
    tensors["wte.weight"] = torch.zeros(100, 8, dtype=torch.bfloat16)
    tensors["steps"] = torch.tensor(3)
    save_file(tensors, path)
    return path


def run_command(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run the command, and return its stdout; it must succeed."""
    code = main(["fragments", *map(str, arguments)], COMMANDS)
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    code = main(["fragments", *map(str, arguments)], COMMANDS)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    return err


def test_a_file_is_shown_by_fragment(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = run_command(capsys, model, "--fragments", 3)
    lines = out.replace("\n  ", " ").splitlines()
    assert lines[0].endswith("small.safetensors: 3 fragments, 1.18k parameters, balanced")
    assert lines[2].split() == ["p", "tensors", "params", "as", "f32"]
    assert [line.split()[:4] for line in lines[3:6]] == [
        ["0", "1", "800", "3.20kB"],
        ["1", "3", "192", "768B"],
        ["2", "3", "192", "768B"],
    ]
    assert set(lines[3].split()[4]) == {"▒"}
    assert set(lines[4].split()[4]) == {"█"}
    assert len(lines[3].split()[4]) == pytest.approx(800 / 192 * len(lines[4].split()[4]), abs=3)
    assert lines[-3:] == [
        "balance 2.03 (the largest over the mean)",
        "embeddings in fragment 0",
        "--plan rows would cut the large tensors",
    ]


def test_plan_rows_is_balanced(model, capsys):
    out = run_command(capsys, model, "--fragments", 3, "--plan", "rows")
    assert "balance 1.0" in out
    assert "would cut" not in out


def test_json_has_every_fragment_and_every_piece(model, capsys):
    shown = json.loads(run_command(capsys, model, "--fragments", 3, "--json"))
    assert (shown["plan"], shown["requested"], shown["parameters"], shown["tensors"]) == ("balanced", 3, 1184, 7)
    assert shown["balance"] == pytest.approx(800 / (1184 / 3))
    assert shown["embeddings"] == [0]
    assert shown["fragments"][0] == {
        "fragment": 0,
        "tensors": 1,
        "parameters": 800,
        "bytes_f32": 3200,
        "kinds": {"embedding": 800},
        "pieces": [["wte.weight", 0, 100]],
    }


def test_embeddings_option_selects_names(model, capsys):
    shown = json.loads(run_command(capsys, model, "--fragments", 3, "--embeddings", "blocks.0.*", "--json"))
    kinds = [fragment["kinds"] for fragment in shown["fragments"]]
    assert sum(each.get("embedding", 0) for each in kinds) == 64


def test_run_directory_shows_its_model(model, capsys):
    model.rename(model.with_name("model.safetensors"))
    assert "2 fragments" in " ".join(run_command(capsys, model.parent, "--fragments", 2).split())


@pytest.mark.parametrize("size", SIZES)
def test_reference_models_have_names(size, capsys):
    shown = json.loads(run_command(capsys, size, "--fragments", 8, "--json"))
    assert shown["fragments"][7]["parameters"] > 0
    assert 1.0 <= shown["balance"] < 1.5
    assert shown["embeddings"]


@pytest.mark.parametrize("width", [1, 40, 63, 100, 200, 500])
@pytest.mark.parametrize("method", ["balanced", "layers", "rows"])
def test_it_fits_any_width(model, width, method, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    out = run_command(capsys, model, "--plan", method, "--fragments", 40)
    lines = out.splitlines()
    assert max(map(len, lines)) <= min(max(width, 40), 200)
    assert any("▒" in line for line in lines)


def test_fewer_fragments_than_requested_are_reported(model, capsys):
    out = run_command(capsys, model, "--fragments", 40)
    assert "7 fragments" in out
    assert "Fewer than the 40 fragments requested" in out


def test_output_without_unicode_uses_ascii(model):
    script = (
        "import sys; from atoll.cli.main import Command, main; from atoll.cli import fragments\n"
        "command = Command(fragments.run, '')\n"
        f"code = main(['fragments', {str(model)!r}], {{'fragments': command, 'rest': command}})\n"
        "assert 'torch' not in sys.modules, 'a file is read without torch'\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"# weights  = embeddings" in done.stdout


# --------------------------------------------------------------------------------------------------------------------
# Refused inputs


def test_unknown_model_is_refused_in_one_line(tmp_path, capsys):
    assert "there is no model '7b'; give a .safetensors file or one of 100k" in refused(capsys, "7b")
    assert "No such file" in refused(capsys, tmp_path / "none.safetensors")
    assert "No such file" in refused(capsys, tmp_path)


def test_impossible_plans_are_refused_in_one_line(model, capsys):
    assert "not 0" in refused(capsys, model, "--fragments", 0)
    assert "unknown fragment plan 'even'" in refused(capsys, model, "--plan", "even")


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "is truncated"),
        (b"PK\x03\x04 this is a zip file, not a model", "is truncated"),
        (struct.pack("<Q", 2**62) + b"{}", "is truncated"),
        (struct.pack("<Q", 5) + b"hello", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not JSON"),
        (struct.pack("<Q", 2) + b"{}", "nothing to cut"),
        (b'{"w":1}', "'w' has no shape"),
        (b'{"w":{"dtype":"F32","shape":[-1]}}', "'w' has no shape"),
        (b'{"w":{"dtype":"F32","shape":[1.5]}}', "'w' has no shape"),
        (b'{"w":{"dtype":1,"shape":[2]}}', "'w' has no dtype"),
        (b'{"w":{"dtype":"I64","shape":[2]}}', "nothing to cut"),
        (b'{"w":{"dtype":"F32","shape":[281474976710656,9]}}', "the maximum is"),
    ],
)
def test_damaged_files_are_refused_in_one_line(raw, sentence, tmp_path, capsys):
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw if raw[:2] == b'{"' else raw)
    assert sentence in refused(capsys, path)


def test_names_that_cannot_be_encoded_are_replaced(tmp_path, capsys):
    path = tmp_path / "odd.safetensors"
    raw = b'{"w\\ud800":{"dtype":"F32","shape":[2]}}'
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    assert json.loads(run_command(capsys, path, "--json"))["fragments"][0]["pieces"] == [["w?", 0, 2]]
