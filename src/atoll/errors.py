"""What can go wrong for a learner, for its user to catch.

AtollError
  SyncerUnreachable    no syncer answers at the address: when joining, or in a `step` after `away_timeout_s`
    JoinTimeout        somebody answers, but the learner could not start in the time that it was given
  LearnerRefused       the syncer said no: another model, another run, quarantine, a key or token that is not good
    KeysRefused        no word was said: one side does not trust the other's key, or one speaks TLS and the other not
  IslandBroken         a rank of this island is gone, has failed, or is out of step with the others
  BackgroundFailed     our bug: a background thread has ended; the cause is attached
"""

from __future__ import annotations


class AtollError(Exception):
    """Everything that a learner raises by itself, except for ValueError for wrong arguments."""


class SyncerUnreachable(AtollError):  # noqa: N818 - named as the state of things that the user meets
    pass


class JoinTimeout(SyncerUnreachable):
    pass


class LearnerRefused(AtollError):  # noqa: N818
    pass


class KeysRefused(LearnerRefused):
    pass


class IslandBroken(AtollError):  # noqa: N818
    pass


class BackgroundFailed(AtollError):  # noqa: N818
    pass
