"""Record a run as tapes, and compute what follows from them: order, replay, story, timeline, ledger.

This package uses no tensors and no sockets.
"""
