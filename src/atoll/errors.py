"""What can go wrong for a learner, for its user to catch.

AtollError
  SyncerUnreachableError    no syncer answers at the address: when joining, or in a `step` after `disconnect_timeout_s`
    JoinTimeoutError        somebody answers, but the learner could not start in the time that it was given
  LearnerRefusedError       the syncer said no: another model, another run, quarantine, a key or token that is not good
    KeysRefusedError        no word was said: one side does not trust the other's key, or one speaks TLS and the other
                            not
  IslandBrokenError         a rank of this island is gone, has failed, or is out of step with the others
  BackgroundFailedError     our bug: a background thread has ended; the cause is attached
"""

from __future__ import annotations


class AtollError(Exception):
    """Everything that a learner raises by itself, except for ValueError for wrong arguments."""


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
