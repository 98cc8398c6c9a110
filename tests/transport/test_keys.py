"""`atoll keys`: results, refused commands, file permissions and protection from overwriting."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from atoll.cli.main import main
from atoll.transport.keys import Authority, write_key_file
from tests.transport.key_rings import days_ago


def atoll_keys(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["keys", *words, "--json"]) == 0, capsys.readouterr().err
    output: dict[str, Any] = json.loads(capsys.readouterr().out)
    return output


def run_refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["keys", *words]) == 2
    return capsys.readouterr().err


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((path / "certificate.pem").read_bytes())


def all_files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_init_add_show(tmp_path, capsys):
    ring = str(tmp_path / "keys")
    made = atoll_keys(capsys, "init", ring, "--host", "head", "--host", "10.0.0.5", "--host", "[fd00::1]")["keys"][0]
    assert made["hosts"] == ["head", "10.0.0.5", "fd00::1", "localhost", "127.0.0.1", "::1"]
    assert atoll_keys(capsys, "add", ring, "far")["keys"][0]["learners"] == [1]
    assert atoll_keys(capsys, "add", ring, "near", "--learner", "5", "--learner", "2")["keys"][0]["learners"] == [2, 5]
    assert atoll_keys(capsys, "add", ring, "third")["keys"][0]["learners"] == [3]
    assert atoll_keys(capsys, "add", ring, "ada", "--operator", "--days", "7")["keys"][0]["is_operator"]
    shown = atoll_keys(capsys, "show", ring)
    assert [each["name"] for each in shown["keys"]] == ["syncer", "far", "near", "third", "ada"]
    assert {each["state"] for each in shown["keys"]} == {"good"}
    assert len(shown["authorities"]) == 1
    far = certificate(tmp_path / "keys/far")
    assert far.fingerprint(far.signature_hash_algorithm).hex() == shown["keys"][1]["fingerprint"]  # type: ignore[arg-type]
    assert main(["keys", "show", ring]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("far: learner 1; until 20")
    assert lines[5].startswith("ada: operator; until 20")
    assert ", soon; " in lines[5]


def test_private_files_are_private_from_their_first_byte(tmp_path):
    old = os.umask(0)
    try:
        Authority.init(tmp_path / "keys").add("far")
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "keys").rglob("*.key")}
    modes |= {str(path.parent.name): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("key.pem")}
    assert modes == {"authority.key": 0o600, "syncer": 0o600, "far": 0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_existing_keys_are_not_overwritten(tmp_path, capsys):
    ring = str(tmp_path / "keys")
    atoll_keys(capsys, "init", ring)
    atoll_keys(capsys, "add", ring, "far")
    before = all_files(tmp_path)
    assert "is not empty, and keys are never overwritten" in run_refused(capsys, "init", ring)
    assert "far has a key" in run_refused(capsys, "add", ring, "far")
    assert "learner 1 is named by the key of far" in run_refused(capsys, "add", ring, "other", "--learner", "1")
    assert all_files(tmp_path) == before
    with pytest.raises(ValueError, match="never overwritten"):
        write_key_file(tmp_path / "keys/far/key.pem", b"another", is_secret=True)
    assert all_files(tmp_path) == before, "no partial file is left"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["frobnicate", "DIR"], "there is no action 'frobnicate'; give one of init, add"),
        (["add", "DIR"], "add needs the name of the key: atoll keys add DIR NAME"),
        (["show", "DIR", "far"], "show takes no name"),
        (["add", "DIR", "../evil"], "is not a valid key name"),
        (["add", "DIR", "syncer"], "is not a valid key name"),
        (["add", "DIR", "far", "--learner", "0"], "numbered from 1"),
        (["add", "DIR", "far", "--host", "head"], "--host is for init"),
        (["renew", "DIR", "far"], "has no key of far; there are: syncer"),
        (["renew", "DIR", "syncer", "--learner", "1"], "are for add"),
        (["revoke", "DIR", "syncer"], "renew the authority"),
        (["revoke", "DIR", "unknown"], "has no key of unknown"),
        (["show", "ELSEWHERE"], "holds no authority: make one with atoll keys init"),
    ],
)
def test_impossible_command_is_refused_in_one_line(tmp_path, capsys, words, sentence):
    Authority.init(tmp_path / "keys")
    before = all_files(tmp_path)
    places = {"DIR": str(tmp_path / "keys"), "ELSEWHERE": str(tmp_path)}
    assert sentence in run_refused(capsys, *(places.get(word, word) for word in words))
    assert all_files(tmp_path) == before


def test_renew_keeps_holder_and_revoke_covers_all_keys_of_name(tmp_path, capsys):
    ring = str(tmp_path / "keys")
    atoll_keys(capsys, "init", ring, "--host", "head")
    first = atoll_keys(capsys, "add", ring, "far", "--learner", "4")["keys"][0]
    second = atoll_keys(capsys, "renew", ring, "far")["keys"][0]
    assert second["learners"] == [4]
    assert second["fingerprint"] != first["fingerprint"]
    assert atoll_keys(capsys, "renew", ring, "syncer", "--host", "head2")["keys"][0]["hosts"][0] == "head2"
    atoll_keys(capsys, "revoke", ring, "far")
    lines = (tmp_path / "keys/syncer/revoked.txt").read_text().splitlines()
    assert {line.split()[0] for line in lines} == {first["fingerprint"], second["fingerprint"]}
    assert "is revoked" in run_refused(capsys, "renew", ring, "far")
    states = {each["fingerprint"]: each["state"] for each in atoll_keys(capsys, "show", ring)["keys"]}
    assert (states[first["fingerprint"]], states[second["fingerprint"]]) == ("revoked", "revoked")
    assert atoll_keys(capsys, "add", ring, "far2", "--learner", "4")["keys"][0]["learners"] == [4], "it is free again"


def test_authority_is_retired_when_unused(tmp_path, capsys):
    ring = str(tmp_path / "keys")
    atoll_keys(capsys, "init", ring)
    atoll_keys(capsys, "add", ring, "far")
    atoll_keys(capsys, "renew", ring, "authority")
    assert len(atoll_keys(capsys, "show", ring)["authorities"]) == 2
    assert "the keys of far, syncer are of authorities before the newest" in run_refused(capsys, "retire", ring)
    for name in ("far", "syncer"):
        atoll_keys(capsys, "renew", ring, name)
    assert atoll_keys(capsys, "retire", ring) == {"retired": 1}
    for folder in ("", "far", "syncer"):
        assert (tmp_path / "keys" / folder / "authority.pem").read_bytes().count(b"BEGIN CERTIFICATE") == 1
    newest = Authority(tmp_path / "keys").authorities()[0]
    certificate(tmp_path / "keys/far").verify_directly_issued_by(newest)


def test_interrupted_authority_renewal_is_repeated_safely(tmp_path, monkeypatch):
    authority = Authority.init(tmp_path / "keys")
    real = write_key_file

    def until_the_key(path: Path, data: bytes, is_secret: bool = False, overwrite: bool = False) -> None:
        if path.name == "authority.key":
            raise KeyboardInterrupt
        real(path, data, is_secret, overwrite)

    with monkeypatch.context() as patched:
        patched.setattr("atoll.transport.keys.write_key_file", until_the_key)
        with pytest.raises(KeyboardInterrupt):
            authority.renew_authority()
    again = Authority(tmp_path / "keys")
    again.add("far")
    signed_by = [each for each in again.authorities() if again._is_signed_by(each, again.find_key("far"))]
    assert signed_by == again.authorities()[1:], "the old one, whose key is still the one that is here"


def test_expired_keys_are_listed_and_free_their_learners(tmp_path, capsys):
    authority = Authority.init(tmp_path / "keys")
    with days_ago(10):
        authority.add("old", days=5)
    shown = atoll_keys(capsys, "show", str(tmp_path / "keys"))["keys"]
    assert [each["state"] for each in shown] == ["good", "expired"]
    assert authority.add("new").holder.learners == (1,)
    assert main(["keys", "show", str(tmp_path / "keys")]) == 0
    assert "old: learner 1; EXPIRED 20" in capsys.readouterr().out


def test_keys_need_no_torch(tmp_path):
    script = "import sys; from atoll.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    words = [sys.executable, "-c", script, "keys", "init", str(tmp_path / "keys")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "False"
