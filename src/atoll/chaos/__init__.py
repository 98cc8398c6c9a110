"""Real faults in a real run of real processes, drawn by a seed and judged by the run's tapes. docs/chaos.md."""
