"""What a model cannot do without each of its experts.

Axes: B batch, C classes, E experts, L levels of hierarchy, P pairs of image and expert.
"""

import contextlib
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from rich.console import Console
from rich.table import Table

from keras_moe.analysis.blocks import moe_block
from keras_moe.analysis.specialisation import (
    accuracy_changes,
    class_polysemanticity,
    mean_polysemanticity,
)
from keras_moe.ops.checks import check_integer

# Of pairs that are computed together.
_ROWS = 4096


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

    Prediction is right if the label's logit is above all others; where ties are broken
    by place, a model that is left with nothing would know one class.

    Args:
        model: a classifier.
        images: (B, height, width, channels).
        labels: integer classes (B,), or 0-1 labels (B, C) of a multi-label classifier,
            of which the accuracy of each decision is taken.
        layer: `"head"` for a muMoE head, or the name of an MoE block, such as
            `"block_1"`.
        experts: which experts; None takes all.
        batch_size: of images.
        verbose: a progress bar: 0 or False has none.

    Returns:
        `ExpertAblation`.

    Raises:
        ValueError: if the labels do not fit, there is no such layer, or an expert has
            no weights of its own (experts of several levels in a block, zero and copy
            experts).

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
    labels = _check_labels(labels, len(images), model.output.shape[-1])
    if layer == "head":
        units = _head(model).gate.kinds.total
    else:
        feed_forward = moe_block(model, layer).feed_forward
        units = feed_forward.router.kinds.total
    experts = _check_experts(experts, units)
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


def _check_labels(labels, count, classes):
    labels = np.asarray(labels)
    one_each = labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer)
    several = labels.ndim == 2 and labels.shape[1] == classes
    if len(labels) != count or not count or not (one_each or several):
        raise ValueError(
            f"Expected integer labels ({count},), or 0-1 labels ({count}, {classes}); "
            f"received: shape={labels.shape}, dtype={labels.dtype}"
        )
    top = classes if one_each else 2
    if labels.min() < 0 or labels.max() >= top:
        raise ValueError(
            f"Expected labels from 0 to {top - 1}; received: from {labels.min()} to "
            f"{labels.max()}"
        )
    return labels.astype("int32")


def _check_experts(experts, count):
    if experts is None:
        return np.arange(count)
    chosen = [check_integer("experts", expert, 0) for expert in experts]
    if not chosen or max(chosen) >= count or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"Expected different experts below {count}; received: experts={chosen}"
        )
    return np.array(chosen)


def _head(model):
    head = getattr(model, "head", None)
    if head is None:
        raise ValueError(
            "Expected a classifier with a muMoE head, or layer='block_...'; received: "
            f"{type(model).__name__} without head"
        )
    return head


def _is_right(outputs, labels, threshold):
    """(B,), or with several labels (B, C): 1 where the prediction is right."""
    if len(labels.shape) == 2:
        decided = ops.cast(outputs > threshold, "int32")
        return ops.cast(decided == labels, "float32")
    own = ops.one_hot(labels, outputs.shape[-1], dtype="bool")
    outputs = ops.cast(outputs, "float32")
    largest = ops.max(ops.where(own, -np.inf, outputs), axis=-1)
    right = ops.max(ops.where(own, outputs, -np.inf), axis=-1) > largest
    return ops.cast(right, "float32")


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
        super().__init__(name="scorer")
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
    outputs = ops.convert_to_tensor(found["outputs"])
    before = _is_right(outputs, ops.convert_to_tensor(labels), _threshold(model))
    before = ops.convert_to_numpy(before)
    # Where an expert has no part, nothing changes.
    rows, columns = np.nonzero(found["gates"][:, experts] > 0)
    levels = model.head.gate.num_experts
    places = np.stack(np.unravel_index(experts[columns], levels), axis=-1)
    lost = np.zeros((len(experts), classes))
    scorer = _Scorer(model)
    bar = None
    if verbose and len(rows):
        bar = keras.utils.Progbar(len(rows), unit_name="pair")
    for start in range(0, len(rows), _ROWS):
        pairs = slice(start, start + _ROWS)
        # Of one shape always, so that it is compiled once.
        row = np.resize(rows[pairs], min(_ROWS, len(rows)))
        place = np.resize(places[pairs], (len(row), len(levels))).astype("int32")
        inputs = (found["features"][row], place, labels[row])
        after = np.asarray(scorer.predict_on_batch(inputs))
        size = len(rows[pairs])
        difference = before[rows[pairs]] - after[:size]
        if labels.ndim == 2:
            np.add.at(lost, columns[pairs], difference)
        else:
            np.add.at(lost, (columns[pairs], labels[rows[pairs]]), difference)
        if bar is not None:
            bar.update(start + size)
    return _by_class(before, labels, classes), lost


def _ablate_block(model, images, labels, slices, batch_size, verbose):
    """The same, with a pass over the images without each expert."""
    classes = model.output.shape[-1]

    def right():
        outputs = model.predict(images, batch_size=batch_size, verbose=0)
        outputs = ops.convert_to_tensor(outputs)
        found = _is_right(outputs, ops.convert_to_tensor(labels), _threshold(model))
        return _by_class(ops.convert_to_numpy(found), labels, classes)

    bar = keras.utils.Progbar(len(slices), unit_name="expert") if verbose else None
    before, lost = right(), []
    for number, parts in enumerate(slices):
        with zeroed(parts):
            lost.append(before - right())
        if bar is not None:
            bar.update(number + 1)
    return before, np.stack(lost)


@contextlib.contextmanager
def zeroed(slices: list[tuple[Any, tuple]]):
    """Parts of variables are zero within the context, and come back after it."""
    kept = [(v, ops.convert_to_numpy(v.value).copy()) for v, _ in slices]
    try:
        for variable, index in slices:
            value = ops.convert_to_numpy(variable.value).copy()
            value[index] = 0
            variable.assign(value)
        yield
    finally:
        for variable, value in kept:
            variable.assign(value)


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
            break
        worst = np.argsort(-changes[row], kind="stable")[:4]
        losses = [f"{names[c]} {changes[row, c]:.0%}" for c in worst if changes[row, c]]
        table.add_row(
            str(ablation.experts[row]), f"{scores[row]:.2f}", ", ".join(losses)
        )
    (console or Console()).print(table)
