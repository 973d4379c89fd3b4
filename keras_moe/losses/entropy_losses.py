"""The entropy losses of LIMoE, as pure functions with one value per group.

A modality's loss is the loss over its tokens: pass `mask=modality_ids == m`, without
the padding. Entropies H have the natural logarithm, and 0 log 0 = 0.

Axes: G groups, S group_size, E experts, K selected experts, M modalities.
"""

import math
import numbers
import warnings
from typing import Any

from keras import ops

from keras_moe.checks import check_integer, check_selected
from keras_moe.losses.reductions import token_mean
from keras_moe.ops.token_choice import top_experts

# The logarithm's smallest argument: a normal float32, which no backend flushes to 0.
TINY = 1e-37


def local_entropy_loss(logits: Any, mask: Any = None) -> Any:
    """Mean entropy of the tokens' gates; each token should be sure of its expert.

    Args:
        logits: float32 (G, S, E), without noise.
        mask: boolean (G, S), False for tokens that do not count.

    Returns:
        float32 (G,): the mean over tokens of `H(softmax(logits))`, from 0 to log E;
        0 for a group in which no token counts.

    Reference:
        *LIMoE*, section 2.2.2.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import local_entropy_loss
    >>> round(float(local_entropy_loss(np.zeros((1, 3, 4), "float32"))[0]), 4)
    1.3863
    """
    return _mean_of_tokens(_entropy(ops.softmax(logits, axis=-1)), mask)


def global_entropy_loss(
    logits: Any, threshold: float | None = None, mask: Any = None
) -> Any:
    """Asks that the tokens together use many experts, up to a threshold.

    Args:
        logits: float32 (G, S, E), without noise.
        threshold: entropy tau from which on the loss is zero; `exp(tau)` is a soft
            minimum of the number of experts. None has no such limit.
        mask: boolean (G, S), False for tokens that do not count.

    Returns:
        float32 (G,): `max(0, tau - H(p))` with p the mean over tokens of
        `softmax(logits)`, or `-H(p)` without a threshold; 0 for a group in which no
        token counts.

    Raises:
        ValueError: if `threshold` is negative or not finite.

    Warns:
        UserWarning: if `threshold` is above log E, the largest entropy, so that the
            loss cannot reach 0.

    Reference:
        *LIMoE*, section 2.2.2 and appendix B.2.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import global_entropy_loss
    >>> logits = np.array([[[9.0, 0.0, 0.0], [0.0, 9.0, 0.0]]], "float32")
    >>> round(float(global_entropy_loss(logits, threshold=np.log(3))[0]), 2)
    0.4
    >>> float(global_entropy_loss(logits, threshold=0.5)[0])
    0.0
    """
    threshold = check_threshold(threshold)
    warn_of_unreachable_threshold(threshold, ops.shape(logits)[-1])
    return entropy_to_threshold(logits, threshold, mask)


def entropy_to_threshold(logits: Any, threshold: float | None, mask: Any) -> Any:
    """`global_entropy_loss` with a threshold that has been checked."""
    entropy = _entropy(token_mean(ops.softmax(logits, axis=-1), mask))
    if threshold is None:
        return -entropy
    # Without a token the entropy is 0, which is below the threshold.
    return _zero_if_empty(ops.relu(threshold - entropy), mask)


def mutual_information_loss(
    logits: Any, modality_ids: Any, num_modalities: int, mask: Any = None
) -> Any:
    """Negative mutual information of experts and modalities, which asks these to part.

    Every modality has the same weight, whatever its number of tokens.

    Args:
        logits: float32 (G, S, E), without noise.
        modality_ids: int (G, S), the modality of each token, from 0 to M - 1. A token
            with another id does not count.
        num_modalities: M.
        mask: boolean (G, S), False for tokens that do not count.

    Returns:
        float32 (G,): `mean_m H(p_m) - H(mean_m p_m)` with p_m the mean of
        `softmax(logits)` over the tokens of modality m. It is at least -log M.
        A modality without a token in a group is left out of the group's means: with
        one modality or none the loss is 0.

    Raises:
        ValueError: if `num_modalities` is no positive integer.

    Reference:
        *LIMoE*, appendix B.1.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import mutual_information_loss
    >>> logits = 50 * np.eye(2, dtype="float32")[None]
    >>> loss = mutual_information_loss(logits, np.array([[0, 1]]), num_modalities=2)
    >>> round(float(loss[0]), 4)
    -0.6931
    """
    num_modalities = check_integer("num_modalities", num_modalities)
    gates = ops.softmax(logits, axis=-1)
    total, entropies, present = 0.0, 0.0, 0.0
    for modality in range(num_modalities):
        tokens = modality_mask(modality_ids, modality, mask)
        # An absent modality has p = 0, H(p) = 0: it adds nothing to either sum.
        marginal = token_mean(gates, tokens)
        total = total + marginal
        entropies = entropies + _entropy(marginal)
        present = present + ops.cast(ops.any(tokens, axis=1), "float32")
    present = ops.maximum(present, 1.0)
    return entropies / present - _entropy(total / ops.expand_dims(present, -1))


