"""`--dash` beside a job: what was said of the page is checked before anything begins, and reaches it."""

from __future__ import annotations

import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from atoll.cli.main import main
from atoll.cli.page_beside import Page, page_beside
from tests.tiny_run import TinyRun

WAIT_S = 300.0


@pytest.mark.parametrize("command", ["train", "syncer"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rules", "{rules}"], "--rules means nothing without --dash"),
        (["--webhook", "http://localhost:9/"], "--webhook means nothing without --dash"),
        (["--dash", "--rules", "{rules}"], "there is no rule 'gone'"),
        (["--dash", "--webhook", "example.org"], "is no address"),
    ],
)
def test_a_slip_is_told_before_anything_begins(tmp_path, capsys, command, words, said):
    rules = tmp_path / "rules.toml"
    rules.write_text("gone = 3\n")
    out = tmp_path / "run"
    assert main([command, "--out", str(out), *(word.format(rules=rules) for word in words)]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_rules_and_webhook_reach_the_page(tmp_path):
    """Learner 2 is dead; by these rules that is worth an alert, and somebody is told."""
    tiny = TinyRun().until(10.0)
    tiny.kill(2)
    run = tiny.until(30.0).save(tmp_path / "run")
    rules = tmp_path / "rules.toml"
    rules.write_text("gone_s = 5\n")
    posted: queue.Queue = queue.Queue()

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            posted.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words):
            pass

    with HTTPServer(("127.0.0.1", 0), Hook) as hook:
        thread = threading.Thread(target=hook.serve_forever)
        thread.start()
        try:
            with page_beside(Page(True, 0, rules, f"http://127.0.0.1:{hook.server_port}/"), run, None):
                told = posted.get(timeout=WAIT_S)
        finally:
            hook.shutdown()
            thread.join()
    assert (told["what"], told["rule"], told["subject"]) == ("raised", "island-gone", "learner 2")
