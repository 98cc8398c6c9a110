"""Processes that hold some fragments of a run for its syncer: the coordinator, the process, their messages."""
