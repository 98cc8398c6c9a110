"""The protocol as two deterministic state machines without I/O. Standard library only."""
