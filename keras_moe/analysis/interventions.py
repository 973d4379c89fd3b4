"""Edits and steers experts. Axes: B batch, D hidden, E experts, K selected experts."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moe._checks import check_integer, check_number
from keras_moe._compat import serving
from keras_moe.ops.expert_types import EXPERT_TYPES, ExpertTypes

# The paper's best value for the attribute-blind threshold.
_BLIND_STRENGTH = 2.5


def moe_block(model: Any, name: str) -> Any:
    """The MoE block with a given name, of a backbone or a task."""
    blocks, backbone = _blocks(model), getattr(model, "backbone", model)
    if name not in blocks:
        raise ValueError(
            f"Expected the name of an MoE block, one of {blocks}; "
            f"received: {name!r} of {type(model).__name__}"
        )
    return backbone.get_layer(name)


def _blocks(model):
    """The names of the MoE blocks."""
    backbone = getattr(model, "backbone", model)
    # Records of token mixers are named "block_0/token_mixer".
    return [key for key in getattr(backbone, "routing", {}) if "/" not in key]


def mumoe_head(model: Any) -> Any:
    """The muMoE head of a classifier."""
    head = getattr(model, "head", None)
    if head is None or not hasattr(model, "routing"):
        raise ValueError(
            "Expected a classifier with a muMoE head; received: "
            f"{type(model).__name__} without head"
        )
    return head


def exclude_experts(model: Any, experts: Any) -> Any:
    """Returns a copy of a model whose routers never choose certain experts.

    Their tokens go to the best of the remaining experts, and the softmax is over these.
    Train the copy with `auxiliary_losses=None`: losses still count excluded experts.

    Args:
        model: backbone or classifier with token choice routers; not modified.
        experts: a number, a type (`"ffn"`, `"zero"`, `"copy"`, `"constant"`), or a
            sequence of these, added to those already excluded. At least K must remain.

    Reference: *MoE++*, appendix A.4 and Table C.

    Example:

    >>> import keras, numpy as np
    >>> from keras_moe import analysis, models
    >>> model = models.from_preset("moepp_digits", task="backbone")
    >>> without = analysis.exclude_experts(model, ["zero", "copy"])
    >>> routing = keras.Model(without.input, without.routing["block_0"])
    >>> images = np.zeros((1, 16, 16, 1), "float32")
    >>> served = routing.predict(images, verbose=0).dispatched
    >>> float(served[..., 8:10].sum())
    0.0
    """
    backbone = getattr(model, "backbone", model)
    if not hasattr(backbone.moe, "router_arguments"):
        raise ValueError(
            "Expected a model with MoE blocks, whose routers choose experts; received: "
            f"{type(model).__name__} with moe={backbone.moe}"
        )
    before = backbone.moe.router_arguments.get("excluded_experts", ())
    excluded = {*before, *numbers_of(experts, backbone.expert_types)}
    return model.with_router_arguments(excluded_experts=sorted(excluded))


def numbers_of(experts: Any, expert_types: ExpertTypes) -> tuple[int, ...]:
    """Resolves numbers and types of experts to expert numbers."""
    if isinstance(experts, str):
        if experts not in EXPERT_TYPES or not getattr(expert_types, experts):
            own = [name for name in EXPERT_TYPES if getattr(expert_types, name)]
            raise ValueError(
                f"Expected types of experts among {own}; received: experts={experts!r}"
            )
        return tuple(range(expert_types.total)[expert_types.slices()[experts]])
    if isinstance(experts, (list, tuple)):
        return tuple(x for each in experts for x in numbers_of(each, expert_types))
    return (check_integer("experts", experts, 0, expert_types.total - 1),)


def edit_expert_logits(
    model: Any,
    subpopulation: Any,
    output: int,
    strength: float | None = None,
    batch_size: int = 32,
) -> Any:
    """Returns a copy of a model that shifts one logit for a subpopulation.

    Adds `strength mean(a)^T a` to the logit of `output`, where a are an image's
    coefficients and the mean is over the subpopulation: the logit moves for images that
    use the same experts. Repeated edits add up.

    Args:
        model: `ImageClassifier` with a muMoE as its final layer; not modified.
        subpopulation: images (B, height, width, channels) of the subpopulation. None
            replaces the mean by ones, which moves all images alike.
        output: class or label whose logit moves.
        strength: lambda, to choose on validation data; negative lowers the logit. None
            for the number of experts, or 2.5 without a subpopulation, as in the paper.
        batch_size: images per batch.

    Reference: *Multilinear Mixture of Experts*, equation 5 and appendix J.

    Example:

    >>> import numpy as np
    >>> from keras_moe import analysis, models
    >>> from keras_moe.layers import MuMoE
    >>> model = models.from_preset(
    ...     "vmoe_digits", num_classes=10, head=MuMoE(10, num_experts=4, rank=8)
    ... )
    >>> images = np.zeros((2, 16, 16, 1), "float32")
    >>> edited = analysis.edit_expert_logits(model, images, output=3, strength=2.0)
    >>> change = edited.predict(images, verbose=0) - model.predict(images, verbose=0)
    >>> change[0].round(3).tolist()  # an untrained gate is uniform: 2 * 4 / 4 ** 2
    [0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    experts = mumoe_head(model).gate.expert_types.total
    if strength is not None:
        strength = check_number("strength", strength)
    if subpopulation is None:
        mean = np.ones(experts)
        strength = _BLIND_STRENGTH if strength is None else strength
    else:
        # The mean coefficients of the head's experts, float64 (E,).
        records = serving(keras.Model(model.input, model.routing["head"].gates))
        gates = records.predict(subpopulation, batch_size=batch_size, verbose=0)
        mean = gates[:, 0].mean(axis=0, dtype="float64")
        strength = experts if strength is None else strength
    return model.with_logit_offsets(output, strength * mean)


def expert_centres(model: Any, block: str) -> np.ndarray:
    """Cluster centres (E, D) of a block's experts: the columns of its router's kernel.

    The closer a token is to a centre, the larger the expert's logit. With several
    levels, an expert's centre is the sum over levels.

    Args:
        model: backbone or classifier.
        block: MoE block such as `"block_1"`, whose router is linear.

    Reference: *Multilinear Mixture of Experts*, appendix G.2.

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
    """Returns a copy of a model in which tokens are pushed towards an expert.

    Adds the expert's cluster centre, times `strength`, to the input of the block's
    mixture of experts, as part of the preceding normalisation's offset. Without such an
    offset, as in most language models, the vector is not part of the weights: the copy
    works in memory, and saving it drops the vector.

    Args:
        model: backbone, classifier or language model; not modified.
        block: MoE block such as `"block_1"`.
        expert: number of the expert.
        strength: factor on the centre; negative to push tokens away.

    Reference: *Multilinear Mixture of Experts*, appendix G.2.

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
    check_integer("expert", expert, 0, len(centres) - 1)
    strength = check_number("strength", strength)
    if not centres[expert].any():
        raise ValueError(
            "Expected a trained router; received: a cluster centre of zeros, "
            f"block={block!r}, expert={expert}"
        )
    steered, vector = model.copy(), strength * centres[expert]
    target = moe_block(steered, block)
    offset = getattr(target.feed_forward_norm, "beta", None)
    if offset is not None:
        offset.assign(ops.convert_to_numpy(offset.value) + vector)
    else:
        before = 0.0 if target.steering is None else target.steering
        target.steering = before + vector
    return steered
