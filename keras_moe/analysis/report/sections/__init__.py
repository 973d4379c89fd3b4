"""The sections of the routing report, one a file."""
