"""Steering: tokens pushed towards an expert's cluster.

Axes: D hidden, E experts.
"""

import math
import numbers
from typing import Any

import numpy as np
from keras import ops

from keras_moe.analysis.blocks import moe_block
from keras_moe.checks import check_integer


def expert_centres(model: Any, block: str) -> np.ndarray:
    """The cluster centres of a block's experts: the columns of its router's kernel.

    The nearer a token is to a centre, the larger is the expert's logit. The centre of
    an expert in several levels is the sum over levels.

    Args:
        model: backbone or classifier.
        block: name of an MoE block, such as `"block_1"`.

    Returns:
        float32 (E, D).

    Raises:
        ValueError: if there is no such block, or its router has no linear map of the
            tokens to the experts.

    Reference:
        *Multilinear Mixture of Experts*, appendix G.2.

    Example:

    >>> from keras_moe import analysis, models
    >>> model = models.from_preset("vmoe_digits", task="backbone")
    >>> analysis.expert_centres(model, "block_1").shape
    (8, 64)
    """
    router = moe_block(model, block).feed_forward.router
    kernels = getattr(router, "kernels", None) or [getattr(router, "kernel", None)]
    experts = math.prod(
        np.shape(kernel)[-1] for kernel in kernels if kernel is not None
    )
    if any(k is None or len(k.shape) != 2 for k in kernels) or (
        experts != router.expert_types.total
    ):
        raise ValueError(
            "Expected a block whose router maps tokens to experts by one kernel; "
            f"received: router={router.summary!r}"
        )
    centres = np.zeros((1, kernels[0].shape[0]), "float32")
    for kernel in kernels:
        level = ops.convert_to_numpy(kernel.value).T
        centres = (centres[:, None] + level[None]).reshape(-1, level.shape[1])
    return centres


def steer_expert(model: Any, block: str, expert: int, strength: float = 1.0) -> Any:
    """A new model in which every token is pushed towards an expert.

    The expert's cluster centre, times `strength`, is added to the input of the block's
    mixture of experts. It becomes part of the offset of the normalisation before: the
    new model has no other weights.

    Args:
        model: backbone or classifier of tokens; it is not changed.
        block: name of an MoE block, such as `"block_1"`.
        expert: number of the expert.
        strength: factor of the centre; a negative one pushes tokens away.

    Returns:
        A model of the same class, which saves and loads as any other.

    Raises:
        ValueError: if there is no such block or expert, or its centre is zero, like
            that of an untrained muMoE.

    Reference:
        *Multilinear Mixture of Experts*, appendix G.2.

    Example:

    >>> import keras, numpy as np
    >>> from keras_moe import analysis, models
    >>> model = models.from_preset("vmoe_digits", task="backbone")
    >>> steered = analysis.steer_expert(model, "block_1", expert=3, strength=50.0)
    >>> routing = keras.Model(steered.input, steered.routing["block_1"])
    >>> gates = routing.predict(np.zeros((1, 16, 16, 1), "float32"), verbose=0).gates
    >>> set(gates.argmax(axis=-1).ravel().tolist())
    {3}
    """
    centres = expert_centres(model, block)
    if check_integer("expert", expert, 0) >= len(centres):
        raise ValueError(
            f"Expected an expert below {len(centres)}; received: expert={expert}"
        )
    if not isinstance(strength, numbers.Real) or not np.isfinite(strength):
        raise ValueError(
            f"Expected strength to be a finite number; received: strength={strength!r}"
        )
    if not centres[expert].any():
        raise ValueError(
            "Expected a trained router; received: a cluster centre of zeros, "
            f"block={block!r}, expert={expert}"
        )
    steered = model.copy()
    offset = moe_block(steered, block).feed_forward_norm.beta
    offset.assign(ops.convert_to_numpy(offset.value) + strength * centres[expert])
    return steered
