"""Record a run as tapes, and compute what follows from them: order, replay, story, timeline, ledger.

Knows no tensors and no sockets.
"""
