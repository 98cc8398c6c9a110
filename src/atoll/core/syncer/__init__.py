"""The syncer's half of the protocol: membership, rounds, leases, snapshots, shutdown.

This package does no I/O and does not import `core.learner`.
"""
