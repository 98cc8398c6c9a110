"""Move bytes between processes: wire format, HTTP, WebSocket, TLS, keys, pacing.

This package takes no protocol decisions, and does not depend on the learner's or the syncer's process.
"""
