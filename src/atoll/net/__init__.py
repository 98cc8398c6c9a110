"""Learners and the syncer as processes: the only room with sockets, threads and files."""
