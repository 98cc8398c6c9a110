"""Tests of the two state machines, as conversations."""
