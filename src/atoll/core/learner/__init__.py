"""The learner's half of the protocol: connection, rounds, joining, leaving.

Knows neither the syncer's state nor any I/O.
"""
