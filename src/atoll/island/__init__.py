"""The ranks of one learner: fragments, step boundary, topology, connections between ranks, leader and followers.

A learner of one rank uses only the fragments and the step boundary. Depends neither on the driver nor on the syncer.
"""
