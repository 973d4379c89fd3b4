"""Auxiliary losses of routers, as pure functions with one value per group.

Axes: G groups, S group_size, E experts, K selected experts, M modalities.

Entropies H use the natural logarithm, and 0 log 0 = 0. A `mask` is boolean (G, S),
False for tokens that do not count. For a modality's loss, pass
`mask=modality_ids == m`, without the padding.
"""

import math
import warnings

from keras import ops

from keras_moe import _checks
from keras_moe._types import Tensor
from keras_moe.ops.expert_types import ExpertTypes
from keras_moe.ops.token_choice import selected_experts, top_experts

# The logarithm's smallest argument: a normal float32, which no backend flushes to 0.
TINY = 1e-37


def importance_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Squared coefficient of variation of the experts' summed gates.

    Args:
        logits: float32 (G, S, E), without noise.
        mask: boolean (G, S), False for tokens that do not count.

    Returns: float32 (G,): `(std / mean)^2` over experts of `sum_s softmax(logits)`.

    Reference: *Routers in Vision Mixture of Experts*, appendix A.

    Example:

    >>> from keras_moe.losses import importance_loss
    >>> float(importance_loss(np.zeros((1, 4, 2), "float32"))[0])
    0.0
    """
    return _squared_variation(token_sum(ops.softmax(logits, axis=-1), mask))


def load_loss(
    logits: Tensor,
    noisy_logits: Tensor,
    noise_std: float,
    num_selected_experts: int,
    mask: Tensor | None = None,
) -> Tensor:
    """Squared coefficient of variation of the experts' expected loads.

    An expert's load sums, over tokens, the probability that the expert would be among
    the token's K if its noise were drawn again: `1 - Phi((t - logit) / noise_std)` with
    t the token's K-th largest noisy logit.

    Args:
        logits: float32 (G, S, E), without noise.
        noisy_logits: float32 (G, S, E), with the noise that routed the tokens.
        noise_std: standard deviation of that noise.
        num_selected_experts: K, experts per token.

    Reference: *Routers in Vision Mixture of Experts*, appendix A.

    Example:

    >>> from keras_moe.losses import load_loss
    >>> logits = np.zeros((1, 4, 2), "float32")
    >>> float(load_loss(logits, logits, noise_std=0.5, num_selected_experts=1)[0])
    0.0
    """
    # The router's noise defines the load.
    _checks.check_positive("noise_std", noise_std)
    logits, noisy_logits = map(ops.convert_to_tensor, (logits, noisy_logits))
    _checks.check_selected(num_selected_experts, noisy_logits.shape[-1])
    _, kept = top_experts(noisy_logits, noisy_logits, num_selected_experts)
    threshold = kept[..., -1:]
    # 1 - Phi(x) = erfc(x / sqrt(2)) / 2: no cancellation for large x.
    load = 0.5 * ops.erfc((threshold - logits) / (noise_std * math.sqrt(2.0)))
    return _squared_variation(token_sum(load, mask))


def load_balance_loss(
    gates: Tensor, mask: Tensor | None = None, num_selected_experts: int = 1
) -> Tensor:
    """The balance loss of GShard and Switch: `E * sum_e f_e P_e`.

    f_e is the fraction of choices that fall on expert e, which has no gradient, and P_e
    is the mean gate of e.

    Args:
        gates: float32 (G, S, E), the softmax that routed the tokens.
        num_selected_experts: number of choices of each token that count: 1, as in the
            papers (for any K), or K.

    Returns: float32 (G,), 1 for a balanced load.

    Reference: *GShard*, section 2.2 and Algorithm 1; *Switch Transformers*, equations 4
    to 6; *ST-MoE*, appendix A.

    Example:

    >>> from keras_moe.losses import load_balance_loss
    >>> gates = np.array([[[0.75, 0.25, 0.0], [0.75, 0.0, 0.25]]], "float32")
    >>> float(load_balance_loss(gates)[0])  # 3 * 0.75
    2.25
    >>> float(load_balance_loss(gates, num_selected_experts=2)[0])
    1.3125
    """
    gates = ops.convert_to_tensor(gates)
    chosen = selected_experts(ops.stop_gradient(gates), num_selected_experts)
    share = token_mean(chosen, mask) / num_selected_experts
    mean_gate = token_mean(gates, mask)
    return gates.shape[-1] * ops.sum(share * mean_gate, axis=-1)


def heterogeneous_balance_loss(
    gates: Tensor,
    selected: Tensor,
    expert_types: ExpertTypes,
    tau: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """The balance loss of MoE++: `sum_e eta_e f_e P_e`.

    eta is 1 for FFN experts and tau for zero-computation experts, so that a tau below 1
    sends more tokens to the latter. f_e is the fraction of tokens that select e, with
    any of their K choices, and P_e is the mean gate of e.

    Args:
        gates: float32 (G, S, E), the softmax of the logits.
        selected: float32 (G, S, E), 1 for selected experts, served or not; no gradient.
        expert_types: numbers of experts of each type.
        tau: weight of zero-computation experts.

    Reference: *MoE++*, equation 7.

    Example:

    >>> from keras_moe.losses import heterogeneous_balance_loss
    >>> from keras_moe.ops import ExpertTypes
    >>> gates = np.array([[[0.5, 0.5], [0.5, 0.5]]], "float32")
    >>> selected = np.array([[[1.0, 0.0], [0.0, 1.0]]], "float32")
    >>> expert_types = ExpertTypes(ffn=1, zero=1)
    >>> float(heterogeneous_balance_loss(gates, selected, expert_types, tau=0.5)[0])
    0.375
    """
    selected = ops.stop_gradient(ops.convert_to_tensor(selected))
    share = token_mean(selected, mask)
    mean_gate = token_mean(ops.convert_to_tensor(gates), mask)
    eta = [1.0] * expert_types.ffn + [tau] * expert_types.zero_computation
    return ops.sum(ops.convert_to_tensor(eta, "float32") * share * mean_gate, axis=-1)


def router_z_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean squared log-partition of the logits, which keeps them small.

    Args: those of `importance_loss`.

    Returns: float32 (G,): the mean over tokens of `logsumexp(logits)^2`.

    Reference: *ST-MoE*, equation 5; *LIMoE*, appendix B; *CLIP-UP*, section 2.2.

    Example:

    >>> from keras_moe.losses import router_z_loss
    >>> round(float(router_z_loss(np.zeros((1, 3, 2), "float32"))[0]), 4)
    0.4805
    """
    squared = ops.square(ops.logsumexp(logits, axis=-1, keepdims=True))
    return ops.squeeze(token_mean(squared, mask), axis=-1)


