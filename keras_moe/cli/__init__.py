"""The programs of `keras-moe`, one file a command.

A command's file has a docstring, which is its help, `EXAMPLES`, `add_arguments(parser)`
and `run(args, console)`, which returns a `Result`. Help must be there at once: these
files import only the standard library and `keras_moe` itself, whose parts are imported
when they are first used; other libraries are imported in functions.
"""
