"""Prunes, excludes, edits and steers experts.

Axes: B batch, D hidden, E experts, K selected experts, U groups of tokens.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_moe import _checks
from keras_moe._compat import serving
from keras_moe._types import KerasModel
from keras_moe.analysis.usage import ExpertUsage
from keras_moe.ops.expert_types import EXPERT_TYPES, ExpertTypes

# Numbers and types of experts; names of groups.
Experts: TypeAlias = "int | str | Sequence[Experts]"
Groups: TypeAlias = str | int | Sequence[str]
CRITERIA = ("tokens", "mass", "reap")
# The paper's best value for the attribute-blind threshold.
_BLIND_STRENGTH = 2.5
COVERED = ("tokens", "mass", "first_choices")


class CoverageCurve(NamedTuple):
    """The share of an MoE layer's work done by its most used experts.

    Attributes:
        experts: int (E,), expert numbers, most used first.
        covered: float (E,), share covered by the first 1, 2, ..., E of them.
    """

    experts: np.ndarray
    covered: np.ndarray

    def to_dict(self) -> dict:
        """Returns a JSON-serialisable dict."""
        return {name: array.tolist() for name, array in self._asdict().items()}

    def needed(self, share: float) -> int:
        """Number of experts needed to cover a share."""
        # Allows for rounding errors of the sum.
        return int(np.argmax(self.covered >= share - 1e-12)) + 1


def expert_scores(
    usage: ExpertUsage, criterion: str = "tokens", groups: Groups | None = None
) -> dict[str, np.ndarray]:
    """Returns the experts' scores by a criterion, float64 (E,) by block name."""
    _checks.check_one_of("criterion", criterion, CRITERIA)
    rows = _rows(usage, groups)
    scores = {}
    for name, block in usage.blocks.items():
        tokens = block.tokens[rows].sum(axis=0)
        if not tokens.sum():
            raise _checks.unfit(f"groups with served tokens in {name}", groups=groups)
        if criterion == "reap":
            if block.contributions is None:
                expected = "expert_usage(contributions=True) for criterion='reap'"
                raise ValueError(f"Expected {expected}; received: none in {name}")
            contributions = block.contributions[rows].sum(axis=0)
            scores[name] = contributions / np.maximum(tokens, 1)
        else:
            scores[name] = getattr(block, criterion)[rows].sum(axis=0)
    return scores


def _rows(usage, groups):
    """Indices of the rows of a usage for some groups."""
    names = list(usage.groups)
    if groups is None:
        return list(range(len(names)))
    wanted = [groups] if isinstance(groups, (str, int)) else groups
    return [names.index(str(name)) for name in wanted]


def coverage_curves(
    usage: ExpertUsage,
    by: str = "tokens",
    groups: Groups | None = None,
    criterion: str | None = None,
) -> dict[str, CoverageCurve]:
    """Measures how much work the most used experts do, as curves by block name.

    Args:
        usage: result of `expert_usage`.
        by: the work: `"tokens"` served, `"mass"` of combine weights, or
            `"first_choices"` of all tokens, as in the paper's figure.
        groups: a name such as `"text"` or a list of names to count; None for all.
        criterion: what ranks the experts: `"tokens"` served, `"mass"` (sum of combine
            weights) or `"reap"` (mean over an expert's tokens of combine weight times
            output norm); None ranks by `by` (first choices by `"tokens"`).

    Reference: *Multimodal Contrastive Learning with LIMoE*, Figure 13 and appendix E.4;
    *REAP the Experts*, arXiv 2510.13999.

    Example:

    >>> from keras_moe.analysis import BlockUsage, ExpertUsage, coverage_curves
    >>> block = BlockUsage(np.array([[1.0, 6.0, 3.0]]), np.ones((1, 3)))
    >>> curve = coverage_curves(ExpertUsage(["all"], {"block_1": block}))["block_1"]
    >>> curve.experts.tolist(), curve.covered.tolist()
    ([1, 2, 0], [0.6, 0.9, 1.0])
    """
    _checks.check_one_of("by", by, COVERED)
    if criterion is None:
        criterion = by if by in CRITERIA else "tokens"
    scores = expert_scores(usage, criterion, groups)
    rows, curves = _rows(usage, groups), {}
    for name, block in usage.blocks.items():
        amounts = getattr(block, by)[rows].sum(axis=0)
        order = np.argsort(-scores[name], kind="stable")
        covered = np.cumsum(amounts[order])
        curves[name] = CoverageCurve(order, covered / covered[-1])
    return curves


