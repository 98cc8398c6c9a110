"""The learner's half of the protocol: connection, rounds, joining, leaving.

It knows neither the syncer's state nor any I/O.
"""
