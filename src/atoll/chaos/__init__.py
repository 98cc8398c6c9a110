"""Inject real faults into a real run, and evaluate the run from its tapes. A seed draws the faults. See docs/chaos.md.

Faults of processes, links and disks are injected from outside. Only `in_process` runs inside the processes. Only the
command line imports this package.
"""
