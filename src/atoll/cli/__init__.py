"""The subcommands of `atoll`, one module each.

A command module has two names that `atoll.cli.main` reads: `run`, the function with its options and its help text, and
`EXAMPLE`, the one command line that teaches it. `version` is the shortest one to copy. Whatever takes time to import is
imported inside `run`, so that `atoll --help` stays quick; a test watches that.
"""
