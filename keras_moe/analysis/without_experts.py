"""The numbers of right predictions with all experts, and without some.

Axes: B batch, C classes, E experts, L levels of hierarchy.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moe.analysis.blocks import moe_block, mumoe_head
from keras_moe.analysis.excluded_experts import excluded
from keras_moe.ops.expert_types import ExpertTypes
from keras_moe.variables import restored

# The name for all MoE blocks together.
ALL = "all"
# An expert outputs zeros; or no token chooses it, and its tokens take others.
REMOVALS = ("output", "choice")

# The end of the name of a block's token mixer.
MIXER = "/token_mixer"
# The numbers of pairs of image and expert that are listed together, and of pairs that a
# head computes together.
_PAIRS, _ROWS = 2**20, 1024


class MuMoEPart:
    """A muMoE in a classifier: its inputs, and the outputs without some experts."""

    def __init__(self, model: keras.Model, layer: str):
        self.is_head, self.is_mixer = layer == "head", layer.endswith(MIXER)
        if self.is_head:
            self.layer, self.inputs = mumoe_head(model), model.features
            self.gate = self.layer.gate
            self.rest = model.outputs_from_head
        else:
            name = layer.removesuffix(MIXER)
            self.layer = moe_block(model, name)
            self.inputs = self.layer.input
            part = self.layer.token_mixer if self.is_mixer else self.layer.feed_forward
            self.gate = part.router
            self.rest = _rest(model, name)
        # The largest coefficient of an expert for a token of an image.
        self.shares = ops.max(ops.abs(model.routing[layer].gates), axis=1)

    @property
    def expert_types(self) -> ExpertTypes:
        """The numbers of experts of each type; all are FFN experts."""
        return self.gate.expert_types

    def without(self, inputs: Any, experts: Any) -> Any:
        """The classifier's outputs with the weights of one expert zero."""
        if self.is_head:
            coefficients, _ = self.gate(inputs)
            return self.rest(self.layer.ablated(inputs, coefficients, experts))
        return self.rest(self.layer.ablated(inputs, experts, mixer=self.is_mixer))


class RoutedPart:
    """The routed MoE layers of one block of a classifier, or of all."""

    def __init__(self, layers: list):
        for layer in layers:
            if not hasattr(layer, "expert_slices"):
                raise ValueError(
                    "Expected blocks whose experts a router chooses; received: "
                    f"{type(layer).__name__}"
                )
        if not layers:
            raise ValueError("Expected a model with MoE blocks; received: none")
        self.layers = layers

    @property
    def expert_types(self) -> ExpertTypes:
        """The numbers of experts of each type."""
        return self.layers[0].router.expert_types

    @contextlib.contextmanager
    def zeroed(self, experts: tuple[int, ...]) -> Iterator[None]:
        """Sets the weights of FFN experts of all layers to zero within the context."""
        parts = [
            pair
            for layer in self.layers
            for expert in experts
            for pair in layer.expert_slices(expert)
        ]
        with restored([variable for variable, _ in parts]):
            for variable, index in parts:
                value = np.array(ops.convert_to_numpy(variable.value))
                value[index] = 0
                variable.assign(value)
            yield


def _rest(model, name):
    """The function from the tokens behind a block to the classifier's outputs."""
    backbone = model.backbone
    blocks = keras.Model(backbone.features[name], backbone.output)
    classifier = keras.Model(model.pooler.input, model.output)
    return lambda tokens: classifier(blocks(tokens))


def ablated_part(model: keras.Model, layer: str) -> Any:
    """The part of a classifier whose experts are ablated."""
    if layer == ALL:
        blocks = [moe_block(model, name) for name in _block_names(model) or [ALL]]
        return RoutedPart([block.feed_forward for block in blocks])
    if layer != "head":
        name = str(layer).removesuffix(MIXER)
        block = moe_block(model, name)
        if name != layer and layer not in model.routing:
            raise ValueError(
                "Expected a block whose token mixer has experts; "
                f"received: layer={layer!r}"
            )
        if name == layer and not hasattr(block.feed_forward, "ablated"):
            return RoutedPart([block.feed_forward])
    return MuMoEPart(model, layer)


def _block_names(model):
    names = getattr(getattr(model, "backbone", None), "routing", {})
    return [name for name in names if "/" not in name]


