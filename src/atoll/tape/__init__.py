"""The recording of a run, and everything computed from it: order, replay, story, timeline.

Knows no tensors and no sockets.
"""
