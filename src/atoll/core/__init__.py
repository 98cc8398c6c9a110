"""The protocol as two deterministic state machines, one for the learner and one for the syncer.

`handle(now, event)` returns effects, and a driver carries them out. Knows no I/O, no clock, no threads and no random
numbers. Needs the standard library and msgspec only.
"""
