"""Durable files of a run: atomic, checksummed, and fenced against a second syncer.

Independent of learners and of the syncer's process, and takes no decision of the protocol.
"""
