"""Reference trainer: models, data, baselines, jobs of several processes, and replay of training from tapes.

It is optional: neither the learner nor the syncer imports it.
"""
