"""Bytes between processes: wire format, HTTP, TLS, keys, pacing. Takes no decision of the protocol."""
