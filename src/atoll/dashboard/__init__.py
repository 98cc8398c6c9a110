"""Views of a run for operators: the dashboard page, the terminal view, reports, alerts, curves.

The package reads the tapes and metrics of a run. It does not control the run: it forwards operator requests to the
syncer.
"""
