"""`python -m atoll` is the `atoll` command."""

import sys


def main() -> int:
    """Run the command. It is imported here, so that Ctrl-C during the import prints one line, too."""
    try:
        from atoll.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("atoll: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
