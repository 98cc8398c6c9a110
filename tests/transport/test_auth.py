"""Authentication by token, and listening without a token on loopback only."""

from __future__ import annotations

import asyncio
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from atoll.errors import LearnerRefusedError
from atoll.learner.api import Learner
from atoll.store.run_settings import RunSettings
from atoll.syncer.main import serve_syncer
from atoll.transport import endpoint
from atoll.transport.auth import check_access
from tests.learner.runs import LIMIT_S, LearnerSpec, Run, config
from tests.learner.small_models import work

TOKEN = "correct horse battery staple"
INVALID_TOKEN = "incorrect horse battery"

PATHS = [
    ("GET", "/v1/run"),
    ("PUT", "/v1/model"),
    ("POST", "/v1/join"),
    ("GET", "/v1/link"),
    ("PUT", "/v1/contribution"),
    ("GET", "/v1/fragment/0/0"),
    ("PUT", "/v1/state"),
    ("GET", "/v1/state/1/1"),
    ("GET", "/v1/status"),
    ("POST", "/v1/snapshot"),
    ("GET", "/v1/snapshot/1000001"),
    ("POST", "/v1/finish"),
    ("GET", "/anything/else"),
]


def all_written_text(directory: Path) -> str:
    """Return all text and file names of a run directory, without the private address file."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    private = [path for path in files if path == directory / endpoint.ADDRESS_FILE]
    assert all(path.stat().st_mode & 0o077 == 0 for path in private), "others may read the token"
    texts = [path.read_bytes().decode("utf-8", "replace") for path in files if path not in private]
    return "\n".join([*texts, *(str(path) for path in directory.rglob("*"))])


def test_token_is_accepted_and_never_written(tmp_path):
    with Run(tmp_path, token=TOKEN) as run:
        learners = run.joined(1, 2)
        run.go(*learners)
        run.assert_same(run.finish(*learners), 1, 2)
        run.assert_clean()
    written = all_written_text(tmp_path)
    assert "listening on" in written
    assert TOKEN not in written
    assert "this machine only" not in written


def test_every_path_requires_token_and_no_response_has_it(tmp_path):
    with Run(tmp_path, token=TOKEN) as run:
        refused = 0
        for method, path in PATHS:
            for header in ("", "Bearer", f"Bearer {INVALID_TOKEN}", f"Bearer {TOKEN[:-1]}", f"bearer {TOKEN}", TOKEN):
                code, body = run.request(method, path, Authorization=header)
                assert code == 401, (method, path, header, body)
                assert b"token is missing or wrong" in body
                assert TOKEN.encode() not in body
                refused += 1
        assert run.status()["refused"] == {"token": refused}
        assert run.request("GET", "/v1/run")[0] == 200
    assert TOKEN not in all_written_text(tmp_path)
    assert INVALID_TOKEN not in all_written_text(tmp_path)


@pytest.mark.parametrize("token", [None, INVALID_TOKEN])
def test_learner_with_invalid_token_fails_immediately(tmp_path, caplog, token):
    with Run(tmp_path, token=TOKEN) as run:
        job = work()
        learner = Learner(job.model, job.optimizer, run.address, token, learner=1, join_timeout_s=LIMIT_S)
        with pytest.raises(LearnerRefusedError, match="the token is missing or wrong") as caught, learner:
            pass
        assert run.status()["refused"] == {"token": 1}
        for secret in (TOKEN, INVALID_TOKEN):
            assert secret not in str(caught.value)
            assert secret not in caplog.text
    assert INVALID_TOKEN not in all_written_text(tmp_path)


def test_changed_token_is_logged_and_training_continues(tmp_path):
    """After a restart of the syncer with another token, learners with the old one train and log the reason."""
    with Run(tmp_path, config(budget_merges=None), token=TOKEN) as run:
        (one,) = run.joined(1)
        run.go(one)
        run.until(run.merges(3), "the run trains")
        one.command("hold")
        one.expect("held")
        run.syncer.kill()
        run.token = "a new token, unknown to learners"
        run.start_syncer()
        one.command("train", 100)
        one.expect("trained")
        run.until(lambda _: run.log_lines(one, "the syncer answered 401"), "the learner logs the reason")
        one.command("break")
        one.expect("ended")


def test_websocket_without_token_is_refused(tmp_path):
    with Run(tmp_path, token=TOKEN) as run:
        run.joined(LearnerSpec(1, token=TOKEN))

        async def dial() -> None:
            async with aiohttp.ClientSession(f"http://{run.address}") as http:
                await http.ws_connect("/v1/link")

        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            asyncio.run(dial())
        assert caught.value.status == 401


# --------------------------------------------------------------------------------------------------------------------
# Addresses


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "head", ""])
def test_without_keys_only_loopback_is_served(tmp_path, host, token):
    with pytest.raises(ValueError, match=r"others could read.*`atoll keys init DIR`.*--host 127.0.0.1"):
        serve_syncer(tmp_path, RunSettings(config()), host=host, token=token)
    assert list(tmp_path.iterdir()) == [], "no file was created"


def test_plain_text_to_other_machines_needs_option_and_token(tmp_path):
    check_access("0.0.0.0", TOKEN, plain_text=True)
    with pytest.raises(ValueError, match=r"without a token.*give --token"):
        serve_syncer(tmp_path, RunSettings(config()), host="0.0.0.0", plain_text=True)
    assert list(tmp_path.iterdir()) == [], "no file was created"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_token(host):
    check_access(host, None)
    check_access(host, TOKEN)


def test_short_token_is_refused():
    with pytest.raises(ValueError, match="at least 8 characters"):
        check_access("127.0.0.1", "secret")


def test_syncer_without_token_logs_that_it_serves_loopback_only(tmp_path):
    with Run(tmp_path) as run:
        assert run.address.startswith("127.0.0.1:")
        assert run.log_lines(run.syncer, "this machine only: no token was given")


def test_port_in_use_and_unknown_host_are_reported(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        with pytest.raises(ValueError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*give another --port"):
            serve_syncer(tmp_path, RunSettings(config()), port=port)
    with pytest.raises(ValueError, match=r"cannot listen on no-such-host\.invalid: .*give another --host"):
        serve_syncer(tmp_path, RunSettings(config()), host="no-such-host.invalid", token=TOKEN, plain_text=True)


def test_syncer_runs_in_a_thread(tmp_path):
    """A syncer in a thread handles no signals, and ends with its run."""
    ready: list[str] = []
    finished: list[dict[str, Any]] = []

    def serve() -> bool:
        return serve_syncer(
            tmp_path,
            RunSettings(config(budget_merges=3)),
            port=0,
            on_ready=ready.append,
            on_finished=lambda syncer: finished.append(syncer.published_model()),
        )

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        while not ready:
            assert not serving.done(), serving.exception()
        job = work()
        with Learner(job.model, job.optimizer, ready[0], join_timeout_s=LIMIT_S) as learner:
            number = 0
            while not learner.finished:
                learner.step(tokens=16, loss=job.step(number))
                number += 1
        assert serving.result(LIMIT_S) is True
    assert finished[0].keys() == {name for name, _ in job.model.named_parameters()}
    assert re.fullmatch(r"127\.0\.0\.1:\d+", ready[0])
