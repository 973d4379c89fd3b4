"""What a model cannot do without each of its experts.

Axes: B batch, C classes, E experts, L levels of hierarchy, P pairs of image and expert.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from rich.console import Console
from rich.table import Table

from keras_moe.analysis.blocks import (
    check_images,
    moe_block,
    mumoe_head,
    restored,
)
from keras_moe.analysis.specialisation import (
    accuracy_changes,
    class_polysemanticity,
    mean_polysemanticity,
)
from keras_moe.ops.checks import check_integer

# Pairs that are computed together, and that are listed together.
_ROWS, _PAIRS = 1024, 2**20


class ExpertAblation(NamedTuple):
    """Accuracies with all experts, and without each.

    Attributes:
        experts: (E,). Which experts were ablated.
        counts: (C,). How many images each class has; of several labels, all images.
        accuracy: (C,). Of each class, of the whole model.
        ablated: (E, C). Of each class, without each expert.
    """

    experts: np.ndarray
    counts: np.ndarray
    accuracy: np.ndarray
    ablated: np.ndarray

    @property
    def changes(self) -> np.ndarray:
        """(E, C). The share of its accuracy that each class loses."""
        return accuracy_changes(self.accuracy, self.ablated)

    @property
    def polysemanticity(self) -> np.ndarray:
        """(E,). See `class_polysemanticity`."""
        return class_polysemanticity(self.changes)

    @property
    def mean_polysemanticity(self) -> float | None:
        """Over the experts that matter; None if none does."""
        return mean_polysemanticity(self.changes)

    def to_dict(self) -> dict:
        """A JSON-serialisable dict."""
        lists = {name: np.asarray(x).tolist() for name, x in self._asdict().items()}
        return {**lists, "mean_polysemanticity": self.mean_polysemanticity}


def ablate_experts(
    model: keras.Model,
    images: Any,
    labels: Any,
    layer: str = "head",
    experts: Any = None,
    batch_size: int = 32,
    verbose: Any = "auto",
) -> ExpertAblation:
    """Counterfactually zeroes each expert's weights, all else untouched.

    Had the expert not contributed, which classes would have lost accuracy? Of a muMoE
    head nothing before it is computed again: each image is classified once more for
    each expert that has a part in it, many together. A block's experts take a pass over
    the images each.

    A prediction is right if the label has the largest output, unless all outputs are
    equal: a model that is left with nothing would otherwise know one class.

    Args:
        model: a classifier.
        images: (B, height, width, channels).
        labels: integer classes (B,), or 0-1 labels (B, C) of a multi-label classifier,
            of which the accuracy of each decision is taken.
        layer: `"head"` for a muMoE head, or the name of an MoE block, such as
            `"block_1"`.
        experts: which experts; None takes all, of MoE++ the FFN experts.
        batch_size: of images.
        verbose: a progress bar: 0 or False has none.

    Returns:
        `ExpertAblation`.

    Raises:
        ValueError: if images and labels do not fit each other or the model, outputs
            are not finite, there is no such layer, or an expert has no weights of its
            own (experts of several levels in a block, zero and copy experts).

    Reference:
        *Multilinear Mixture of Experts*, section 4.1.2.

    Example:

    >>> import numpy as np
    >>> from keras_moe import analysis, models
    >>> from keras_moe.layers import MuMoE
    >>> model = models.from_preset(
    ...     "vmoe_digits", num_classes=10, head=MuMoE(10, num_experts=4, rank=8)
    ... )
    >>> images = np.zeros((20, 16, 16, 1), "float32")
    >>> found = analysis.ablate_experts(model, images, np.arange(20) % 10, verbose=0)
    >>> found.changes.shape
    (4, 10)
    """
    images = check_images(images)
    labels = _check_labels(labels, len(images), model)
    if layer == "head":
        count = mumoe_head(model).gate.kinds.total
    else:
        feed_forward = moe_block(model, layer).feed_forward
        count = feed_forward.router.kinds.ffn
    experts = _check_experts(experts, count)
    counts = np.full(labels.shape[1:], len(labels))
    if labels.ndim == 1:
        counts = np.bincount(labels, minlength=model.output.shape[-1])
    if layer == "head":
        right, lost = _ablate_head(model, images, labels, experts, batch_size, verbose)
    else:
        slices = [feed_forward.expert_slices(int(expert)) for expert in experts]
        right, lost = _ablate_block(model, images, labels, slices, batch_size, verbose)
    shares = np.maximum(counts, 1)
    return ExpertAblation(experts, counts, right / shares, (right - lost) / shares)


def _check_labels(labels, count, model):
    labels, classes = np.asarray(labels), model.output.shape[-1]
    shape, top = (count,), classes
    if getattr(model, "multi_label", labels.ndim == 2):
        shape, top = (count, classes), 2
    numbers = labels.dtype == bool or np.issubdtype(labels.dtype, np.number)
    if labels.shape != shape or not numbers:
        raise ValueError(
            f"Expected labels of shape {shape}, 0 or 1 where they are of several "
            f"classes; received: shape={labels.shape}, dtype={labels.dtype}"
        )
    if not np.isin(labels, np.arange(top)).all():
        raise ValueError(
            f"Expected labels that are integers from 0 to {top - 1}; received: from "
            f"{labels.min()} to {labels.max()}, dtype={labels.dtype}"
        )
    return labels.astype("int32")


def _check_experts(experts, count):
    if experts is None:
        return np.arange(count)
    try:
        chosen = [check_integer("experts", expert, 0) for expert in experts]
    except TypeError:
        chosen = []
    if not chosen or max(chosen) >= count or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"Expected different experts below {count}; received: experts={experts}"
        )
    return np.array(chosen)


def _is_right(outputs, labels, threshold):
    """(B,), or with several labels (B, C): 1 where the prediction is right."""
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
    return 0.0 if getattr(model, "activation", None) is None else 0.5


def _by_class(right, labels, classes):
    """(B, ...) summed over the images of each class, (C,)."""
    if labels.ndim == 2:
        return right.sum(axis=0, dtype="float64")
    return np.bincount(labels, weights=right, minlength=classes)


class _Scorer(keras.Model):
    """Says of features and labels whether the prediction without an expert is right."""

    def __init__(self, classifier):
        # A policy of its own: the global one may have less precision than the model.
        super().__init__(name="scorer", dtype="float32")
        self.classifier = classifier

    def call(self, inputs):
        features, experts, labels = inputs
        head = self.classifier.head
        coefficients, _ = head.gate(features)
        outputs = head.ablated(features, coefficients, experts)
        return _is_right(
            self.classifier.classify(outputs), labels, _threshold(self.classifier)
        )


def _ablate_head(model, images, labels, experts, batch_size, verbose):
    """How many predictions are right, (C,), and how many fewer without, (E, C)."""
    parts = {
        "features": model.features,
        "gates": model.routing["head"].gates[:, 0],
        "outputs": model.output,
    }
    found = keras.Model(model.input, parts).predict(
        images, batch_size=batch_size, verbose=verbose
    )
    classes = model.output.shape[-1]
    outputs = _check_finite(found["outputs"])
    before = _is_right(outputs, ops.convert_to_tensor(labels), _threshold(model))
    before = ops.convert_to_numpy(before)
    levels = model.head.gate.num_experts
    lost, scorer = np.zeros((len(experts), classes)), _Scorer(model)
    bar = keras.utils.Progbar(len(labels), unit_name="image") if verbose else None
    # Pairs of some images at a time: with softmax there are B x E.
    step = max(_PAIRS // len(experts), 1)
    for first in range(0, len(labels), step):
        # Where an expert has no part, nothing changes.
        part = found["gates"][first : first + step][:, experts]
        rows, columns = np.nonzero(part)
        rows += first
        for start in range(0, len(rows), _ROWS):
            row, column = rows[start : start + _ROWS], columns[start : start + _ROWS]
            place = np.stack(np.unravel_index(experts[column], levels), axis=-1)
            # Of one shape always, so that it is compiled once.
            whole = np.resize(row, _ROWS)
            inputs = (
                found["features"][whole],
                np.resize(place, (_ROWS, len(levels))).astype("int32"),
                labels[whole],
            )
            after = np.asarray(scorer.predict_on_batch(inputs))[: len(row)]
            where = column if labels.ndim == 2 else (column, labels[row])
            np.add.at(lost, where, before[row] - after)
        if bar is not None:
            bar.update(min(first + step, len(labels)))
    return _by_class(before, labels, classes), lost


def _ablate_block(model, images, labels, slices, batch_size, verbose):
    """The same, with a pass over the images without each expert."""
    classes = model.output.shape[-1]

    def right():
        outputs = model.predict(images, batch_size=batch_size, verbose=0)
        outputs = _check_finite(outputs)
        found = _is_right(outputs, ops.convert_to_tensor(labels), _threshold(model))
        return _by_class(ops.convert_to_numpy(found), labels, classes)

    bar = keras.utils.Progbar(len(slices), unit_name="expert") if verbose else None
    before, lost = right(), []
    for number, parts in enumerate(slices):
        with restored([variable for variable, _ in parts]):
            for variable, index in parts:
                value = np.array(ops.convert_to_numpy(variable.value))
                value[index] = 0
                variable.assign(value)
            lost.append(before - right())
        if bar is not None:
            bar.update(number + 1)
    return before, np.stack(lost)


def print_ablation(
    ablation: ExpertAblation,
    class_names: list[str] | None = None,
    top: int = 10,
    console: Console | None = None,
) -> None:
    """Prints the experts that matter most, and the classes that need them.

    Args:
        ablation: what `ablate_experts` returns.
        class_names: of the classes; None numbers them.
        top: how many experts.
        console: a rich console; None takes the terminal.

    Example:

    >>> import numpy as np
    >>> from rich.console import Console
    >>> from keras_moe.analysis import ExpertAblation, print_ablation
    >>> found = ExpertAblation(np.arange(1), np.ones(2), np.ones(2), np.ones((1, 2)))
    >>> print_ablation(found, console=Console(quiet=True))
    """
    changes, scores = ablation.changes, ablation.polysemanticity
    names = class_names or [str(c) for c in range(changes.shape[1])]
    mean = ablation.mean_polysemanticity
    table = Table(
        title="Accuracy lost without an expert; mean polysemanticity "
        + ("-" if mean is None else f"{mean:.2f}")
    )
    table.add_column("expert", justify="right")
    table.add_column("polysemanticity", justify="right")
    table.add_column("classes that lose most")
    for row in np.argsort(-changes.max(axis=1), kind="stable")[:top]:
        if not changes[row].any():
            continue
        worst = np.argsort(-changes[row], kind="stable")[:4]
        losses = [f"{names[c]} {changes[row, c]:.0%}" for c in worst if changes[row, c]]
        table.add_row(
            str(ablation.experts[row]), f"{scores[row]:.2f}", ", ".join(losses)
        )
    (console or Console()).print(table)
