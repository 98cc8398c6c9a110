"""The subcommands of `atoll`.

`atoll.cli.main` has the table of commands. Each entry has the function of the command and one example. The options are
the annotated parameters of the function, and the help is its docstring. Modules that take time to import are imported
inside the function, so that `atoll --help` stays fast. A test checks that.

Nothing else imports this package.
"""
