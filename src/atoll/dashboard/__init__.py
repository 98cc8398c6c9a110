"""What people look at: the page, reports, alerts, accounting. Reads tapes and metrics, decides nothing."""
