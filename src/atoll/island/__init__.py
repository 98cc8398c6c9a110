"""Many ranks, one learner: topology, connections between ranks, leader and followers.

Knows nothing of the syncer's process.
"""
