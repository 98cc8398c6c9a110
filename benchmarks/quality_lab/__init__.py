"""The quality laboratory: the schedule of the real cores on stacked tensors. See `benchmarks/quality_protocol.md`."""
