"""The syncer's process: HTTP API, uploads and downloads, merging, snapshots, status, metrics, shards.

Loads no code of the learner.
"""
