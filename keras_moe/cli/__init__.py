"""The programs of `keras-moe`.

`main` parses the command line by `commands`, which imports nothing heavy, so that help
and mistakes are answered at once; then it imports the module of the sub-command and
calls its `run(args, console)`. A new sub-command is one function in `commands` and one
such module.
"""
