"""What `penstock` can do: one file a subcommand, imported only when it is the one that runs.

Every subcommand module has `USAGE`, `DESCRIPTION` and `EXAMPLES` for its help,
`add_arguments(parser)` and `run(arguments) -> exit code`.
"""
