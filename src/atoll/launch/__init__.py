"""Start the processes of a run on this machine, in a Ray cluster or under Slurm, and restart them when they fail.

Launchers handle commands, environments and exit codes. They do not depend on training.
"""
