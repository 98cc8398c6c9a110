"""Fragments, codecs, merging, optimizer state. Knows torch, but no sockets, no threads and no clock."""
