"""The syncer's half of the protocol: membership, rounds, leases, snapshots, shutdown.

It knows neither a learner's state nor any I/O.
"""
