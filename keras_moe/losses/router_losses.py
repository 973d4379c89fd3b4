"""Auxiliary losses of routers, as pure functions with one value per group.

Axes: G groups, S group_size, E experts, K selected experts.
"""

import math
from typing import Any

from keras import ops

from keras_moe.checks import check_selected
from keras_moe.losses.reductions import token_mean, token_sum
from keras_moe.ops.expert_types import ExpertTypes
from keras_moe.ops.token_choice import selected_experts, top_experts


def importance_loss(logits: Any, mask: Any = None) -> Any:
    """Squared coefficient of variation of the experts' summed gates.

    Args:
        logits: float32 (G, S, E), without noise.
        mask: boolean (G, S), False for tokens that do not count.

    Returns:
        float32 (G,): `(std / mean)^2` over experts (population std) of
        `sum_s softmax(logits)`.

    Reference:
        *Routers in Vision Mixture of Experts*, appendix A.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import importance_loss
    >>> float(importance_loss(np.zeros((1, 4, 2), "float32"))[0])
    0.0
    """
    return _squared_variation(token_sum(ops.softmax(logits, axis=-1), mask))


def load_loss(
    logits: Any,
    noisy_logits: Any,
    noise_std: float,
    num_selected_experts: int,
    mask: Any = None,
) -> Any:
    """Squared coefficient of variation of the experts' expected loads.

    The load of an expert is the mean probability that it would be among a token's
    K experts if its own noise were drawn anew: `1 - Phi((t - logit) / noise_std)`
    with t the token's K-th largest noisy logit.

    Args:
        logits: float32 (G, S, E), without noise.
        noisy_logits: float32 (G, S, E), with the noise that routed the tokens.
        noise_std: standard deviation of that noise.
        num_selected_experts: K, experts per token.
        mask: boolean (G, S), False for tokens that do not count.

    Returns:
        float32 (G,).

    Raises:
        ValueError: if `noise_std` is not positive (the loss is defined by the noise),
            or `num_selected_experts` is out of range.

    Reference:
        *Routers in Vision Mixture of Experts*, appendix A.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import load_loss
    >>> logits = np.zeros((1, 4, 2), "float32")
    >>> float(load_loss(logits, logits, noise_std=0.5, num_selected_experts=1)[0])
    0.0
    """
    if not noise_std > 0:
        raise ValueError(
            "Expected noise_std > 0, since the router's noise defines the load; "
            f"received: noise_std={noise_std}"
        )
    noisy_logits = ops.convert_to_tensor(noisy_logits)
    check_selected(num_selected_experts, noisy_logits.shape[-1])
    _, kept = top_experts(noisy_logits, noisy_logits, num_selected_experts)
    threshold = kept[..., -1:]
    # 1 - Phi(x) = erfc(x / sqrt(2)) / 2: no cancellation for large x.
    load = 0.5 * ops.erfc((threshold - logits) / (noise_std * math.sqrt(2.0)))
    return _squared_variation(token_sum(load, mask))


def load_balance_loss(
    gates: Any, mask: Any = None, num_selected_experts: int = 1
) -> Any:
    """The balance loss of GShard and Switch: `E * sum_e f_e P_e`.

    f_e is the fraction of choices that fall on expert e. The publications count each
    token's first choice, whatever K is: Switch has no other; GShard and ST-MoE send
    tokens to two experts, and count the larger gate. (ST-MoE's released code, in Mesh
    TensorFlow, can add half of a second such loss over the second choices and the
    other gates; by default it does not.) CLIP-UP, with K = 2, takes ST-MoE's loss.
    With `num_selected_experts=K` all K choices count equally, which also balances
    those after the first.

    Args:
        gates: float32 (G, S, E), the softmax that routed the tokens.
        mask: boolean (G, S), False for tokens that do not count.
        num_selected_experts: number of choices of each token that count: 1, the first
            choice, or K, all.

    Returns:
        float32 (G,): with f_e the fraction of the choices that are e (no gradient)
        and P_e the mean gate of e. It is 1 for a balanced load.

    Raises:
        ValueError: if `num_selected_experts` is out of range.

    Reference:
        *GShard*, section 2.2 and Algorithm 1; *Switch Transformers*, equations 4 to
        6; *ST-MoE*, appendix A.

    Example:

    >>> import numpy as np
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
    gates: Any,
    selected: Any,
    expert_types: ExpertTypes,
    tau: float = 1.0,
    mask: Any = None,
) -> Any:
    """The balance loss of MoE++: `sum_e eta_e f_e P_e`.

    eta is 1 for FFN experts and tau for zero-computation experts: a tau below 1 draws
    tokens to these. The loss counts all K choices of a token; `load_balance_loss` does
    so only on request, divides them by K, and has a factor E.

    Args:
        gates: float32 (G, S, E), the softmax of the logits.
        selected: float32 (G, S, E), 1 where the token selects the expert, served or
            not, else 0. It has no gradient.
        expert_types: numbers of experts of each type.
        tau: weight of zero-computation experts.
        mask: boolean (G, S), False for tokens that do not count.

    Returns:
        float32 (G,): with f_e the fraction of tokens that select e and P_e the mean
        gate of e.

    Reference:
        *MoE++*, equation 7.

    Example:

    >>> import numpy as np
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


def router_z_loss(logits: Any, mask: Any = None) -> Any:
    """Mean squared log-partition of the logits, which keeps them small.

    Args:
        logits: float32 (G, S, E).
        mask: boolean (G, S), False for tokens that do not count.

    Returns:
        float32 (G,): the mean over tokens of `logsumexp(logits)^2`.

    Reference:
        *ST-MoE*, equation 5; *LIMoE*, appendix B; *CLIP-UP*, section 2.2.

    Example:

    >>> import numpy as np
    >>> from keras_moe.losses import router_z_loss
    >>> round(float(router_z_loss(np.zeros((1, 3, 2), "float32"))[0]), 4)
    0.4805
    """
    squared = ops.square(ops.logsumexp(logits, axis=-1, keepdims=True))
    return ops.squeeze(token_mean(squared, mask), axis=-1)


def _squared_variation(per_expert):
    mean = ops.mean(per_expert, axis=-1, keepdims=True)
    variance = ops.mean(ops.square(per_expert - mean), axis=-1)
    mean = ops.squeeze(mean, axis=-1)
    # A group without a token that counts has no mean, and no loss.
    empty = mean <= 0
    return ops.where(empty, 0.0, variance / ops.square(ops.where(empty, 1.0, mean)))
