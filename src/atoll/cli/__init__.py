"""The subcommands of `atoll`.

`atoll.cli.main` has the table of commands: the function of each, with options as annotated parameters and help as its
docstring, and one command line that teaches it. Whatever takes time to import is imported inside the function, so that
`atoll --help` stays quick; a test watches that.
"""
