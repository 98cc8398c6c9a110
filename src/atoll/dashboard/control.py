"""Operator requests from the dashboard page: validated here, confirmed, and forwarded to the run's syncer."""

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
    """Request that is answered with an HTTP error status and a sentence."""

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
        """Parse untrusted JSON. Raise ValueError if it is not a valid request."""
        if not isinstance(raw, dict) or raw.get("action") not in ACTIONS:
            raise ValueError(f"unknown action; use one of {', '.join(ACTIONS)}")
        action, value, requested_by = raw["action"], raw.get("value"), raw.get("requested_by")
        if not isinstance(requested_by, str) or not requested_by.strip() or len(requested_by) > MAX_NAME_LENGTH:
            raise ValueError(f"requested_by is not a name; give one of 1 to {MAX_NAME_LENGTH} characters, for the tape")
        problem = None if action == "snapshot" else find_control_problem(action, value, Limits())
        if problem is not None:
            raise ValueError(problem)
        confirmed = raw.get("confirmed") is True
        return cls(action, None if action == "snapshot" else value, requested_by.strip(), confirmed)

    def confirmation_prompt(self) -> str:
        """Return the question that the user must confirm: it says what the action does."""
        return {
            "pause": "All learners pause after their current step, until an operator resumes the run. Pause it?",
            "resume": "All learners continue training. Resume the run?",
            "snapshot": "Take a snapshot of the whole run while it trains?",
            "drain": f"Learner {self.value} leaves for good; its unmerged samples return to the pool. Drain it?",
            "quorum": f"From now on a merge needs at least {self.value} contributions. Change the quorum?",
            "grace": f"From now on a round uses up to {self.value} of its slack as grace window. Change it?",
        }[self.action]


def is_reachable(run: Path, token: str | None) -> bool:
    """Return whether the run has a syncer address, and the token may control that syncer.

    The syncer may have exited since it wrote the address. With `token=None` every token is accepted.
    """
    try:
        found = read_address_file(run)
    except (OSError, ValueError):
        return False
    if found is None:
        return False
    # The syncer authenticates clients by key, not by token. The page uses the key; its token protects only the page.
    by_key = found.token is None and found.keys is not None
    return token is None or found.token == token or by_key


def apply_control(run: Path, request: OperatorRequest) -> str:
    """Send the request to the run's syncer and return the sentence that it replied."""
    try:
        found = read_address_file(run)
    except (OSError, ValueError) as error:
        raise DashboardRequestError(503, str(error)) from None
    if found is None:
        raise DashboardRequestError(503, "the run has no syncer address; start its syncer and try again")
    try:
        if request.action == "snapshot":
            reply = send_request(
                found.address,
                found.token,
                "POST",
                "/v1/snapshot",
                SYNCER_TIMEOUT_S,
                {"requested_by": request.requested_by},
                found.tls,
            )
            return f"snapshot {reply['snapshot']} is being taken"
        body = {"kind": request.action, "value": request.value, "requested_by": request.requested_by}
        reply = send_request(found.address, found.token, "POST", "/v1/control", SYNCER_TIMEOUT_S, body, found.tls)
        return str(reply["done"])
    except RequestRefusedError as error:
        status = error.status if error.status in (400, 404, 409) else 502
        raise DashboardRequestError(status, str(error)) from None
    except NoAnswerError as error:
        raise DashboardRequestError(503, str(error)) from None
    except (KeyError, TypeError):
        raise DashboardRequestError(502, "the syncer sent an invalid reply; check its version") from None
