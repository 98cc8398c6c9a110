"""What somebody may ask of a run through the page: checked here, said in words, and passed on to its syncer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.policy import control_problem
from atoll.core.types import Limits
from atoll.transport.endpoint import NoAnswerError, RequestRefusedError, ask, read_address_file

ANSWER_S = 20.0
MOST_NAME = 80
WHAT = ("pause", "resume", "snapshot", "drain", "quorum", "grace")


class Refused(Exception):  # noqa: N818 - an answer
    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class OperatorRequest(NamedTuple):
    what: str
    value: float | None
    who: str
    sure: bool

    @classmethod
    def parse(cls, raw: Any) -> OperatorRequest:
        """From JSON that anybody may have sent; ValueError says what is wrong with it."""
        if not isinstance(raw, dict) or raw.get("what") not in WHAT:
            raise ValueError(f"say what is wanted: one of {', '.join(WHAT)}")
        what, value, who = raw["what"], raw.get("value"), raw.get("who")
        if not isinstance(who, str) or not who.strip() or len(who) > MOST_NAME:
            raise ValueError("say who asks: a name, so that the tape can tell")
        problem = None if what == "snapshot" else control_problem(what, value, Limits())
        if problem is not None:
            raise ValueError(problem)
        return cls(what, None if what == "snapshot" else value, who.strip(), raw.get("sure") is True)

    def question(self) -> str:
        """What will happen, asked before it does."""
        return {
            "pause": "All islands stand still after their current step, until somebody resumes the run. Pause it?",
            "resume": "All islands go on training. Resume the run?",
            "snapshot": "A snapshot of the whole run is taken while it trains. Take it?",
            "drain": f"Learner {self.value} leaves for good; what it has not merged goes to others. Drain it?",
            "quorum": f"From now on a merge waits for at least {self.value} contributions. Change it?",
            "grace": f"From now on {self.value} of the slack is waited for more contributions. Change it?",
        }[self.what]


def is_reachable(run: Path, token: str | None) -> bool:
    """A syncer has told of itself here, and this is its token; None: whichever it is. It may be gone all the same."""
    try:
        found = read_address_file(run)
    except (OSError, ValueError):
        return False
    if found is None:
        return False
    # A syncer that asks for its key and for no token: the page has the key, and a token of its own.
    by_key = found.token is None and found.keys is not None
    return token is None or found.token == token or by_key


def carry_out(run: Path, request: OperatorRequest) -> str:
    """Passed on to the run's syncer; its sentence."""
    try:
        found = read_address_file(run)
    except (OSError, ValueError) as error:
        raise Refused(503, str(error)) from None
    if found is None:
        raise Refused(503, "no syncer of this run can be reached from here")
    try:
        if request.what == "snapshot":
            told = ask(found.address, found.token, "POST", "/v1/snapshot", ANSWER_S, {"who": request.who}, found.tls)
            return f"snapshot {told['snapshot']} is being taken"
        body = {"what": request.what, "value": request.value, "who": request.who}
        told = ask(found.address, found.token, "POST", "/v1/control", ANSWER_S, body, found.tls)
        return str(told["done"])
    except RequestRefusedError as declined:
        raise Refused(declined.status if declined.status in (400, 404, 409) else 502, str(declined)) from None
    except NoAnswerError as nobody:
        raise Refused(503, str(nobody)) from None
    except (KeyError, TypeError):
        raise Refused(502, "the syncer's answer was not understood") from None
