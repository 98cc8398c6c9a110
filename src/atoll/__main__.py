"""`python -m atoll` is the `atoll` command."""

import sys


def main() -> int:
    """Loads the command only here, so that Ctrl-C is answered in one line even while modules are imported."""
    try:
        from atoll.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("atoll: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
