"""Access to one backend that is no kernel; each file imports its library."""
