"""The quality laboratory: the real cores' schedule on stacked tensors. `benchmarks/quality_protocol.md` has the rules."""
