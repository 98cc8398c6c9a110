"""Arithmetic on tensors: fragments, codecs, merging, outer optimizer, optimizer state.

Knows torch. Knows no sockets, no threads and no clock.
"""
