"""Durable files of a run: atomic, checksummed, and fenced against a second syncer.

This package does not depend on learners or on the syncer's process, and takes no protocol decisions.
"""
