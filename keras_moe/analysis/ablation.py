"""Accuracy lost without experts. Axes: B batch, C classes, E experts, L levels."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike

from keras_moe._batches import progress_bar
from keras_moe._checks import check_class_labels, check_one_of, unfit
from keras_moe._compat import flatten_layers, serving
from keras_moe._types import KerasModel, Tensor
from keras_moe.analysis._hooks import (
    Hooked,
    excluding,
    with_layers,
    without_one,
    zeroed,
)
from keras_moe.analysis.interventions import Experts, moe_block, mumoe_head, numbers_of

# All MoE blocks together.
ALL = "all"
# Suffix of the name of a block's token mixer.
MIXER = "/token_mixer"
# The expert outputs zeros; or it is not chosen, and its tokens go elsewhere.
REMOVALS = ("output", "choice")
# Limits for heads: pairs of image and expert that are listed at a time, and pairs
# that are computed at a time.
_PAIRS, _ROWS = 2**20, 1024


class ExpertAblation(NamedTuple):
    """Accuracies with all experts, and without each.

    Attributes:
        experts: (E,), the ablated experts: numbers, or names of types and combinations.
        counts: (C,), images per class; for multi-label classifiers, of all images.
        accuracy: (C,), accuracy per class of the full model.
        ablated: (E, C), accuracy per class without each expert.
    """

    experts: np.ndarray
    counts: np.ndarray
    accuracy: np.ndarray
    ablated: np.ndarray

    @property
    def changes(self) -> np.ndarray:
        """(E, C), the fraction `(y_c - y_c without it) / y_c` lost; 0 if y_c is 0."""
        known = self.accuracy > 0
        lost = np.where(known, self.accuracy - self.ablated, 0.0)
        return lost / np.where(known, self.accuracy, 1.0)

    @property
    def polysemanticity(self) -> np.ndarray:
        """(E,), 0 for experts that only one class needs (*muMoE*, equation 4)."""
        changes = self.changes
        only = np.eye(changes.shape[1])[changes.argmax(axis=1)]
        return np.linalg.norm(changes - only, axis=1)

    @property
    def mean_polysemanticity(self) -> float | None:
        """Mean over the experts that change any accuracy; None if none does."""
        matters = np.any(self.changes != 0, axis=1)
        return float(self.polysemanticity[matters].mean()) if matters.any() else None

    def to_dict(self) -> dict:
        """Returns a JSON-serialisable dict."""
        lists = {name: np.asarray(x).tolist() for name, x in self._asdict().items()}
        return {**lists, "mean_polysemanticity": self.mean_polysemanticity}


def ablate_experts(
    model: KerasModel,
    images: np.ndarray,
    labels: ArrayLike,
    layer: str = "head",
    experts: Sequence[Experts] | np.ndarray | None = None,
    *,
    removal: str | None = None,
    batch_size: int = 32,
    verbose: str | int = "auto",
) -> ExpertAblation:
    """Removes each expert in turn and measures the accuracy that each class loses.

    `removal="output"` zeroes an expert's weights; with `"choice"` its tokens choose the
    best other expert instead, as in `exclude_experts`. Each expert of a routed block
    costs a pass over the images, and with `"choice"` also a compilation. Predictions
    with all outputs equal are wrong.

    Args:
        model: classifier.
        images: (B, height, width, channels).
        labels: integer classes (B,), or 0-1 labels (B, C) of a multi-label classifier.
        layer: `"head"` for a muMoE head; an MoE block such as `"block_1"`; its token
            mixer, `"block_1/token_mixer"`; or `"all"` for all routed blocks at once.
        experts: sequence of numbers, types (`"ffn"`, `"zero"`, `"copy"`, `"constant"`)
            or tuples of these to remove together; None for each expert with weights.
        removal: `"output"` (experts with weights) or `"choice"` (token choice). None is
            `"output"` if experts with weights are given by number, else `"choice"`.
        batch_size: images per batch.
        verbose: see `keras_moe.evaluation.extract_features`.

    Reference: *Multilinear Mixture of Experts*, section 4.1.2; *MoE++*, Table C.

    Example:

    >>> from keras_moe import analysis, models
    >>> head = {"num_experts": 4, "rank": 8}
    >>> model = models.from_preset("vmoe_digits", num_classes=10, head=head)
    >>> images = np.zeros((20, 16, 16, 1), "float32")
    >>> labels = np.arange(20) % 10
    >>> analysis.ablate_experts(model, images, labels, verbose=0).changes.shape
    (4, 10)
    """
    part = ablated_part(model, layer)
    classes = _check_labels(labels, len(images), model)
    if removal is not None:
        check_one_of("removal", removal, REMOVALS)
    names, removals = _removals(experts, removal, part)
    counts = np.full(classes.shape[1:], len(classes))
    if classes.ndim == 1:
        counts = np.bincount(classes, minlength=model.output.shape[-1])
    arguments = (removals, images, classes, batch_size, verbose)
    count = _by_pairs if isinstance(part, MuMoEPart) else _by_passes
    right, lost = count(model, part, *arguments)
    shares = np.maximum(counts, 1)
    return ExpertAblation(names, counts, right / shares, (right - lost) / shares)


def _check_labels(labels, count, model):
    labels, classes = np.asarray(labels), model.output.shape[-1]
    several = getattr(model, "multi_label", labels.ndim == 2)
    shape = (count, classes) if several else (count,)
    if labels.shape != shape:
        raise unfit(f"labels of shape {shape}", shape=labels.shape)
    check_class_labels(labels, 2 if several else classes)
    return labels.astype("int32")


def _removals(experts, removal, part):
    """Names of the removals, and pairs of how to remove which experts."""
    expert_types = part.expert_types
    entries = list(part.ffn_experts if experts is None else experts)
    names, removals = [], []
    for entry in entries:
        numbers = numbers_of(entry, expert_types)
        is_number = not isinstance(entry, (str, list, tuple))
        how = removal
        if how is None:
            is_ffn = is_number and numbers[0] < expert_types.ffn
            how = "output" if is_ffn else "choice"
        if isinstance(part, MuMoEPart):
            is_possible = how == "output" and len(numbers) == 1
        else:
            is_possible = how == "choice" or max(numbers) < expert_types.ffn
        if not is_possible:
            # Zero-computation experts have no weights; all experts of muMoE take part.
            choice = "removal='choice' for zero, copy and constant experts"
            expected = f"{choice}, and 'output' with single experts for muMoE"
            raise unfit(expected, removal=removal, experts=experts)
        parts = entry if isinstance(entry, (list, tuple)) else [entry]
        names.append(numbers[0] if is_number else " + ".join(map(str, parts)))
        removals.append((how, numbers))
    return np.array(names), removals


class MuMoEPart:
    """A classifier split at a muMoE: its inputs, and the outputs without an expert."""

    def __init__(self, model: Any, layer: str):
        self.is_head = layer == "head"
        if self.is_head:
            self.layer, self.inputs = mumoe_head(model), model.features
            part, self.gate = self.layer, self.layer.gate
            self.rest = model.outputs_from_head
        else:
            name = layer.removesuffix(MIXER)
            self.layer = moe_block(model, name)
            self.inputs = self.layer.input
            is_mixer = layer.endswith(MIXER)
            part = self.layer.token_mixer if is_mixer else self.layer.feed_forward
            self.gate = part.router
            backbone = model.backbone
            blocks = keras.Model(backbone.features[name], backbone.output)
            classifier = keras.Model(model.pooler.input, model.output)
            self.rest = lambda tokens: classifier(blocks(tokens))
        # All are FFN experts.
        self.expert_types = self.gate.expert_types
        self.ffn_experts = range(self.expert_types.ffn)
        # The layers that hold the factorised experts.
        self.experts = [x for x in flatten_layers(part) if hasattr(x, "input_factor")]
        # Largest coefficient of each expert over the tokens of an image.
        self.shares = ops.max(ops.abs(model.routing[layer].gates), axis=1)

    def without(self, inputs: Tensor, experts: Tensor) -> Tensor:
        """The classifier's outputs with one expert's weights zeroed."""
        hooks = {id(x): without_one(x, experts) for x in self.experts}
        return self.rest(with_layers(self.layer, hooks)(inputs, training=False)[0])


class RoutedPart:
    """The routed MoE layers of one block, or of all."""

    def __init__(self, layers: list):
        self.layers, self.expert_types = layers, layers[0].router.expert_types
        # Those with weights, which pruning removes by block.
        columns = {e for layer in layers for e in layer.router.expert_columns}
        self.ffn_experts = sorted(columns)


def ablated_part(model: Any, layer: str) -> "MuMoEPart | RoutedPart":
    """The part of a classifier that `layer` names."""
    if layer == ALL:
        # Records of token mixers are named "block_0/token_mixer".
        names = [name for name in model.backbone.routing if "/" not in name]
        blocks = [moe_block(model, name) for name in names]
        return RoutedPart([block.feed_forward for block in blocks])
    if layer != "head":
        name = layer.removesuffix(MIXER)
        block = moe_block(model, name)
        if name == layer and not hasattr(block.feed_forward, "gate"):
            return RoutedPart([block.feed_forward])
    return MuMoEPart(model, layer)


def _is_right(outputs, labels, threshold):
    """1 for right predictions: (B,), or (B, C) for multi-label classifiers."""
    if len(labels.shape) == 2:
        decided = ops.cast(outputs > threshold, "int32")
        return ops.cast(decided == labels, "float32")
    right = ops.cast(ops.argmax(outputs, axis=-1), labels.dtype) == labels
    if outputs.shape[-1] > 1:
        undecided = ops.max(outputs, axis=-1) == ops.min(outputs, axis=-1)
        right = ops.logical_and(right, ops.logical_not(undecided))
    return ops.cast(right, "float32")


def _check_finite(outputs):
    if not np.isfinite(np.asarray(outputs, "float32")).all():
        raise ValueError("Expected a model with finite outputs; received: NaN or inf")
    return ops.convert_to_tensor(outputs)


def _threshold(model):
    return 0.0 if getattr(model, "output_activation", None) is None else 0.5


def _by_class(right, labels, classes):
    """Sums (B, ...) over the images of each class, giving (C,)."""
    if labels.ndim == 2:
        return right.sum(axis=0, dtype="float64")
    return np.bincount(labels, weights=right, minlength=classes)


class _Scorer(keras.Model):
    """Computes whether the prediction without an expert is right."""

    def __init__(self, classifier, part):
        # The global dtype policy may be less precise than the model's.
        super().__init__(name="scorer", dtype="float32")
        self.classifier, self.part, self.built = classifier, part, True

    def call(self, inputs):
        tokens, experts, labels = inputs
        outputs = self.part.without(tokens, experts)
        return _is_right(outputs, labels, _threshold(self.classifier))


# Both functions below return the number of right predictions (C,), and how many of
# them each removal loses (E, C).


def _by_pairs(model, part, removals, images, labels, batch_size, verbose):
    """Classifies each image again for each expert that takes part in it."""
    experts = np.array([expert for _, (expert,) in removals])
    classes, levels = model.output.shape[-1], part.gate.num_experts
    before = keras.Model(
        model.input,
        {"inputs": part.inputs, "shares": part.shares, "outputs": model.output},
    )
    scorer = _Scorer(model, part)
    right, lost = np.zeros(classes), np.zeros((len(experts), classes))
    # Tokens need far more memory than a head's features.
    step, rows_together = batch_size, batch_size
    if part.is_head:
        # With softmax every expert takes part in every image.
        step, rows_together = max(_PAIRS // len(experts), 1), _ROWS
    bar = progress_bar(len(labels), verbose, "image")
    for first in range(0, len(labels), step):
        of_step = labels[first : first + step]
        predicted = serving(before).predict(
            images[first : first + step], batch_size=batch_size, verbose=0
        )
        outputs = _check_finite(predicted["outputs"])
        whole = _is_right(outputs, ops.convert_to_tensor(of_step), _threshold(model))
        whole = ops.convert_to_numpy(whole)
        right += _by_class(whole, of_step, classes)
        # Only experts that take part in an image can change its prediction.
        rows, columns = np.nonzero(predicted["shares"][:, experts])
        for start in range(0, len(rows), rows_together):
            row = rows[start : start + rows_together]
            column = columns[start : start + rows_together]
            indices = np.stack(np.unravel_index(experts[column], levels), axis=-1)
            # Padded to a constant shape, so that the scorer compiles only once.
            padded = np.resize(row, rows_together)
            inputs = (
                predicted["inputs"][padded],
                np.resize(indices, (rows_together, len(levels))).astype("int32"),
                of_step[padded],
            )
            after = np.asarray(serving(scorer).predict_on_batch(inputs))[: len(row)]
            where = column if labels.ndim == 2 else (column, of_step[row])
            np.add.at(lost, where, whole[row] - after)
        bar.update(min(first + step, len(labels)))
    return right, lost


def _by_passes(model, part, removals, images, labels, batch_size, verbose):
    """Runs over all images once per removal."""
    classes = model.output.shape[-1]

    def right(model, inputs=images):
        outputs = serving(model).predict(inputs, batch_size=batch_size, verbose=0)
        outputs = _check_finite(outputs)
        hits = _is_right(outputs, ops.convert_to_tensor(labels), threshold)
        return _by_class(ops.convert_to_numpy(hits), labels, classes)

    def hooks_of(inputs):
        experts = [(x.experts, x.router.expert_columns) for x in part.layers]
        kept = inputs["kept"][0]
        return {id(x): zeroed(x, ops.take(kept, columns)) for x, columns in experts}

    threshold = _threshold(model)
    bar = progress_bar(len(removals), verbose, "expert")
    before, lost, without = right(model), [], Hooked(model, hooks_of)
    for number, (removal, experts) in enumerate(removals):
        if removal == "output":
            kept = ~np.isin(np.arange(part.expert_types.total), experts)
            kept = np.repeat(kept[None].astype("float32"), len(images), axis=0)
            lost.append(before - right(without, {"images": images, "kept": kept}))
        else:
            routers = [layer.router for layer in part.layers]
            hooks = {id(router): excluding(router, experts) for router in routers}
            lost.append(before - right(Hooked(model, hooks)))
        bar.update(number + 1)
    return before, np.stack(lost)
