"""LIMoE's auxiliary losses of all routers, as one weighted mean."""

import math
from collections.abc import Iterable

from keras_moe.checks import check_one_of
from keras_moe.losses.auxiliary import (
    AggregateLoss,
    AuxiliaryLoss,
    register_aggregate,
)

CLASSIC = ("importance", "load", "router_z")
LOCAL = ("local_entropy", "target_entropy", "merged_entropy")


@register_aggregate("limoe")
def limoe_losses(
    thresholds: dict[str, float | None],
    local_loss: str = "local_entropy",
    local_modalities: Iterable[str] = ("text",),
    classic: Iterable[str] = CLASSIC,
    modalities: Iterable[str] = ("image", "text"),
    weight: float = 0.04,
) -> AggregateLoss:
    """The auxiliary losses that LIMoE trains with: their plain mean, times a weight.

    These are the importance, load and z losses over all tokens; a local entropy loss
    for text; and a global entropy loss with a threshold for each modality. Each is
    computed by group and averaged over groups (appendix E.5), those of a modality over
    the groups that have it. The load loss has noise of standard deviation 1/E, which
    is the router's `noise_std=1.0`.

    The paper applies the local loss to text (appendix E.1, and figure 38): images come
    to be routed with confidence without it. It counts in the mean once for each of
    `local_modalities`, as the global loss does for each modality; the paper leaves
    open whether it takes modalities as losses of their own.

    In configs, and so in the JSON of presets, the arguments stand under the name
    `"limoe"`: `"auxiliary_losses": {"limoe": {"thresholds": {"text": 2.4849, "image":
    2.8332}}}`. `LIMOE_LOSSES` has these for each published model by the name of its
    preset, and for routers that differ from it: `"several_experts"` for K > 1,
    `"by_modality"` for a router of each modality (`num_modalities`), and
    `"expert_pools"` for disjoint experts, which need no entropy losses (appendix E.3).

    Args:
        thresholds: entropy of each modality from which on its global loss is 0, such
            as `{"image": math.log(20), "text": math.log(9)}`; None for no such
            entropy. A modality that is not there has no global loss. Those below 0 are
            refused, such as the log(0.8) of table 5: 0 is the same, no loss.
        local_loss: name of the local loss: `"local_entropy"`, or for K > 1 experts
            per token `"target_entropy"` or `"merged_entropy"` (appendix E.1), of which
            the paper prefers the latter.
        local_modalities: names of the modalities that have a local loss.
        classic: names of losses over all tokens; without `"load"` for a router that
            has no noise.
        modalities: names of the modalities in the order of their ids.
        weight: factor of the mean.

    Returns:
        An `AggregateLoss`, for `auxiliary_losses=[...]`.

    Raises:
        ValueError: if a name of a modality or of a loss is unknown.

    Warns:
        UserWarning: from the MoE layer, if a threshold is above log E: the loss cannot
            reach 0. The paper itself has 25 for the images of 8 experts (appendix F.1).

    Reference:
        *LIMoE*, appendices B.1 and E.1; its table 5 has the thresholds.

    Example:

    >>> import math
    >>> from keras_moe import losses
    >>> loss = losses.limoe_losses({"text": math.log(4), "image": math.log(25)})
    >>> [part.name for part in loss.losses][3:]
    ['local_entropy', 'global_entropy', 'global_entropy']
    >>> (preset,) = losses.get(losses.LIMOE_LOSSES["limoe_h14"])
    >>> preset.get_config() == loss.get_config()
    True
    """
    local_modalities = tuple(local_modalities)
    ids = {name: number for number, name in enumerate(modalities)}
    check_one_of("local_loss", local_loss, LOCAL)
    _check_names("thresholds", thresholds, ids)
    _check_names("local_modalities", local_modalities, ids)
    parts = [AuxiliaryLoss(name) for name in classic]
    parts += [AuxiliaryLoss(local_loss, modality=ids[m]) for m in local_modalities]
    parts += [
        AuxiliaryLoss("global_entropy", threshold=threshold, modality=ids[modality])
        for modality, threshold in thresholds.items()
    ]
    return AggregateLoss(parts, weight)


def _settings(text, image, **options):
    """`auxiliary_losses` of a config with thresholds of so many experts."""
    thresholds = {"text": math.log(text), "image": math.log(image)}
    return {"limoe": {"thresholds": thresholds, **options}}


# `auxiliary_losses` by preset. Table 5 has the thresholds up to L/16, and those of
# routers that differ; appendix A.3 has H/14's. All take noise_std=1.0, for the load.
LIMOE_LOSSES = {
    "limoe_s32": _settings(text=12, image=17),
    "limoe_s16": _settings(text=9, image=20),
    "limoe_b32": _settings(text=12, image=17),
    "limoe_b16": _settings(text=9, image=20),
    "limoe_l32": _settings(text=20, image=1),
    "limoe_l16": _settings(text=28, image=8),
    "limoe_h14": _settings(text=4, image=25),
    # The merged entropy did best, with priority="sum_gates" (table 6).
    "several_experts": _settings(text=4, image=25, local_loss="merged_entropy"),
    "by_modality": _settings(text=4, image=25),
    "expert_pools": {"limoe": {"thresholds": {}, "local_modalities": []}},
}


def _check_names(argument, names, ids):
    for name in names:
        if name not in ids:
            raise ValueError(
                f"Expected {argument} for modalities among {list(ids)}; "
                f"received: {name!r}"
            )
