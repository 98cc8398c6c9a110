"""Goodput accounting: what the tapes of a run say about its time and its tokens, for whoever shows or judges it.

`read_books(run)` reads a run's directory; `Books` can also be fed entry by entry while tapes grow, as the page does.
report.json, `atoll dash`, `atoll watch`, `atoll report` and the verdict of `atoll chaos` all ask the same books.
docs/accounting.md defines goodput, uptime and the parts of an island's time.
"""
