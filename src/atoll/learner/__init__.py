"""`atoll.Learner`: the driver of the learner's core, its background thread, the rank that runs both.

Loads no code of the syncer.
"""
