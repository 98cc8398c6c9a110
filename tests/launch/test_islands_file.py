"""The file of `atoll up`: what it means in the words of launchers, and how it is refused."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from atoll.launch.islands_file import IslandsFile
from atoll.launch.launcher import LAUNCHERS, Unit, load_launcher
from atoll.launch.units import build_units, find_address_warning, learner_notice_s, load_token

FULL = """
run = "first"
directory = "out/first"

[syncer]
address = "127.0.0.1:7555"
arguments = ["--quorum", 2, "--tokens", "1M"]
shards = 2
notice = "10s"

[defaults]
command = "python train.py --data ./data"
notice = "1m"
environment = { MODE = "fast", LEVEL = 1 }

[islands.near]
environment = { MODE = "slow" }

[islands.far]
launcher = "slurm"
command = ["torchrun", "--nproc-per-node", 8, "train.py"]
arguments = "--ddp"
number = 1
nodes = 2
cpus = 4
devices = 8
site = "north"
restarts = 3
options = { partition = "long" }

[islands.many]
count = 2
"""


def loaded(folder: Path, text: str) -> IslandsFile:
    path = folder / "islands.toml"
    path.write_text(text)
    return IslandsFile.load(path)


def units(file: IslandsFile, token: str | None = "a secret") -> dict[str, tuple[str, Unit]]:
    return {unit.name: (unit.launcher, unit) for unit in build_units(file, token)}


def problem(folder: Path, text: str) -> str:
    with pytest.raises(ValueError, match=r"islands\.toml") as error:
        loaded(folder, text)
    return str(error.value)


ISLAND = '[islands.a]\ncommand = "python train.py"\n'


def test_a_file_becomes_the_units_of_a_run(tmp_path):
    (tmp_path / "train.py").touch()
    made = units(loaded(tmp_path, FULL))
    assert list(made) == ["syncer", "shard-0", "shard-1", "near", "far", "many-1", "many-2"]
    assert [launcher for launcher, _ in made.values()] == ["local"] * 4 + ["slurm"] + ["local"] * 2
    assert {unit.run for _, unit in made.values()} == {"first"}

    _, near = made["near"]
    assert near.command == ("python", str(tmp_path / "train.py"), "--data", str(tmp_path / "data"))
    assert near.directory == tmp_path / "out/first/units/near"
    assert near.environment == {
        "ATOLL_SYNCER": "127.0.0.1:7555",
        "ATOLL_TOKEN": "a secret",
        "ATOLL_LEARNER": "2",  # 1 is taken
        "ATOLL_RUN_DIRECTORY": str(tmp_path / "out/first"),
        "ATOLL_NOTICE_S": "58",
        "ATOLL_JOIN_TIMEOUT_S": "3600",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONUNBUFFERED": "1",
        "MODE": "slow",
        "LEVEL": "1",
    }
    assert near.secret_names == {"ATOLL_TOKEN"}
    assert near.notice_s == 60.0

    _, far = made["far"]
    assert far.command == ("torchrun", "--nproc-per-node", "8", str(tmp_path / "train.py"), "--ddp")
    assert (far.nodes, far.cpus, far.devices, far.site, far.max_restarts) == (2, 4, 8, "north", 3)
    assert far.options == {"partition": "long"}
    assert far.environment["ATOLL_LEARNER"] == "1"
    assert [made[name][1].environment["ATOLL_LEARNER"] for name in ("many-1", "many-2")] == ["3", "4"]


def test_the_command_of_the_syncer_is_the_same_when_it_comes_back(tmp_path):
    made = units(loaded(tmp_path, FULL))
    _, syncer = made["syncer"]
    run = str(tmp_path / "out/first")
    listens = ["--host", "127.0.0.1", "--port", "7555"]
    atoll = [sys.executable, "-m", "atoll"]
    own = ["--quorum", "2", "--tokens", "1M"]
    assert [*syncer.command] == [*atoll, "syncer", "--out", run, "--or-resume", *listens, "--shards", "2", *own]
    assert "ATOLL_SYNCER" not in syncer.environment
    assert syncer.secret_names == {"ATOLL_TOKEN"}
    assert syncer.notice_s == 10.0
    _, shard = made["shard-1"]
    assert shard.command[-6:] == ("--host", "127.0.0.1", "--port", "7557", "--advertise", "127.0.0.1:7557")
    assert shard.command[3:10] == ("shard", "--syncer", "127.0.0.1:7555", "--shard", "1", "--shards", "2")


def test_shards_get_their_reachable_address(tmp_path):
    (tmp_path / "keys/syncer").mkdir(parents=True)
    (tmp_path / "keys/a").mkdir()
    of_syncer = 'address = "head:7400"\nkeys = "keys"\nshards = 2\n'
    own = 'arguments = ["--host", "10.0.0.5", "--port=9000"]\n'
    _, shard = units(loaded(tmp_path, f"[syncer]\n{of_syncer}{own}{ISLAND}"), None)["shard-1"]
    listens = ("--host", "0.0.0.0", "--port", "7402", "--advertise", "head:7402")
    assert shard.command[-8:] == (*listens, "--keys", str(tmp_path / "keys/syncer"))


def test_an_address_of_this_machine_is_not_for_islands_elsewhere(tmp_path):
    for by_place in ("slurm", "ray"):
        warning = find_address_warning(loaded(tmp_path, f'{ISLAND}launcher = "{by_place}"\n')) or ""
        assert f"units that {by_place} starts on another machine cannot reach the syncer" in warning
    assert find_address_warning(loaded(tmp_path, ISLAND)) is None
    assert (
        find_address_warning(loaded(tmp_path, f'[syncer]\naddress = "http://head:1"\n{ISLAND}launcher = "slurm"\n'))
        is None
    )


def test_secrets_are_named_in_the_file_and_taken_from_caller(tmp_path, monkeypatch):
    text = '[syncer]\nsecrets = ["A_KEY"]\n[defaults]\nsecrets = ["A_KEY"]\n' + ISLAND + 'secrets = ["B_KEY"]\n'
    monkeypatch.setenv("A_KEY", "hush")
    with pytest.raises(ValueError, match="a: secrets has B_KEY, which is not set here: export it and retry"):
        units(loaded(tmp_path, text))
    monkeypatch.setenv("B_KEY", "hush too")
    made = units(loaded(tmp_path, text))
    assert made["syncer"][1].secret_names == {"A_KEY", "ATOLL_TOKEN"}
    assert made["a"][1].secret_names == {"A_KEY", "B_KEY", "ATOLL_TOKEN"}
    assert (made["a"][1].environment["A_KEY"], made["a"][1].environment["B_KEY"]) == ("hush", "hush too")


def test_minimal_file_is_enough(tmp_path):
    file = loaded(tmp_path, ISLAND)
    assert (file.run, file.directory) == ("islands", tmp_path / "runs/islands")
    assert file.syncer.address == "127.0.0.1:7400"
    assert [(island.unit.name, island.number, island.unit.launcher) for island in file.islands] == [("a", 1, "local")]


def test_all_problems_are_reported_with_their_fix(tmp_path):
    said = problem(
        tmp_path,
        """
