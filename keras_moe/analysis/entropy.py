"""The entropy of shares."""

from typing import Any

import numpy as np


def entropy(shares: Any) -> Any:
    """The entropy of shares in nats, where a share of 0 adds nothing.

    Args:
        shares: (..., E), numbers from 0 to 1, the last axis of sum 1.

    Returns:
        float64 (...), from 0 to log E.

    Example:

    >>> from keras_moe.analysis.entropy import entropy
    >>> entropy([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]).round(3).tolist()
    [0.693, 0.0]
    """
    shares = np.asarray(shares, "float64")
    # 0.0 is no -0.0.
    return 0.0 - (shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=-1)
