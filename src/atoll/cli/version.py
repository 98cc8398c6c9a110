"""`atoll version`: which Atoll this is. Also the pattern that a new command copies."""

from __future__ import annotations

from atoll.cli.output import JsonOption, print_json

EXAMPLE = "atoll version --json"


def run(as_json: JsonOption = False) -> None:
    """Show the versions of Atoll and of the Python that runs it."""
    import platform

    from atoll import __version__

    if as_json:
        print_json({"atoll": __version__, "python": platform.python_version()})
    else:
        print(f"atoll {__version__} on Python {platform.python_version()}")
