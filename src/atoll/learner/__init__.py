"""`atoll.Learner`: the driver of the learner's core, its background thread, and the rank that runs both.

Loads no code of the syncer, and knows no trainer framework.
"""
