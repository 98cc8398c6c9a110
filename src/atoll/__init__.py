"""Atoll: Decoupled DiLoCo, training on islands that never wait for each other."""

__version__ = "0.1.0"
