"""Durable files: atomic, checksummed, fenced. Knows neither learners nor the syncer's process."""
