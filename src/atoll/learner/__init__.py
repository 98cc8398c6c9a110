"""`atoll.Learner`: the driver of the learner's core, its background thread, and the rank that runs both.

It does not depend on the syncer or on a trainer framework.
"""
