"""The subcommands of `penstock`, one file each, imported only when it runs.

Every subcommand module has `USAGE`, `DESCRIPTION` and `EXAMPLES` for its help,
`add_arguments(parser)` and `run(arguments) -> exit code`.
"""
