"""The protocol on a virtual clock: pure, seeded, without torch."""