def local_entropy_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean entropy of the tokens' gates: a token should be sure of its expert.

    Args: those of `importance_loss`.

    Returns: float32 (G,): the mean over tokens of `H(softmax(logits))`, at most log E.

    Reference: *LIMoE*, section 2.2.2.

    Example:

    >>> from keras_moe.losses import local_entropy_loss
    >>> round(float(local_entropy_loss(np.zeros((1, 3, 4), "float32"))[0]), 4)
    1.3863
    """
    return _mean_of_tokens(_entropy(ops.softmax(logits, axis=-1)), mask)


def global_entropy_loss(
    logits: Tensor, threshold: float | None = None, mask: Tensor | None = None
) -> Tensor:
    """Rewards the use of many experts by all tokens together, up to a threshold.

    Args:
        logits: float32 (G, S, E), without noise.
        threshold: entropy tau above which the loss is zero: about `exp(tau)` experts in
            use are enough; None for none. Warns above log E: the loss cannot reach 0.

    Returns: float32 (G,): `max(0, tau - H(p))` with p the mean over tokens of
    `softmax(logits)`, or `-H(p)` without a threshold; 0 if no token counts.

    Reference: *LIMoE*, section 2.2.2 and appendix B.2.

    Example:

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


def entropy_to_threshold(
    logits: Tensor, threshold: float | None, mask: Tensor | None
) -> Tensor:
    """`global_entropy_loss` with a threshold that has been checked."""
    entropy = _entropy(token_mean(ops.softmax(logits, axis=-1), mask))
    if threshold is None:
        return -entropy
    # Without a token the entropy is 0, which is below the threshold.
    return _zero_if_empty(ops.relu(threshold - entropy), mask)


def mutual_information_loss(
    logits: Tensor,
    modality_ids: Tensor,
    num_modalities: int,
    mask: Tensor | None = None,
) -> Tensor:
    """Negative mutual information of experts and modalities: experts should specialise.

    Args:
        logits: float32 (G, S, E), without noise.
        modality_ids: int (G, S), modalities from 0 to M - 1; other ids do not count.
        num_modalities: number M of modalities.

    Returns: float32 (G,), at least -log M: `mean_m H(p_m) - H(mean_m p_m)` with p_m the
    mean of `softmax(logits)` over the tokens of modality m. Means are over the
    modalities that a group has, so with one or none the loss is 0.

    Reference: *LIMoE*, appendix B.1.

    Example:

    >>> from keras_moe.losses import mutual_information_loss
    >>> logits = 50 * np.eye(2, dtype="float32")[None]
    >>> loss = mutual_information_loss(logits, np.array([[0, 1]]), num_modalities=2)
    >>> round(float(loss[0]), 4)
    -0.6931
    """
    num_modalities = _checks.check_integer("num_modalities", num_modalities)
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
    logits: Tensor, num_selected_experts: int, mask: Tensor | None = None
) -> Tensor:
    """Pulls the local entropy towards that of K equal gates, instead of 0.

    Args:
        num_selected_experts: K, experts per token; for others see `importance_loss`.

    Returns: float32 (G,): `(log K - local_entropy_loss)^2`; 0 if no token counts.

    Reference: *LIMoE*, appendix E.1.

    Example:

    >>> from keras_moe.losses import target_entropy_loss
    >>> logits = np.array([[[20.0, 20.0, -20.0]]], "float32")
    >>> round(abs(float(target_entropy_loss(logits, num_selected_experts=2)[0])), 4)
    0.0
    """
    logits = ops.convert_to_tensor(logits)
    selected = _checks.check_selected(num_selected_experts, logits.shape[-1])
    # The square of the mean, not the mean of the tokens' squares.
    loss = ops.square(math.log(selected) - local_entropy_loss(logits, mask))
    return _zero_if_empty(loss, mask)


