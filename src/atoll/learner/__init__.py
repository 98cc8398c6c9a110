"""`atoll.Learner`: the driver of the learner's core, its background thread, its work between two steps.

Loads no code of the syncer.
"""
