"""The entropy of shares."""

from typing import Any

import numpy as np


def entropy(shares: Any) -> Any:
    """The entropy of shares in nats, where a share of 0 adds nothing."""
    shares = np.asarray(shares, "float64")
    # 0.0 is no -0.0.
    return 0.0 - (shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=-1)
