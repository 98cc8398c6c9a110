"""Tests of the learner: its messages and its files."""