def merged_entropy_loss(
    logits: Tensor, num_selected_experts: int, mask: Tensor | None = None
) -> Tensor:
    """Asks a token's K experts to share all of its gates, in any proportion.

    Args:
        num_selected_experts: K, experts per token; for others see `importance_loss`.

    Returns: float32 (G,): the mean over tokens of `H([sum of the K largest gates, sum
    of the rest])`.

    Reference: *LIMoE*, appendix E.1.

    Example:

    >>> from keras_moe.losses import merged_entropy_loss
    >>> logits = np.zeros((1, 3, 4), "float32")
    >>> round(float(merged_entropy_loss(logits, num_selected_experts=2)[0]), 4)
    0.6931
    """
    logits = ops.convert_to_tensor(logits)
    num_experts = logits.shape[-1]
    selected = _checks.check_selected(num_selected_experts, num_experts)
    gates = ops.softmax(logits, axis=-1)
    experts, kept = top_experts(logits, gates, selected)
    index = ops.arange(num_experts, dtype="int32")
    is_kept = ops.any(ops.expand_dims(experts, -1) == index, axis=-2)
    # A sum of the others: 1 - kept would lose all digits where the token is sure.
    rest = ops.sum(ops.where(is_kept, 0.0, gates), axis=-1)
    merged = ops.stack([ops.sum(kept, axis=-1), rest], axis=-1)
    return _mean_of_tokens(_entropy(merged), mask)


def modality_mask(
    modality_ids: Tensor, modality: int, mask: Tensor | None = None
) -> Tensor:
    """The tokens of a modality that count, as booleans (G, S)."""
    tokens = ops.equal(modality_ids, modality)
    return tokens if mask is None else ops.logical_and(mask, tokens)


def check_threshold(threshold: object) -> float | None:
    """`threshold` as a float, if it is None or a finite number of at least 0."""
    if threshold is None:
        return None
    return float(_checks.check_not_negative("threshold", threshold))


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
    """-sum_e p log p over the last axis, with a finite gradient at p = 0."""
    return -ops.sum(p * ops.log(ops.maximum(p, TINY)), axis=-1)


def _mean_of_tokens(values, mask):
    """The mean of (G, S) over the tokens that count."""
    return ops.squeeze(token_mean(ops.expand_dims(values, -1), mask), axis=-1)


def _zero_if_empty(loss, mask):
    if mask is None:
        return loss
    return ops.where(ops.any(mask, axis=1), loss, 0.0)


def token_sum(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sums (G, S, X) over the tokens that count: (G, X)."""
    if mask is not None:
        values = ops.where(ops.expand_dims(mask, -1), values, 0.0)
    return ops.sum(values, axis=1)


def token_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean of (G, S, X) over the tokens that count: (G, X), 0 without any."""
    if mask is None:
        return ops.mean(values, axis=1)
    count = ops.sum(ops.cast(mask, "float32"), axis=1, keepdims=True)
    return token_sum(values, mask) / ops.maximum(count, 1.0)


def over_counted_groups(losses: Tensor, counted: Tensor) -> Tensor:
    """Losses (G,), zeroed and scaled so that their mean is that of counted groups."""
    counted = ops.cast(counted, "float32")
    share = ops.mean(counted)
    return losses * counted / ops.where(share > 0, share, 1.0)


def _squared_variation(per_expert):
    mean = ops.mean(per_expert, axis=-1, keepdims=True)
    variance = ops.mean(ops.square(per_expert - mean), axis=-1)
    mean = ops.squeeze(mean, axis=-1)
    # A group without a token that counts has no mean, and no loss.
    empty = mean <= 0
    return ops.where(empty, 0.0, variance / ops.square(ops.where(empty, 1.0, mean)))
