"""The command line: one file per command, which defines `command`, a function whose parameters are typer options.

`main.py` holds the table of commands and imports only the one that was called. Its docstring is one sentence
and one example. Data goes to stdout, the rest to stderr; a user's mistake is raised as a `RunError`.
"""
