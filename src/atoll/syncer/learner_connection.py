"""A learner's control connection, seen from the syncer: messages go out in order and wait for no other learner."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

from atoll.core.protocol import Body, Delivered, Envelope, Published, Resync
from atoll.core.types import NOTHING, FragmentId, Incarnation, LearnerId, Version
from atoll.transport.websocket import WebSocketConnection
from atoll.transport.wire import encode_message


class PinnableFragment(Protocol):
    """A fragment whose versions can be kept for a learner that was told of them."""

    def hold(self, version: Version) -> object | None: ...

    def release(self, version: Version) -> None: ...


class SyncerLink:
    """What waits for a learner is bounded: a newer version of a fragment takes the place of an older notice.

    A learner is told of one version of a fragment at a time, and that one is kept for it. If it were told of each: (1)
    it hears of version 7, (2) when its request arrives, version 8 is the newest and 7 is gone, (3) it hears of version
    8, and so on. Where versions come faster than a request travels, it would never get any.
    """

    def __init__(
        self,
        key: tuple[LearnerId, Incarnation, int],
        connection: WebSocketConnection,
        fragments: Mapping[FragmentId, PinnableFragment],
    ) -> None:
        self.key = key
        self._fragments = fragments
        self._told: dict[FragmentId, Version] = {}  # and kept, until the learner has it or wants another
        self._untold: dict[FragmentId, Envelope] = {}  # the newest version of a fragment that is in `_told`
        self.connection = connection

    def post(self, envelope: Envelope) -> None:
        if self.connection.is_closing:
            return
        body, key = envelope.body, None
        if type(body) is Published:
            if body.fragment in self._told:
                self._untold[body.fragment] = envelope
                return
            key = ("published", body.fragment)
            held = self._fragments.get(body.fragment)
            if held is not None and held.hold(body.version) is not None:
                self._told[body.fragment] = body.version
        self.connection.post(partial(encode_message, envelope), key)

    def heard(self, body: Body) -> None:
        """The learner has the version that it was told of, or wants another one: it may be told of the next."""
        if type(body) is not Delivered and type(body) is not Resync:
            return
        p = body.fragment
        has = body.version if type(body) is Delivered else NOTHING
        if p not in self._told or (type(body) is Delivered and has < self._told[p]):
            return
        self._fragments[p].release(self._told.pop(p))
        envelope = self._untold.pop(p, None)
        if envelope is not None and isinstance(envelope.body, Published) and envelope.body.version > has:
            self.post(envelope)

    def abandon(self) -> None:
        self.connection.cancel()
        for p, version in self._told.items():
            self._fragments[p].release(version)
        self._told.clear()
