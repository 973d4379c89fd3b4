"""Models with fewer experts: pruned in place, or smaller.

Axes: E experts, K selected experts.
"""

from typing import Any


def mask_experts(
    model: Any, kept_experts: dict[str, Any], method: str = "router_drop"
) -> Any:
    """A new model in which some experts serve nobody, and all weights are there.

    It computes what `prune_experts` gives in a smaller model, to try a choice of
    experts.

    Args:
        model: backbone or task with token choice routers; it is not changed.
        kept_experts: argument of `prune_experts`.
        method: argument of `prune_experts`.

    Returns:
        A model of the same class, which saves and loads as any other.

    Raises:
        ValueError: as `prune_experts`, or if the model has lost experts already.

    Example:

    >>> from keras_moe import analysis, models
    >>> model = models.from_preset("vmoe_digits", task="backbone")
    >>> masked = analysis.mask_experts(model, {"block_1": [0, 3]})
    >>> masked.count_params() == model.count_params()
    True
    """
    return _with_kept_experts(model, kept_experts, method, removed=False)


def prune_experts(
    model: Any, kept_experts: dict[str, Any], method: str = "router_drop"
) -> Any:
    """A new, smaller model of the experts that are kept.

    | method | gates are the softmax over | a token that prefers a pruned expert |
    |---|---|---|
    | `"router_drop"` | the kept experts: they are renormalised | takes the best kept |
    | `"router_pred"` | all experts | takes the best kept, with its small gate |
    | `"router_pred_skip"` | all experts | loses that choice; the residual carries it |

    With `"router_drop"` the routers' columns of the pruned experts are gone, too. The
    other two keep all columns, which the softmax needs, and lose the experts alone:
    numbers in routing records stay as they were.

    `"router_drop"` and `"router_pred"` are *LIMoE*'s, which finds "router-pred" better
    where many experts go. `"router_pred_skip"` is ours.

    Every token is served at inference unless a capacity is set. A capacity factor then
    counts the kept experts, C = S K c / E of these; with `"router_pred_skip"`, which
    routes as before, all E. The outputs are those of `mask_experts` either way.

    To train the result, take `"router_drop"`: with the other methods auxiliary losses
    still balance the load over pruned experts, so that `auxiliary_losses=None` is
    better.

    Args:
        model: backbone or task with token choice routers; it is not changed. One that
            was pruned by the same method can be pruned further.
        kept_experts: numbers of the experts to keep by the block's name, as
            `select_experts` gives them; the other blocks stay as they are.
        method: `"router_drop"`, `"router_pred"` or `"router_pred_skip"`.

    Returns:
        A model of the same class, which saves and loads as any other; its blocks may
        differ in their numbers of experts.

    Raises:
        ValueError: if there is no such block or expert, a block is dense, fewer than K
            experts are left, the model is pruned by another method, or its routers are
            of another class than `TokenChoiceRouter`.

    Reference:
        *Multimodal Contrastive Learning with LIMoE*, appendix E.4.

    Example:

    >>> from keras_moe import analysis, models
    >>> model = models.from_preset("vmoe_digits", task="backbone")
    >>> pruned = analysis.prune_experts(model, {"block_1": [0, 3]})
    >>> pruned.get_layer("block_1").feed_forward.experts.num_experts
    2
    """
    return _with_kept_experts(model, kept_experts, method, removed=True)


def _with_kept_experts(model, kept_experts, method, removed):
    if not hasattr(model, "with_kept_experts"):
        raise ValueError(
            "Expected a backbone or task of keras_moe; "
            f"received: {type(model).__name__}"
        )
    return model.with_kept_experts(kept_experts, method, removed)