def scores(
    model: keras.Model,
    part: Any,
    images: Any,
    labels: np.ndarray,
    removals: list[tuple[str, tuple[int, ...]]],
    batch_size: int,
    verbose: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of right predictions (C,), and of those lost by removals (E, C)."""
    if isinstance(part, MuMoEPart):
        experts = np.array([expert for _, (expert,) in removals])
        return _by_pairs(model, part, images, labels, experts, batch_size, verbose)
    return _by_passes(model, part, removals, images, labels, batch_size, verbose)


def _is_right(outputs, labels, threshold):
    """1 where the prediction is right: (B,), or (B, C) with several labels."""
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
    """The sum of (B, ...) over the images of each class, (C,)."""
    if labels.ndim == 2:
        return right.sum(axis=0, dtype="float64")
    return np.bincount(labels, weights=right, minlength=classes)


class _Scorer(keras.Model):
    """Decides whether the prediction without an expert is right."""

    def __init__(self, classifier, part):
        # The global policy may have less precision than the model.
        super().__init__(name="scorer", dtype="float32")
        self.classifier, self.part = classifier, part

    def call(self, inputs):
        tokens, experts, labels = inputs
        outputs = self.part.without(tokens, experts)
        return _is_right(outputs, labels, _threshold(self.classifier))


def _by_pairs(model, part, images, labels, experts, batch_size, verbose):
    """Classifies each image again for each expert that has a part in it."""
    classes, levels = model.output.shape[-1], part.gate.num_experts
    before = keras.Model(
        model.input,
        {"inputs": part.inputs, "shares": part.shares, "outputs": model.output},
    )
    scorer = _Scorer(model, part)
    right, lost = np.zeros(classes), np.zeros((len(experts), classes))
    # All tokens of many images take much memory; features are short.
    step, rows_together = batch_size, batch_size
    if part.is_head:
        # With softmax there are as many pairs as images times experts.
        step, rows_together = max(_PAIRS // len(experts), 1), _ROWS
    bar = keras.utils.Progbar(len(labels), unit_name="image") if verbose else None
    for first in range(0, len(labels), step):
        of_step = labels[first : first + step]
        predicted = before.predict(
            images[first : first + step], batch_size=batch_size, verbose=0
        )
        outputs = _check_finite(predicted["outputs"])
        whole = _is_right(outputs, ops.convert_to_tensor(of_step), _threshold(model))
        whole = ops.convert_to_numpy(whole)
        right += _by_class(whole, of_step, classes)
        # An image does not change without an expert that has no part in it.
        rows, columns = np.nonzero(predicted["shares"][:, experts])
        for start in range(0, len(rows), rows_together):
            row = rows[start : start + rows_together]
            column = columns[start : start + rows_together]
            place = np.stack(np.unravel_index(experts[column], levels), axis=-1)
            # All batches have one shape, so that the scorer is compiled once.
            padded = np.resize(row, rows_together)
            inputs = (
                predicted["inputs"][padded],
                np.resize(place, (rows_together, len(levels))).astype("int32"),
                of_step[padded],
            )
            after = np.asarray(scorer.predict_on_batch(inputs))[: len(row)]
            where = column if labels.ndim == 2 else (column, of_step[row])
            np.add.at(lost, where, whole[row] - after)
        if bar is not None:
            bar.update(min(first + step, len(labels)))
    return right, lost


def _by_passes(model, part, removals, images, labels, batch_size, verbose):
    """Runs over the images without each group of experts in turn."""
    classes = model.output.shape[-1]

    def right(model):
        outputs = model.predict(images, batch_size=batch_size, verbose=0)
        outputs = _check_finite(outputs)
        hits = _is_right(outputs, ops.convert_to_tensor(labels), threshold)
        return _by_class(ops.convert_to_numpy(hits), labels, classes)

    threshold = _threshold(model)
    bar = keras.utils.Progbar(len(removals), unit_name="expert") if verbose else None
    before, lost = right(model), []
    for number, (removal, experts) in enumerate(removals):
        if removal == "output":
            with part.zeroed(experts):
                lost.append(before - right(model))
        else:
            with excluded([layer.router for layer in part.layers], experts):
                # A new model is traced within the context.
                lost.append(before - right(keras.Model(model.input, model.output)))
        if bar is not None:
            bar.update(number + 1)
    return before, np.stack(lost)
