"""The ranks of one learner: fragments and actions at a step boundary, topology, connections, leader and followers.

A learner of one rank uses the fragments and actions alone. Imports neither the learner's driver nor the syncer.
"""
