"""The reference trainer: models, data, baselines, jobs of several processes, and training that is repeated from tapes.

Learners of other trainers do not need it: neither the learner nor the syncer imports it.
"""
