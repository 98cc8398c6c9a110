"""What somebody may ask of a run through the page: checked here, said in words, and passed on to its syncer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.policy import find_control_problem
from atoll.core.types import Limits
from atoll.transport.endpoint import NoAnswerError, RequestRefusedError, read_address_file, send_request

SYNCER_TIMEOUT_S = 20.0
MAX_NAME_LENGTH = 80
ACTIONS = ("pause", "resume", "snapshot", "drain", "quorum", "grace")


class DashboardRequestError(Exception):
    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class OperatorRequest(NamedTuple):
    action: str
    value: float | None
    requested_by: str
    is_confirmed: bool

    @classmethod
    def parse(cls, raw: Any) -> OperatorRequest:
        """From JSON that anybody may have sent; ValueError says what is wrong with it."""
        if not isinstance(raw, dict) or raw.get("action") not in ACTIONS:
            raise ValueError(f"say what is wanted: one of {', '.join(ACTIONS)}")
        what, value, who = raw["action"], raw.get("value"), raw.get("requested_by")
        if not isinstance(who, str) or not who.strip() or len(who) > MAX_NAME_LENGTH:
            raise ValueError("say who asks: a name, so that the tape can tell")
        problem = None if what == "snapshot" else find_control_problem(what, value, Limits())
        if problem is not None:
            raise ValueError(problem)
        return cls(what, None if what == "snapshot" else value, who.strip(), raw.get("confirmed") is True)

    def confirmation_prompt(self) -> str:
        """What will happen, asked before it does."""
        return {
            "pause": "All islands stand still after their current step, until somebody resumes the run. Pause it?",
            "resume": "All islands go on training. Resume the run?",
            "snapshot": "A snapshot of the whole run is taken while it trains. Take it?",
            "drain": f"Learner {self.value} leaves for good; what it has not merged goes to others. Drain it?",
            "quorum": f"From now on a merge waits for at least {self.value} contributions. Change it?",
            "grace": f"From now on {self.value} of the slack is waited for more contributions. Change it?",
        }[self.action]


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


def apply_control(run: Path, request: OperatorRequest) -> str:
    """Passed on to the run's syncer; its sentence."""
    try:
        found = read_address_file(run)
    except (OSError, ValueError) as error:
        raise DashboardRequestError(503, str(error)) from None
    if found is None:
        raise DashboardRequestError(503, "no syncer of this run can be reached from here")
    try:
        if request.action == "snapshot":
            told = send_request(
                found.address,
                found.token,
                "POST",
                "/v1/snapshot",
                SYNCER_TIMEOUT_S,
                {"requested_by": request.requested_by},
                found.tls,
            )
            return f"snapshot {told['snapshot']} is being taken"
        body = {"kind": request.action, "value": request.value, "requested_by": request.requested_by}
        told = send_request(found.address, found.token, "POST", "/v1/control", SYNCER_TIMEOUT_S, body, found.tls)
        return str(told["done"])
    except RequestRefusedError as declined:
        raise DashboardRequestError(
            declined.status if declined.status in (400, 404, 409) else 502, str(declined)
        ) from None
    except NoAnswerError as nobody:
        raise DashboardRequestError(503, str(nobody)) from None
    except (KeyError, TypeError):
        raise DashboardRequestError(502, "the syncer's answer was not understood") from None
