"""The papers' experiments on small data, one `keras-moe study` each.

`study` has what they share: runs that are made once, seeds, progress, results.
"""
