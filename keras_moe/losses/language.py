"""The loss of language models. Axes: B batch, N tokens, D hidden, V vocabulary."""

from typing import Any

import keras
from keras import ops


def token_log_likelihoods(
    tokens: Any, kernel: Any, targets: Any, chunk_size: int = 128
) -> Any:
    """Log-likelihoods of target ids, without logits for the whole sequence.

    The logits of `chunk_size` positions exist at a time; the gradient recomputes them.

    Args:
        tokens: (B, N, D).
        kernel: (D, V), from tokens to logits.
        targets: integers (B, N); negative ones are ignored.
        chunk_size: positions per chunk.

    Returns: float32 (B, N), 0 for ignored targets.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import token_log_likelihoods
    >>> tokens, kernel = np.ones((1, 2, 1), "float32"), np.zeros((1, 4), "float32")
    >>> values = token_log_likelihoods(tokens, kernel, np.array([[3, -1]]))
    >>> [round(float(value), 3) for value in values[0]]  # the logarithm of 1 / 4
    [-1.386, 0.0]
    """
    tokens, targets = ops.convert_to_tensor(tokens), ops.cast(targets, "int32")
    kernel = ops.cast(kernel, tokens.dtype)
    length = tokens.shape[1]
    # TensorFlow may not know the length while it traces.
    if length is None or length <= chunk_size:
        return _log_likelihoods(tokens, kernel, targets)
    function = keras.remat(_log_likelihoods)
    parts = [
        function(
            tokens[:, start : start + chunk_size],
            kernel,
            targets[:, start : start + chunk_size],
        )
        for start in range(0, length, chunk_size)
    ]
    return ops.concatenate(parts, axis=1)


def _log_likelihoods(tokens, kernel, targets):
    return logit_log_likelihoods(ops.matmul(tokens, kernel), targets)


def logit_log_likelihoods(logits: Any, targets: Any) -> Any:
    """Log-likelihoods of target ids under logits.

    Args:
        logits: (B, N, V).
        targets: integers (B, N); negative ones are ignored.

    Returns: float32 (B, N), 0 for ignored targets.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import logit_log_likelihoods
    >>> values = logit_log_likelihoods(np.zeros((1, 1, 4)), np.array([[-1]]))
    >>> np.array(values).tolist()
    [[0.0]]
    """
    logits, targets = ops.cast(logits, "float32"), ops.cast(targets, "int32")
    known = ops.expand_dims(ops.maximum(targets, 0), -1)
    own = ops.squeeze(ops.take_along_axis(logits, known, axis=-1), -1)
    values = own - ops.logsumexp(logits, axis=-1)
    return ops.where(targets >= 0, values, 0.0)


def next_tokens(token_ids: Any, documents: Any) -> Any:
    """The target of each position: the next id of its document, or -1 at its end.

    Args:
        token_ids: integers (B, N).
        documents: integers or booleans (B, N), the number of each token's document; 0
            is padding.

    Returns: int32 (B, N).

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import next_tokens
    >>> targets = next_tokens(np.array([[5, 6, 7, 0]]), np.array([[1, 1, 2, 0]]))
    >>> np.array(targets).tolist()
    [[6, -1, -1, -1]]
    """
    documents = ops.cast(documents, "int32")
    following = ops.cast(token_ids, "int32")[:, 1:]
    same = ops.logical_and(documents[:, 1:] == documents[:, :-1], documents[:, 1:] != 0)
    targets = ops.where(same, following, -1)
    return ops.pad(targets, [[0, 0], [0, 1]], constant_values=-1)
