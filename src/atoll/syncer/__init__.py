"""The syncer's process: HTTP API, uploads and downloads, merging, snapshots, status, metrics, shards.

This package does not import the learner.
"""
