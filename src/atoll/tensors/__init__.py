"""Arithmetic on tensors: fragments, codecs, merging, outer optimizer, optimizer state.

This package uses torch, but no sockets, no threads and no clock.
"""
