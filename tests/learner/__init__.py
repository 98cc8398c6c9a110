"""Tests of what travels and of what is kept on disk."""
