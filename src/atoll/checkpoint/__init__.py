"""Models and snapshots out of a run and into another: export, import, restore. Starts no process."""