def select_experts(
    usage: ExpertUsage,
    count: int | dict[str, int] | None = None,
    *,
    coverage: float | None = None,
    criterion: str = "tokens",
    groups: Groups | None = None,
    minimum: int = 1,
) -> dict[str, list[int]]:
    """Selects the experts that each MoE block keeps, for `prune_experts`.

    Args:
        usage: result of `expert_usage`.
        count: number of experts per block, or a dict by block name; others keep all.
        coverage: share in (0, 1], instead of `count`: each block keeps the fewest
            experts that cover it, in gate mass if that is the criterion, else in
            tokens.
        criterion: as in `coverage_curves`.
        groups: groups that the pruned model is for; None for all.
        minimum: smallest number to keep with `coverage`; routers need at least K.

    Example:

    >>> from keras_moe.analysis import BlockUsage, ExpertUsage, select_experts
    >>> block = BlockUsage(np.array([[1.0, 6.0, 3.0]]), np.ones((1, 3)))
    >>> usage = ExpertUsage(["all"], {"block_1": block})
    >>> select_experts(usage, count=1), select_experts(usage, coverage=0.8)
    ({'block_1': [1]}, {'block_1': [1, 2]})
    """
    if (count is None) == (coverage is None):
        raise _checks.unfit("either count or coverage", count=count, coverage=coverage)
    by = "mass" if criterion == "mass" else "tokens"
    curves = coverage_curves(usage, by, groups, criterion)
    if coverage is not None:
        _checks.check_share("coverage", coverage)
        counts = {x: max(y.needed(coverage), minimum) for x, y in curves.items()}
    else:
        counts = count if isinstance(count, dict) else dict.fromkeys(curves, count)
    kept = {}
    for name, number in counts.items():
        experts = curves[name].experts
        _checks.check_integer("count", number, 1, len(experts))
        kept[name] = sorted(experts[:number].tolist())
    return kept


def prune_experts(
    model: Any,
    kept_experts: dict[str, Sequence[int]],
    method: str = "router_drop",
    removed: bool = True,
) -> Any:
    """Returns a smaller copy of a model with only some of its experts.

    | method | gates are the softmax over | a token that prefers a pruned expert |
    |---|---|---|
    | `"router_drop"` | the kept experts | goes to the best kept one |
    | `"router_pred"` | all experts | goes to the best kept one, with its small gate |
    | `"router_pred_skip"` | all experts | loses that choice |

    *LIMoE* finds "router-pred" better when many experts are pruned;
    `"router_pred_skip"` is ours. A capacity factor counts the kept experts in
    C = S K c / E, or with `"router_pred_skip"` all E. To train the result, use
    `"router_drop"`: with the other methods auxiliary losses still balance the load over
    pruned experts, so set `auxiliary_losses=None`.

    MoE++ loses only FFN experts; others that are not kept are never chosen. Its routers
    keep all columns, which the next block reads.

    Args:
        model: backbone or task with token choice or MoE++ routers; not modified. A
            pruned model can be pruned further by the same method.
        kept_experts: dict from block name to the numbers of the experts to keep, at
            least K, such as `select_experts` returns; other blocks are unchanged.
        method: `"router_drop"`, `"router_pred"` or `"router_pred_skip"`.
        removed: whether the others' weights go. With False, the copy has the same
            outputs and keeps all weights, to try out a selection of a model that is
            not pruned yet.

    Reference: *Multimodal Contrastive Learning with LIMoE*, appendix E.4.

    Example:

    >>> from keras_moe import analysis, models
    >>> model = models.from_preset("vmoe_digits", task="backbone")
    >>> pruned = analysis.prune_experts(model, {"block_1": [0, 3]})
    >>> pruned.get_layer("block_1").feed_forward.experts.num_experts
    2
    """
    return model.with_kept_experts(kept_experts, method, removed)


# Excluding, editing and steering


def moe_block(model: KerasModel, name: str) -> keras.layers.Layer:
    """Returns the MoE block with a given name, of a backbone or a task."""
    backbone = getattr(model, "backbone", model)
    # Records of token mixers are named "block_0/token_mixer".
    blocks = [key for key in getattr(backbone, "routing", {}) if "/" not in key]
    if name not in blocks:
        expected = f"the name of an MoE block, one of {blocks}"
        raise _checks.unfit(expected, f"{name!r} of {type(model).__name__}")
    return backbone.get_layer(name)


def mumoe_head(model: KerasModel) -> keras.layers.Layer:
    """The muMoE head of a classifier."""
    head = getattr(model, "head", None)
    if head is None or not hasattr(model, "routing"):
        expected = "a classifier with a muMoE head"
        raise _checks.unfit(expected, f"{type(model).__name__} without head")
    return head