def target_entropy_loss(
    logits: Any, num_selected_experts: int, mask: Any = None
) -> Any:
    """Draws the local entropy to that of K equal gates, instead of to 0.

    Args:
        logits: float32 (G, S, E), without noise.
        num_selected_experts: K, experts per token.
        mask: boolean (G, S), False for tokens that do not count.

    Returns:
        float32 (G,): `(log K - local_entropy_loss)^2`; 0 for a group in which no
        token counts.

    Raises:
        ValueError: if `num_selected_experts` is out of range.

    Reference:
        *LIMoE*, appendix E.1.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import target_entropy_loss
    >>> logits = np.array([[[20.0, 20.0, -20.0]]], "float32")
    >>> round(abs(float(target_entropy_loss(logits, num_selected_experts=2)[0])), 4)
    0.0
    """
    logits = ops.convert_to_tensor(logits)
    selected = check_selected(num_selected_experts, logits.shape[-1])
    # The square of the mean, not the mean of the tokens' squares.
    loss = ops.square(math.log(selected) - local_entropy_loss(logits, mask))
    return _zero_if_empty(loss, mask)


def merged_entropy_loss(
    logits: Any, num_selected_experts: int, mask: Any = None
) -> Any:
    """Asks that a token's K experts have all of its gates, in any proportion.

    Args:
        logits: float32 (G, S, E), without noise.
        num_selected_experts: K, experts per token.
        mask: boolean (G, S), False for tokens that do not count.

    Returns:
        float32 (G,): the mean over tokens of `H([sum of the K largest gates, sum of
        the rest])`; 0 for a group in which no token counts.

    Raises:
        ValueError: if `num_selected_experts` is out of range.

    Reference:
        *LIMoE*, appendix E.1.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import merged_entropy_loss
    >>> logits = np.zeros((1, 3, 4), "float32")
    >>> round(float(merged_entropy_loss(logits, num_selected_experts=2)[0]), 4)
    0.6931
    """
    logits = ops.convert_to_tensor(logits)
    num_experts = logits.shape[-1]
    selected = check_selected(num_selected_experts, num_experts)
    gates = ops.softmax(logits, axis=-1)
    experts, kept = top_experts(logits, gates, selected)
    index = ops.arange(num_experts, dtype="int32")
    is_kept = ops.any(ops.expand_dims(experts, -1) == index, axis=-2)
    # The others are summed: 1 - kept has no digit left where the token is sure.
    rest = ops.sum(ops.where(is_kept, 0.0, gates), axis=-1)
    merged = ops.stack([ops.sum(kept, axis=-1), rest], axis=-1)
    return _mean_of_tokens(_entropy(merged), mask)


def modality_mask(modality_ids: Any, modality: int, mask: Any = None) -> Any:
    """The tokens of a modality that count, as booleans (G, S)."""
    tokens = ops.equal(modality_ids, modality)
    return tokens if mask is None else ops.logical_and(mask, tokens)


def check_threshold(threshold: Any) -> float | None:
    """`threshold` as a float, if it is None or a finite number of at least 0."""
    if threshold is None:
        return None
    is_number = isinstance(threshold, numbers.Real) and not isinstance(threshold, bool)
    if not is_number or not 0 <= threshold < float("inf"):
        raise ValueError(
            "Expected threshold to be None or a finite number, threshold >= 0; "
            f"received: threshold={threshold!r}"
        )
    return float(threshold)


def warn_of_unreachable_threshold(threshold: float | None, num_experts: int) -> None:
    """Warns of a threshold above log E, the entropy of equal use of all E experts."""
    largest_entropy = math.log(num_experts)
    # A threshold of log E that was rounded to float32 is log E.
    if threshold is None or threshold <= largest_entropy + 1e-6:
        return
    warnings.warn(
        f"Expected threshold <= log(num_experts) = {largest_entropy:.4f}, the largest "
        f"entropy of {num_experts} experts; received: threshold={threshold:.4f}. The "
        "global entropy loss cannot reach 0: it is at least "
        f"{threshold - largest_entropy:.4f}.",
        stacklevel=2,
    )


def _entropy(p):
    """-sum_e p log p over the last axis, with a finite gradient at p = 0.

    The gradient is -(log p + 1); the softmax behind it multiplies that by p, and
    0 times infinity would be NaN. Logits far apart and logits of -inf give p = 0.
    """
    return -ops.sum(p * ops.log(ops.maximum(p, TINY)), axis=-1)


def _mean_of_tokens(values, mask):
    """The mean of (G, S) over the tokens that count."""
    return ops.squeeze(token_mean(ops.expand_dims(values, -1), mask), axis=-1)


def _zero_if_empty(loss, mask):
    if mask is None:
        return loss
    return ops.where(ops.any(mask, axis=1), loss, 0.0)
