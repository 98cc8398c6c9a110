"""Simulate the protocol and fleets of chips on a virtual clock, by seed, and check the protocol's invariants.

This package uses no tensors, no sockets, no threads and no wall clock.
"""
