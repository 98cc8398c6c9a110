"""Export a model or a snapshot from a run, and import or restore one into another run.

Starts no process and opens no connection. Knows neither the learner's nor the syncer's process.
"""
