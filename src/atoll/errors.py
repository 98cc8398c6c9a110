"""Errors that a learner raises, for its user to catch.

AtollError
  SyncerUnreachableError    no syncer answers at the address: when joining, or in `step` after `disconnect_timeout_s`
    JoinTimeoutError        the syncer answered, but the learner could not start within `join_timeout_s`
  LearnerRefusedError       the syncer refused the learner: another model, another run, quarantine, invalid key or token
    KeysRefusedError        the TLS handshake failed: one side does not trust the other's key, or only one side uses TLS
  IslandBrokenError         a rank of this island was lost, has failed, or is out of step with the others
  BackgroundFailedError     bug in Atoll: a background thread has ended; the cause is attached
"""

from __future__ import annotations


class AtollError(Exception):
    """Base class of all errors that a learner raises, except for ValueError for invalid arguments."""


class SyncerUnreachableError(AtollError):
    pass


class JoinTimeoutError(SyncerUnreachableError):
    pass


class LearnerRefusedError(AtollError):
    pass


class KeysRefusedError(LearnerRefusedError):
    pass


class IslandBrokenError(AtollError):
    pass


class BackgroundFailedError(AtollError):
    pass
