"""Tests of the two state machines, event by event."""
