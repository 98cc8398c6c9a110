"""What an operator looks at: the dashboard page, the terminal view, reports, alerts, curves.

The package reads the tapes and metrics of a run. It takes no decision: operator requests are forwarded to the syncer.
"""
