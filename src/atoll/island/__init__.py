"""The ranks of one learner: fragments, step boundary, topology, connections between ranks, leader and followers.

A learner of one rank uses the fragments and the step boundary alone. Knows neither the learner's driver nor the syncer.
"""
