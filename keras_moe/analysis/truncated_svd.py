"""The rank that a trained model needs in its MLPs.

Axes: R singular values kept.
"""

import re
from typing import Any, NamedTuple

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe.analysis.blocks import check_images
from keras_moe.variables import restored

# The kernels of MLPs in blocks: on channels, across tokens, and of experts.
_KERNELS = re.compile(r"block_\d+/.*(mlp|experts)/(hidden|output|gate)[/_]kernel$")


class TruncatedSVD(NamedTuple):
    """A model's scores with its MLPs' kernels truncated to lower ranks.

    Attributes:
        shares: fractions of the singular values that were kept.
        scores: score for each fraction.
        full: score of the whole model.
        kernels: names of the kernels.
    """

    shares: list[float]
    scores: list[float]
    full: float
    kernels: list[str]

    def to_dict(self) -> dict:
        """A JSON-serialisable dict."""
        return self._asdict()


def truncate_kernel(kernel: Any, share: float) -> np.ndarray:
    """The best approximation of matrices by a fraction of their singular values.

    Args:
        kernel: (..., I, O).
        share: fraction of the min(I, O) singular values, in (0, 1]; at least one is
            kept.

    Returns:
        An array like `kernel`.

    Raises:
        ValueError: if `share` is out of range.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import truncate_kernel
    >>> truncate_kernel(np.diag([3.0, 2.0]), share=0.5).round(6).tolist()
    [[3.0, 0.0], [0.0, 0.0]]
    """
    kernel = np.asarray(kernel)
    if kernel.ndim < 2 or not np.isfinite(np.asarray(kernel, "float64")).all():
        raise ValueError(
            f"Expected finite matrices (..., I, O); received: shape={kernel.shape}"
        )
    exact = kernel.astype("float64")
    # The best approximation of integers has fractions.
    dtype = "float64" if np.issubdtype(kernel.dtype, np.integer) else kernel.dtype
    return _truncated(np.linalg.svd(exact, full_matrices=False), share, dtype)


def _truncated(parts, share, dtype):
    if not 0 < share <= 1:
        raise ValueError(f"Expected 0 < share <= 1; received: share={share!r}")
    left, values, right = parts
    kept = max(round(share * values.shape[-1]), 1)
    scaled = left[..., :kept] * values[..., None, :kept]
    return (scaled @ right[..., :kept, :]).astype(dtype)


def truncated_svd(
    model: keras.Model,
    images: Any,
    labels: Any,
    shares: Any = (0.1, 0.25, 0.5, 0.75, 0.9),
    metric: str | None = None,
    batch_size: int = 32,
    verbose: Any = "auto",
) -> TruncatedSVD:
    """Evaluates a model with every MLP kernel truncated to its largest singular values.

    All MLPs of blocks are truncated: on channels, across tokens, and of experts, each
    expert by itself. The factors of muMoE, which have low ranks already, are not. The
    model has its kernels again at the end.

    Args:
        model: compiled classifier.
        images: (B, height, width, channels).
        labels: labels for the model's `evaluate`.
        shares: fractions of the singular values of each kernel.
        metric: name of a result of `evaluate`; None takes the first metric, such as
            "accuracy", or the loss where there is none.
        batch_size: number of images in a batch.
        verbose: whether to show a progress bar.

    Returns:
        `TruncatedSVD`.

    Raises:
        ValueError: if a fraction is out of range, there is no kernel of floats, or no
            such metric.

    Reference:
        *Multilinear Mixture of Experts*, Figure 7.

    Example:

    >>> import numpy as np
    >>> from keras_moe import analysis, models
    >>> model = models.from_preset("vmoe_digits")
    >>> images, labels = np.zeros((4, 16, 16, 1), "float32"), np.zeros(4, "int32")
    >>> result = analysis.truncated_svd(model, images, labels, [0.5], verbose=0)
    >>> len(result.scores), len(result.kernels)
    (1, 8)
    """
    images = check_images(images)
    try:
        shares = [float(share) for share in shares]
    except (TypeError, ValueError):
        raise ValueError(
            f"Expected shares to be numbers; received: shares={shares!r}"
        ) from None
    variables = getattr(model, "variables", ())
    kernels = [v for v in variables if _KERNELS.search(v.path)]
    types = {keras.backend.standardize_dtype(v.dtype) for v in kernels}
    if not kernels or any("int" in dtype for dtype in types):
        raise ValueError(
            "Expected a model with MLPs whose kernels are floats; received: "
            f"{type(model).__name__} with {len(kernels)} kernels of {sorted(types)}"
        )
    if any("lora" in v.path for v in variables):
        raise ValueError(
            "Expected a model without low-rank pairs beside its kernels; received "
            "some: save_to_preset and load it first"
        )
    if not model.compiled:
        raise ValueError("Expected a compiled model; received: compiled=False")
    if not shares or not all(0 < share <= 1 for share in shares):
        raise ValueError(f"Expected shares in (0, 1]; received: shares={shares}")

    def score():
        results = model.evaluate(
            images, labels, batch_size=batch_size, verbose=0, return_dict=True
        )
        name = metric or next((n for n in results if n != "loss"), "loss")
        if name not in results:
            raise ValueError(
                f"Expected metric to be one of {list(results)}; received: "
                f"metric={metric!r}"
            )
        return float(results[name])

    full, scores = score(), []
    with restored(kernels) as kept:
        for variable, value in zip(kernels, kept):
            if not np.isfinite(value.astype("float32")).all():
                raise ValueError(
                    f"Expected finite kernels; received: NaN or inf in {variable.path}"
                )
        # Half-precision types have no decomposition.
        parts = [
            np.linalg.svd(value.astype("float32"), full_matrices=False)
            for value in kept
        ]
        bar = keras.utils.Progbar(len(shares), unit_name="share") if verbose else None
        for number, share in enumerate(shares):
            for variable, value, part in zip(kernels, kept, parts):
                variable.assign(_truncated(part, share, value.dtype))
            scores.append(score())
            if bar is not None:
                bar.update(number + 1)
    return TruncatedSVD(shares, scores, full, [v.path for v in kernels])


def print_truncated_svd(result: TruncatedSVD, console: Console | None = None) -> None:
    """Prints the scores by the fraction of singular values kept.

    Args:
        result: result of `truncated_svd`.
        console: a rich console; None takes the terminal.

    Example:

    >>> from keras_moe.analysis import TruncatedSVD, print_truncated_svd
    >>> from rich.console import Console
    >>> print_truncated_svd(TruncatedSVD([0.5], [0.9], 1.0, []), Console(quiet=True))
    """
    table = Table(title="MLPs with their largest singular values alone")
    for column in ("share kept", "score", "change"):
        table.add_column(column, justify="right")
    for share, score in zip(result.shares, result.scores):
        table.add_row(f"{share:.0%}", f"{score:.4f}", f"{score - result.full:+.4f}")
    table.add_row("whole", f"{result.full:.4f}", "")
    (console or Console()).print(table)