run = "no spaces"
folder = "x"
[syncer]
adress = "head:1"
launcher = "slrum"
options = ["--quorum", "2"]
arguments = ["--out", "there"]
[defaults]
restarts = -1
[islands.a]
notice = "soon"
[islands.syncer]
command = []
environment = { ATOLL_TOKEN = "mine" }
""",
    )
    for sentence in (
        "12 problems",
        "run is 'no spaces': use at most 40 letters, digits and dashes",
        "folder is not known: there are run, directory, syncer",
        "syncer.adress is not known: did you mean address?",
        "syncer.launcher is 'slrum': there is no launcher 'slrum'",
        "did you mean 'slurm'?",
        "syncer.options is the table of launcher options: write options of atoll syncer in arguments",
        "syncer.arguments has --out: remove it, atoll up sets it",
        "defaults.restarts is -1: write an integer of at least 0",
        "islands.a has no command: add a line",
        "islands.a.notice is 'soon': write a time",
        "islands.syncer: the name syncer is reserved for the syncer",
        "islands.syncer.command is empty",
        "islands.syncer.environment has ATOLL_TOKEN: remove it, atoll up sets it",
    ):
        assert sentence in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[islands.a\n", "is not TOML"),
        ("", "it has no island: add a table [islands.NAME]"),
        ("islands = 3", "islands is 3: write it as a table"),
        ("[islands]\na = 1", "islands.a is not a table"),
        (ISLAND + 'number = 2\n[islands.b]\ncommand = "x"\nnumber = 2', "b and a both have number 2"),
        (ISLAND + 'count = 2\n[islands.a-1]\ncommand = "x"', "islands.a-1 and islands.a both define an island a-1"),
        (ISLAND + "count = 100000", "one file may have at most 10000 islands"),
        ('[islands.shard]\ncommand = "x"\ncount = 2', "the name shard-2 is reserved for the syncer and its shards"),
        (f'[islands.{"a" * 39}]\ncommand = "x"\ncount = 2', "use at most 40 letters"),
        (ISLAND + 'secrets = "WANDB_API_KEY"', 'write a list of variable names such as ["WANDB_API_KEY"]'),
        (ISLAND + 'secrets = ["ATOLL_TOKEN"]', "islands.a.secrets has ATOLL_TOKEN: remove it, atoll up sets it"),
        (ISLAND + 'secrets = ["A"]\nenvironment = { A = "b" }', "secrets and environment both have A: remove it from"),
        ('[islands.a]\ncommand = "python \\"train.py"', "No closing quotation; write it as a list of strings"),
        ('[islands.a_b]\ncommand = "x"', "use at most 40 letters, digits and dashes"),
        (ISLAND + "cpus = true", "islands.a.cpus is True: write an integer"),
        ('[syncer]\naddress = "head"\n' + ISLAND, "syncer is 'head'; give host:port"),
        ('[syncer]\naddress = "head:7400"\n' + ISLAND, "head:7400 is another machine, and in plain text others"),
        ('[syncer]\nkeys = "nowhere"\n' + ISLAND, "which is not a directory: create it with atoll keys init"),
        ('[syncer]\ntoken_file = "nowhere"\n' + ISLAND, "which is not a file: write the token into it"),
    ],
)
def test_invalid_file_is_refused(tmp_path, text, sentence):
    assert sentence in problem(tmp_path, text)


def test_defaults_of_one_launcher_do_not_apply_to_another(tmp_path):
    file = loaded(
        tmp_path,
        '[defaults]\nlauncher = "slurm"\ncommand = "x"\noptions = { partition = "long" }\n'
        "[islands.a]\noptions = { account = 'me' }\n[islands.b]\nlauncher = 'local'\n",
    )
    first, second = (island.unit for island in file.islands)
    assert (first.launcher, first.options) == ("slurm", {"partition": "long", "account": "me"})
    assert (second.launcher, second.options) == ("local", {})


def test_a_token_is_made_once_and_kept_from_others(tmp_path):
    file = loaded(tmp_path, ISLAND)
    assert load_token(file, create=False) == "made-by-atoll-up"
    assert not file.directory.exists()
    token = load_token(file, create=True)
    assert token is not None
    assert len(token) > 20
    kept = file.directory / "fleet/token"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert [path.name for path in kept.parent.iterdir()] == ["token"]
    assert load_token(file, create=True) == token == load_token(file, create=False)


def test_a_token_of_the_owner_is_taken(tmp_path):
    (tmp_path / "secret").write_text("owner's token\n")
    assert load_token(loaded(tmp_path, '[syncer]\ntoken_file = "secret"\n' + ISLAND), create=True) == "owner's token"
    (tmp_path / "secret").write_text("short")
    with pytest.raises(ValueError, match="at least 8 characters"):
        load_token(loaded(tmp_path, '[syncer]\ntoken_file = "secret"\n' + ISLAND), create=True)


def test_each_island_gets_its_own_keys(tmp_path):
    for name in ("syncer", "a", "many"):
        (tmp_path / "keys" / name).mkdir(parents=True)
    text = '[syncer]\nkeys = "keys"\naddress = ["head:7400", "other:7400"]\n' + ISLAND
    file = loaded(tmp_path, text + '[islands.many]\ncommand = "x"\ncount = 1\n')
    assert load_token(file, create=True) is None
    made = units(file, None)
    _, syncer = made["syncer"]
    listens = ("--host", "0.0.0.0", "--port", "7400", "--keys", str(tmp_path / "keys/syncer"))
    assert syncer.command[-6:] == listens
    assert made["a"][1].environment["ATOLL_KEYS"] == str(tmp_path / "keys/a")
    assert made["a"][1].environment["ATOLL_SYNCER"] == "head:7400,other:7400"
    assert made["many-1"][1].environment["ATOLL_KEYS"] == str(tmp_path / "keys/many")
    assert made["a"][1].secret_names == frozenset()
    with pytest.raises(ValueError, match=r"no key for b: create one with atoll keys add \S+ b$"):
        units(loaded(tmp_path, text + '[islands.b]\ncommand = "x"\n'), None)


def test_plain_text_to_others_is_said_on_both_sides(tmp_path):
    made = units(loaded(tmp_path, '[syncer]\naddress = "http://head:7400"\n' + ISLAND))
    assert made["syncer"][1].command[-5:] == ("--host", "0.0.0.0", "--port", "7400", "--plain-text")
    assert made["a"][1].environment["ATOLL_SYNCER"] == "http://head:7400"


def test_learner_notice_is_shorter_than_launcher_notice():
    assert [learner_notice_s(seconds) for seconds in (1.0, 5.0, 30.0, 120.0)] == [0.8, 4.0, 28.0, 118.0]


def test_unknown_launcher_is_refused_with_nearest_name():
    with pytest.raises(ValueError, match="there is no launcher 'lokal': there are local, ray, slurm") as error:
        load_launcher("lokal")
    assert str(error.value).endswith("did you mean 'local'?")
    assert set(LAUNCHERS) == {"local", "ray", "slurm"}


@pytest.mark.parametrize("name", ["kubernetes", "skypilot"])
def test_system_without_launcher_is_refused_with_its_example_file(tmp_path, name):
    example = Path(__file__).resolve().parents[2] / "examples" / f"{name}.yaml"
    assert example.is_file()
    said = problem(tmp_path, f'{ISLAND}launcher = "{name}"\n')
    assert f"islands.a.launcher is '{name}': Atoll has no launcher for {name}: adapt examples/{example.name}" in said
    assert "syncer.launcher" in problem(tmp_path, f'[syncer]\nlauncher = "{name}"\n{ISLAND}')
