"""The style is kept by an ordinary test, and every rule is shown to be able to fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from tests import ratchets, tidy_rules
from tests.ratchets import LIMITS, Ratchet
from tests.tidy_rules import RULES, Rule, Source, find_violations, read_sources

ROOT = Path(__file__).resolve().parent.parent
SOURCES = read_sources(ROOT)

CORE = "src/atoll/core/planted.py"
TEST = "tests/test_planted.py"

# (path, text) of a file that breaks the rule, and of its nearest neighbour that does not
PLANTED: dict[Rule, tuple[tuple[str, str], tuple[str, str]]] = {
    tidy_rules.check_idiom: (
        (CORE, "# a learner that was to" + "ld of it"),
        (CORE, "# a learner that received it"),
    ),
    tidy_rules.check_module_length: (("src/long.py", "x = 1\n" * 1_001), ("src/long.py", "x = 1\n" * 1_000)),
    tidy_rules.check_function_length: (
        (CORE, "def f():\n" + "    x = 1\n" * 80),
        (CORE, "# long: one table, read from top to bottom\ndef f():\n" + "    x = 1\n" * 80),
    ),
    tidy_rules.check_file_name: (("src/atoll/net/utils.py", ""), ("src/atoll/net/units.py", "")),
    tidy_rules.check_leftover_marks: (
        ("docs/design.md", "TO" + "DO: decide"),
        ("docs/design.md", "what is still to do is in the issues"),
    ),
    tidy_rules.check_machine_paths: (
        ("README.md", "look into `/" + "root/runs/first`"),
        ("README.md", "look into `src/work` or `~/work/runs`"),
    ),
    tidy_rules.check_registry_names: (
        ("Makefile", "pip install -i https://" + "py" + "pi.example"),
        ("Makefile", "pip install -c constraints.txt ."),
    ),
    tidy_rules.check_core_imports: (
        (CORE, "import math\nfrom numpy.random import default_rng\n"),
        (CORE, "import math\nfrom atoll.core import types\nfrom msgspec.structs import replace\n"),
    ),
    tidy_rules.check_core_purity: (
        (CORE, "order = sorted(names, key=lambda name: hash(name))\n"),
        (CORE, "order = sorted(names, key=lambda name: name.hash())\n"),
    ),
    tidy_rules.check_core_vocabulary: (
        (CORE, "class Round:\n    def lost(self, old_workers): ...\n"),
        (CORE, "class Round:\n    def lost(self, old_learners): ...\n"),
    ),
    tidy_rules.check_sleep_and_mock: (
        (TEST, "import time\n\ndef test_it():\n    time.sleep(1)\n"),
        (TEST, "import time\n\ndef test_it():\n    assert time.monotonic() > 0\n"),
    ),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule):
    assert find_violations(rule, SOURCES) == [], rule.__doc__


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_sees_a_planted_violation_and_spares_its_neighbour(rule):
    (bad_path, bad_text), (good_path, good_text) = PLANTED[rule]
    found = find_violations(rule, [Source(PurePosixPath(bad_path), bad_text)])
    assert len(found) == 1
    assert found[0].startswith(bad_path + ":")
    assert find_violations(rule, [Source(PurePosixPath(good_path), good_text)]) == []


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (tidy_rules.check_core_imports, CORE, "from atoll import sim\n"),
        (tidy_rules.check_core_imports, CORE, "def f():\n    import torch\n"),
        (tidy_rules.check_core_vocabulary, CORE, "class LearnerClient: ...\n"),
        (tidy_rules.check_machine_paths, "Makefile", "cd /" + "work\n"),
        (tidy_rules.check_machine_paths, "Makefile", 'cd "/' + 'home/me/atoll"\n'),
        (tidy_rules.check_sleep_and_mock, TEST, "from unittest import mock\n"),
        (tidy_rules.check_sleep_and_mock, TEST, "from unittest.mock import Mock\n"),
    ],
)
def test_the_rule_sees_it_in_another_dress(rule, path, text):
    assert len(find_violations(rule, [Source(PurePosixPath(path), text)])) == 1


PACKAGE = [source for source in SOURCES if source.is_python and source.is_within("src/atoll")]

# modules that break the ratchet once, and modules that do not
PLANTED_IN_PACKAGE: dict[Ratchet, tuple[list[str], list[str]]] = {
    ratchets.check_docstring_starts: (
        ['def f():\n    """Of one learner."""'],
        ['def f():\n    """Return the rate of one learner."""'],
    ),
    ratchets.check_unique_class_names: (["class A: ...", "class A: ..."], ["class A: ...", "class B: ..."]),
    ratchets.check_private_attributes: (["learner._core.view()"], ["self._core.view()", "super()._end()"]),
    ratchets.check_inheritance_depth: (
        ["class A: ...\nclass B(A): ...", "from a import B\nclass C(B): ..."],
        ["class A: ...\nclass B(A): ...", "class C(Exception): ..."],
    ),
    ratchets.check_package_docstrings: (["x = 1"], ['"""Durable files. Knows no learners."""']),
}


@pytest.mark.parametrize("ratchet", LIMITS, ids=lambda ratchet: ratchet.__name__)
def test_violations_of_the_ratchet_only_become_fewer(ratchet):
    found = list(ratchet(PACKAGE))
    assert len(found) <= LIMITS[ratchet], "\n".join([ratchet.__doc__, *found])
    assert len(found) == LIMITS[ratchet], f"{len(found)} are left: lower the limit in tests/ratchets.py"


@pytest.mark.parametrize("ratchet", LIMITS, ids=lambda ratchet: ratchet.__name__)
def test_the_ratchet_sees_a_planted_violation_and_spares_its_neighbour(ratchet):
    def modules(texts: list[str]) -> list[Source]:
        return [Source(PurePosixPath(f"src/atoll/p{n}/__init__.py"), text + "\n") for n, text in enumerate(texts)]

    bad, good = PLANTED_IN_PACKAGE[ratchet]
    assert len(list(ratchet(modules(bad)))) == 1
    assert list(ratchet(modules(good))) == []


def test_the_rules_read_every_kind_of_file():
    paths = {str(source.path) for source in SOURCES}
    assert paths >= {
        "Makefile",
        ".ci/run",
        "pyproject.toml",
        "README.md",
        "src/atoll/cli/main.py",
        "tests/test_tidy.py",
    }
    assert not [path for path in paths if path.startswith((".venv", "runs", "dist"))]


# Imports a list of modules, with whatever they pull in, while everything beyond `allowed` is out of reach.
RESTRICTED_IMPORT_SCRIPT = """
import importlib, pkgutil, sys

