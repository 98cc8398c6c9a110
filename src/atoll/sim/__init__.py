"""The protocol and fleets of chips on a virtual clock, by seed, and the checkers of the protocol's invariants.

Knows no tensors, no sockets, no threads and no wall clock.
"""
