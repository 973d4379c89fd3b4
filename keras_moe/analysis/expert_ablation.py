"""The accuracy that each class loses without each expert.

Axes: B batch, C classes, E experts.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

from keras_moe.analysis.blocks import check_images
from keras_moe.analysis.excluded_experts import numbers_of
from keras_moe.analysis.specialisation import (
    accuracy_changes,
    class_polysemanticity,
    mean_polysemanticity,
)
from keras_moe.analysis.without_experts import (
    REMOVALS,
    MuMoEPart,
    ablated_part,
    scores,
)
from keras_moe.checks import check_one_of


class ExpertAblation(NamedTuple):
    """Accuracies with all experts, and without each.

    Attributes:
        experts: (E,), numbers of the ablated experts, or names such as "zero + copy"
            for types and for several experts together.
        counts: (C,), numbers of images of the classes; with several labels, of all
            images.
        accuracy: (C,), the whole model's accuracy for each class.
        ablated: (E, C), the accuracy for each class without each expert.
    """

    experts: np.ndarray
    counts: np.ndarray
    accuracy: np.ndarray
    ablated: np.ndarray

    @property
    def changes(self) -> np.ndarray:
        """(E, C), the fraction of its accuracy that each class loses."""
        return accuracy_changes(self.accuracy, self.ablated)

    @property
    def polysemanticity(self) -> np.ndarray:
        """(E,), the `class_polysemanticity` of each expert."""
        return class_polysemanticity(self.changes)

    @property
    def mean_polysemanticity(self) -> float | None:
        """The mean over the experts that matter; None if none does."""
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
    removal: str | None = None,
    batch_size: int = 32,
    verbose: Any = "auto",
) -> ExpertAblation:
    """Removes experts, each in turn, and measures the accuracy that each class loses.

    `removal="output"` sets an expert's weights to zero and leaves everything else: it
    asks which classes need the expert's contribution. With `"choice"` no token
    chooses the expert, and its tokens take the best of the others; see
    `exclude_experts`. Zero, copy and constant experts are removed in this way:
    *MoE++*, in Table C, loses accuracy without its zero experts, whose outputs are
    zero in any case.

    For a muMoE, in a head, a block or a token mixer and with any levels, the layers
    before it run once: each image is classified again for each expert that has a part
    in it, many together. Each expert of a routed block takes a pass over the images,
    and with `"choice"` a compilation, too.

    A prediction is right if the label has the largest output, unless all outputs are
    equal: a model without any output would otherwise be right about one class.

    Args:
        model: classifier.
        images: (B, height, width, channels).
        labels: integer classes (B,), or 0-1 labels (B, C) of a multi-label classifier,
            whose accuracy is that of each decision.
        layer: `"head"` for a muMoE head; the name of an MoE block, such as `"block_1"`,
            or of a block's token mixer with experts, such as `"block_1/token_mixer"`;
            or `"all"` for all routed blocks at once.
        experts: sequence of removals: an expert's number, a kind (`"ffn"`, `"zero"`,
            `"copy"` or `"constant"`) with all its experts, or a tuple of these that are
            removed together. None takes each expert with weights of its own: all
            experts, or the FFN experts of MoE++.
        removal: `"output"`, for experts with weights of their own, or `"choice"`, for
            token choice routers. None takes `"output"` for numbers of experts with
            weights, and `"choice"` otherwise.
        batch_size: number of images in a batch.
        verbose: whether to show a progress bar.

    Returns:
        `ExpertAblation`.

    Raises:
        ValueError: if images and labels do not fit each other or the model, outputs
            are not finite, there is no such layer or expert, or an expert cannot be
            removed so.

    Reference:
        *Multilinear Mixture of Experts*, section 4.1.2; *MoE++*, Table C.

    Example:

    >>> import numpy as np
    >>> from keras_moe import analysis, models
    >>> from keras_moe.layers import MuMoE
    >>> model = models.from_preset(
    ...     "vmoe_digits", num_classes=10, head=MuMoE(10, num_experts=4, rank=8)
    ... )
    >>> images = np.zeros((20, 16, 16, 1), "float32")
    >>> labels = np.arange(20) % 10
    >>> analysis.ablate_experts(model, images, labels, verbose=0).changes.shape
    (4, 10)
    """
    images = check_images(images)
    part = ablated_part(model, layer)
    labels = _check_labels(labels, len(images), model)
    if removal is not None:
        check_one_of("removal", removal, REMOVALS)
    names, removals = _removals(experts, removal, part)
    counts = np.full(labels.shape[1:], len(labels))
    if labels.ndim == 1:
        counts = np.bincount(labels, minlength=model.output.shape[-1])
    right, lost = scores(model, part, images, labels, removals, batch_size, verbose)
    shares = np.maximum(counts, 1)
    return ExpertAblation(names, counts, right / shares, (right - lost) / shares)


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


def _removals(experts, removal, part):
    """The removals in turn: their names, and pairs of their kind and their experts."""
    expert_types = part.expert_types
    entries = range(expert_types.ffn) if experts is None else experts
    if isinstance(entries, str) or not hasattr(entries, "__iter__"):
        raise ValueError(
            f"Expected a sequence of experts below {expert_types.total}, of types, or "
            f"of tuples of these; received: experts={experts!r}"
        )
    entries = list(entries)
    numbers = [numbers_of(entry, expert_types) for entry in entries]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"Expected different experts below {expert_types.total}; "
            f"received: experts={experts}"
        )
    removals = [
        (removal or _removal_of(entry, own, expert_types), own)
        for entry, own in zip(entries, numbers)
    ]
    for how, own in removals:
        if how == "output" and max(own) >= expert_types.ffn:
            raise ValueError(
                "Expected removal='choice' for zero, copy and constant experts, which "
                f"have no weights to be zeroed; received: removal={removal!r}, "
                f"experts={experts}"
            )
        if isinstance(part, MuMoEPart) and (how == "choice" or len(own) > 1):
            raise ValueError(
                "Expected single experts and removal='output' of muMoE, in which every "
                f"expert takes part; received: removal={removal!r}, experts={experts}"
            )
    if any(isinstance(entry, (str, list, tuple)) for entry in entries):
        return np.array([_name(entry) for entry in entries]), removals
    return np.array([own for (own,) in numbers]), removals


def _removal_of(entry, numbers, expert_types):
    is_number = not isinstance(entry, (str, list, tuple))
    return "output" if is_number and max(numbers) < expert_types.ffn else "choice"


def _name(entry):
    if isinstance(entry, (list, tuple)):
        return " + ".join(map(_name, entry))
    return str(entry)


def print_ablation(
    ablation: ExpertAblation,
    class_names: list[str] | None = None,
    top: int = 10,
    console: Console | None = None,
) -> None:
    """Prints the experts that matter most, and the classes that need them.

    Args:
        ablation: result of `ablate_experts`.
        class_names: names of the classes; None numbers them.
        top: number of experts to print.
        console: a rich console; None takes the terminal.

    Example:

    >>> import numpy as np
    >>> from rich.console import Console
    >>> from keras_moe.analysis import ExpertAblation, print_ablation
    >>> ones = np.ones(2), np.ones(2), np.ones((1, 2))
    >>> print_ablation(ExpertAblation(np.arange(1), *ones), console=Console(quiet=True))
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
