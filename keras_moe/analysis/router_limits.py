"""Limits beyond which a router is unhealthy."""

# An expert with less than this part of an equal share is dead.
DEAD = 0.01
# A layer has collapsed whose entropy of loads over log E is below,
MIN_ENTROPY = 0.5
# or where an expert of more than two has a share above,
MAX_SHARE = 0.75
# or where the share of dead experts is above.
MAX_DEAD = 0.5
