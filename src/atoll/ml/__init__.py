"""Tensors: fragment plans, codecs, merging, outer steps and adopting. No sockets, no clock, no threads."""
