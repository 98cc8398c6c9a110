"""The package as users install it: built from the sources with the version of a tag, in an empty environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_OURS = (".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "_version.py", "build", "dist", "runs", "site")
NO_TORCH = "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('numpy'))"


def run_command(*arguments: str | Path, cwd: Path) -> str:
    """Run a command and return its stdout; it must succeed."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("GIT_")
    }
    done = subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def sources(tmp_path):
    """A copy of the sources without git; the build writes into it."""
    copy = tmp_path / "sources"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_OURS))
    return copy


def committed(folder: Path, tag: str | None) -> None:
    author = ("-c", "user.name=tester", "-c", "user.email=tester@example.org")
    run_command("git", "init", "-q", cwd=folder)
    run_command("git", "add", "-A", cwd=folder)
    run_command("git", *author, "commit", "-q", "-m", "All of it", "--no-gpg-sign", cwd=folder)
    if tag is not None:
        run_command("git", "tag", tag, cwd=folder)


def test_a_checkout_without_tags_and_a_copy_without_git_have_versions(sources):
    version_command = (sys.executable, "-m", "hatchling", "version")
    assert run_command(*version_command, cwd=sources).strip() == "0.1.dev0"
    committed(sources, None)
    assert re.fullmatch(r"0\.1\.dev1\+g[0-9a-f]+", run_command(*version_command, cwd=sources).strip())


# One test, because building and installing take most of the time, and parallel tests would each do it again.
@pytest.mark.long
def test_an_empty_environment_takes_the_wheel_and_runs_the_simulator_without_torch(sources, tmp_path):
    committed(sources, "v9.8.7")
    run_command(sys.executable, "-m", "build", "--no-isolation", cwd=sources)  # the wheel is made from the sdist
    sdist, wheel = sources / "dist/atoll-9.8.7.tar.gz", sources / "dist/atoll-9.8.7-py3-none-any.whl"
    assert sorted((sources / "dist").iterdir()) == [wheel, sdist]
    the_sdist_can_be_tested(sdist)
    the_wheel_has_what_is_read_at_run_time_and_nothing_else(wheel)
    venv.create(tmp_path / "venv", symlinks=True)
    python, atoll = tmp_path / "venv/bin/python", tmp_path / "venv/bin/atoll"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check")
    run_command(*pip, "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    assert run_command(python, "-c", NO_TORCH, cwd=tmp_path).strip() == "None None"
    assert run_command(atoll, "--version", cwd=tmp_path) == "atoll 9.8.7\n"
    assert "goodput" in run_command(
        atoll, *["simulate", "--days", "1", "--protocol-hours", "0.1", "--seeds", "1"], cwd=tmp_path
    )
    done = subprocess.run([atoll, "train", "--out", "x"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "atoll: this needs torch, which is not installed: pip install 'atoll[train]'\n"


def the_wheel_has_what_is_read_at_run_time_and_nothing_else(path: Path) -> None:
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
    files = [path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*") if path.is_file()]
    data = [path for path in files if path.suffix not in {".pyc", ".py"} and path.name != "ruff.toml"]
    expected = {path.as_posix() for path in data if path.parts[0] == "atoll" and "/." not in path.as_posix()}
    assert expected <= names
    assert {"atoll/py.typed", "atoll/_version.py"} <= names
    assert {"atoll/dashboard/alerts.rules.yml", "atoll/dashboard/grafana.json"} <= names
    assert {name.split("/")[0] for name in names} == {"atoll", "atoll-9.8.7.dist-info"}


def the_sdist_can_be_tested(path: Path) -> None:
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names >= {"Makefile", "constraints.txt", "mkdocs.yml", "tests/test_packaging.py", "docs/wire.md", ".ci/run"}


def test_extras_have_version_ranges():
    extras = PROJECT["optional-dependencies"]
    assert {"train", "ray", "slurm", "transformers", "lightning", "dash", "dev", "docs"} <= set(extras)
    for needs in extras.values():
        assert [need for need in needs if not re.search(r"[><]|^atoll\[", need)] == [], "a range for each"


def unpinned(package: str, extras: frozenset[str], pins: set[str]) -> set[str]:
    """Return the installed dependencies of a package, direct or not, without a pin."""
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(package, extras)]
    while waiting:
        name, extra_names = waiting.pop()
        if (name, extra_names) in seen:
            continue
        seen.add((name, extra_names))
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found |= {name} - pins
        for line in needed:
            requirement = Requirement(line)
            if requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in extra_names or {""}
            ):
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return found - {package}


def test_all_installed_dependencies_are_pinned():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins: set[str] = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    assert unpinned("atoll", frozenset({"train", "dev"}), pins) == set()
    assert unpinned("atoll", frozenset({"train", "dev"}), pins - {"h11"}) == {"h11"}
