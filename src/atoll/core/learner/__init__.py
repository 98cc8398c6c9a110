"""The learner's half of the protocol: connection, rounds, joining, leaving.

This package does no I/O and does not import `core.syncer`.
"""
