"""Where the processes of a run are: on this machine, in a Ray cluster, under Slurm. Launchers keep them alive; they
know nothing of training."""
