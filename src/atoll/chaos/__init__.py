"""Inject real faults into a real run, drawn by a seed, and evaluate the run from its tapes. See docs/chaos.md.

Processes, links and disks are faulted from outside. Only `in_process` runs inside the faulted processes. Only the
command line imports this package.
"""
