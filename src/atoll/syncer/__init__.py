"""The syncer's process: HTTP API, uploads, merging, status, metrics. Loads no code of the learner."""
