"""Move bytes between processes: wire format, HTTP, WebSocket, TLS, keys, pacing.

Takes no decision of the protocol, and knows neither the learner's nor the syncer's process.
"""