room, *allowed = sys.argv[1:]

class Wall:
    def find_spec(self, name, path=None, target=None):
        known = name.split(".")[0] in sys.stdlib_module_names or name == "atoll"
        if not known and not any(name == a or name.startswith(a + ".") for a in allowed):
            raise ImportError(f"{name} is out of reach here")

sys.meta_path.insert(0, Wall())
package = importlib.import_module(room)
for module in pkgutil.walk_packages(getattr(package, "__path__", []), room + "."):
    importlib.import_module(module.name)
"""


def import_restricted(room: str, *allowed: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RESTRICTED_IMPORT_SCRIPT, room, *allowed]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def test_core_imports_with_the_standard_library_and_msgspec_alone():
    done = import_restricted("atoll.core", "atoll.core", "msgspec")
    assert done.returncode == 0, done.stderr


def test_sim_imports_with_core_and_tapes_alone():
    done = import_restricted("atoll.sim", "atoll.sim", "atoll.core", "atoll.tape", "msgspec")
    assert done.returncode == 0, done.stderr


def test_commands_that_start_islands_load_no_torch():
    done = import_restricted("atoll.launch.fleet", "atoll", "msgspec", "aiohttp", "rich", "cryptography")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("planted", ["numpy", "rich", "torch", "atoll.cli"])
def test_the_bare_house_keeps_a_planted_import_out(tmp_path, planted):
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "__init__.py").write_text("")
    (tmp_path / "planted" / "inner.py").write_text(f"import {planted}\n")
    done = import_restricted("planted", "planted", cwd=tmp_path)
    assert done.returncode != 0
    assert f"ImportError: {planted} is out of reach here" in done.stderr
