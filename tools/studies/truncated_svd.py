"""The rank that a trained model needs in its MLPs: Figure 7 of *Multilinear MoE*."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from rich.table import Table

from keras_moe._compat import restored

# The kernels of MLPs in blocks: on channels, across tokens, and of experts. muMoE's
# factors, which have low ranks already, are not among them.
KERNELS = re.compile(r"block_\d+/.*(mlp|experts)/(hidden|output|gate)[/_]kernel$")


class TruncatedSVD(NamedTuple):
    """A model's accuracies with its MLPs' kernels truncated to lower ranks.

    Attributes:
        shares: fractions of the singular values that were kept.
        scores: accuracy for each fraction.
        full: accuracy of the whole model.
        kernels: names of the kernels.
    """

    shares: list[float]
    scores: list[float]
    full: float
    kernels: list[str]

    def table(self) -> Table:
        table = Table(title="MLPs with their largest singular values alone")
        for column in ("share kept", "score", "change"):
            table.add_column(column, justify="right")
        for share, score in zip(self.shares, self.scores):
            table.add_row(f"{share:.0%}", f"{score:.4f}", f"{score - self.full:+.4f}")
        table.add_row("whole", f"{self.full:.4f}", "")
        return table


def truncated_svd(
    model: keras.Model,
    images: np.ndarray,
    labels: Any,
    shares: Sequence[float],
    metric: str = "accuracy",
) -> TruncatedSVD:
    """Evaluates a model with every MLP kernel cut to its largest singular values.

    Experts are cut one by one. The model has its kernels again at the end.
    """
    if not all(0 < share <= 1 for share in shares):
        raise ValueError(f"Expected shares in (0, 1]; received: shares={shares}")
    kernels = [v for v in model.variables if KERNELS.search(v.path)]
    if not kernels:
        raise ValueError(
            "Expected a model with MLPs in its blocks; received: "
            f"{type(model).__name__} without"
        )

    def score():
        results = model.evaluate(images, labels, verbose=0, return_dict=True)
        return float(results[metric])

    full, scores = score(), []
    with restored(kernels) as values:
        # Kernels (..., I, O) are left (..., I, R) diag(singular) right (..., R, O).
        parts = [
            np.linalg.svd(value.astype("float32"), full_matrices=False)
            for value in values
        ]
        for share in shares:
            for variable, (left, singular, right) in zip(kernels, parts):
                kept = max(round(share * singular.shape[-1]), 1)
                scaled = left[..., :kept] * singular[..., None, :kept]
                variable.assign(scaled @ right[..., :kept, :])
            scores.append(score())
    return TruncatedSVD(list(shares), scores, full, [v.path for v in kernels])