def exclude_experts(model: Any, experts: Experts) -> Any:
    """Returns a copy of a model whose routers never choose certain experts.

    Their tokens go to the best of the remaining experts, and the softmax is over these.
    Train the copy with `auxiliary_losses=None`: losses still count excluded experts.

    Args:
        model: backbone or classifier with token choice routers; not modified.
        experts: a number, a type (`"ffn"`, `"zero"`, `"copy"`, `"constant"`), or a
            sequence of these, added to those already excluded. At least K must remain.

    Reference: *MoE++*, appendix A.4 and Table C.

    Example:

    >>> import keras
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
        expected = "a model with MoE blocks, whose routers choose experts"
        raise _checks.unfit(expected, f"{type(model).__name__} with moe={backbone.moe}")
    before = backbone.moe.router_arguments.get("excluded_experts", ())
    excluded = {*before, *numbers_of(experts, backbone.expert_types)}
    return model.with_router_arguments(excluded_experts=sorted(excluded))


def numbers_of(experts: Experts, expert_types: ExpertTypes) -> tuple[int, ...]:
    """Resolves numbers and types of experts to expert numbers."""
    if isinstance(experts, str):
        if experts not in EXPERT_TYPES or not getattr(expert_types, experts):
            own = [name for name in EXPERT_TYPES if getattr(expert_types, name)]
            raise _checks.unfit(f"types of experts among {own}", experts=experts)
        return tuple(range(expert_types.total)[expert_types.slices()[experts]])
    if isinstance(experts, (list, tuple)):
        return tuple(x for each in experts for x in numbers_of(each, expert_types))
    return (_checks.check_integer("experts", experts, 0, expert_types.total - 1),)


def edit_expert_logits(
    model: Any,
    subpopulation: ArrayLike | None,
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

    >>> from keras_moe import analysis, models
    >>> head = {"num_experts": 4, "rank": 8}
    >>> model = models.from_preset("vmoe_digits", num_classes=10, head=head)
    >>> images = np.zeros((2, 16, 16, 1), "float32")
    >>> edited = analysis.edit_expert_logits(model, images, output=3, strength=2.0)
    >>> change = edited.predict(images, verbose=0) - model.predict(images, verbose=0)
    >>> change[0].round(3).tolist()  # an untrained gate is uniform: 2 * 4 / 4 ** 2
    [0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    experts = mumoe_head(model).gate.expert_types.total
    if subpopulation is None:
        mean, default = np.ones(experts), _BLIND_STRENGTH
    else:
        # The mean coefficients of the head's experts, float64 (E,).
        records = serving(keras.Model(model.input, model.routing["head"].gates))
        gates = records.predict(subpopulation, batch_size=batch_size, verbose=0)
        mean, default = gates[:, 0].mean(axis=0, dtype="float64"), experts
    strength = _checks.check_number(
        "strength", default if strength is None else strength
    )
    return model.with_logit_offsets(output, strength * mean)


def expert_centres(model: KerasModel, block: str) -> np.ndarray:
    """Columns (E, D) of the router's kernel; over several levels, their sums."""
    router = moe_block(model, block).feed_forward.router
    kernels = getattr(router, "kernels", None) or [getattr(router, "kernel", None)]
    matrices = [k for k in kernels if k is not None and len(k.shape) == 2]
    experts = math.prod(kernel.shape[-1] for kernel in matrices)
    if len(matrices) < len(kernels) or experts != router.expert_types.total:
        expected = "a block whose router maps tokens to experts by one kernel"
        raise _checks.unfit(expected, router=router.summary)
    centres = np.zeros((1, matrices[0].shape[0]), "float32")
    for kernel in matrices:
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

    >>> import keras
    >>> from keras_moe import analysis, models
    >>> model = models.from_preset("vmoe_digits", task="backbone")
    >>> steered = analysis.steer_expert(model, "block_1", expert=3, strength=50.0)
    >>> routing = keras.Model(steered.input, steered.routing["block_1"])
    >>> gates = routing.predict(np.zeros((1, 16, 16, 1), "float32"), verbose=0).gates
    >>> set(gates.argmax(axis=-1).ravel().tolist())
    {3}
    """
    centres = expert_centres(model, block)
    _checks.check_integer("expert", expert, 0, len(centres) - 1)
    strength = _checks.check_number("strength", strength)
    if not centres[expert].any():
        raise _checks.unfit(
            "a cluster centre other than zeros", block=block, expert=expert
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
