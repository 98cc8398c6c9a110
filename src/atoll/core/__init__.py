"""The protocol as two deterministic state machines, one for the learner and one for the syncer.

`handle(now, event)` returns effects, and a driver executes them. This package does no I/O and uses no clock, no
threads and no random numbers. It depends only on the standard library and msgspec.
"""
