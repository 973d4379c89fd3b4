"""The examples of data of any kind, checked, as its batches come.

Axes: B batch, N tokens.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe.analysis.report.inputs import (
    array_of,
    captions_of,
    check_inputs,
    labels_of,
)
from keras_moe.analysis.report.section import Subject

CAPTIONS = "captions"


class Examples(NamedTuple):
    """Some examples as the data has them.

    Attributes:
        inputs: the model's inputs, arrays by name or one of images.
        captions: texts, None for those without one; or None.
        labels: integers (B,), -1 without one; or None.
    """

    inputs: Any
    captions: list[str | None] | None
    labels: np.ndarray | None

    def part(self, start: int, stop: int) -> "Examples":
        """The examples of a range."""
        rows = slice(start, stop)
        return Examples(
            keras.tree.map_structure(lambda x: x[rows], self.inputs),
            None if self.captions is None else self.captions[rows],
            None if self.labels is None else self.labels[rows],
        )

    @property
    def size(self) -> int:
        """B."""
        return len(keras.tree.flatten(self.inputs)[0])


def all_examples(data: Any, subject: Subject, at_once: int) -> Iterator[Examples]:
    """The examples of data of any kind, as its batches come."""
    if not _is_examples(data):
        for batch in _iterable(data):
            yield _examples(batch, subject)
        return
    size = _checked_length(data)
    for start in range(0, max(size, 1), at_once):
        yield _examples(_rows(data, slice(start, start + at_once)), subject)


def array_length(data: Any) -> int | None:
    """The number of examples of arrays; None for batches, which may have any."""
    return _checked_length(data) if _is_examples(data) else None


def joined(first: Examples, second: Examples) -> Examples:
    """The examples of two batches, of which one may lack labels or captions."""
    captions = labels = None
    if first.captions is not None or second.captions is not None:
        captions = [x for y in (first, second) for x in y.captions or [None] * y.size]
    if first.labels is not None or second.labels is not None:
        labels = np.concatenate(
            [
                np.full(x.size, -1, "int64") if x.labels is None else x.labels
                for x in (first, second)
            ]
        )
    inputs = keras.tree.map_structure(
        lambda a, b: np.concatenate([a, b]), first.inputs, second.inputs
    )
    return Examples(inputs, captions, labels)


def _is_examples(data):
    """Whether data are arrays, and no iterable of batches."""
    if isinstance(data, dict) or hasattr(data, "shape"):
        return True
    # A pair of arrays is one of images and labels, or captions; a list is of batches.
    return isinstance(data, tuple) and len(data) > 1 and _is_examples(data[0])


def _parts(data):
    """The arrays and lists of data, each with a row for each example."""
    for part in data if isinstance(data, tuple) else (data,):
        yield from part.values() if isinstance(part, dict) else (part,)


def _checked_length(data):
    """The number of examples of arrays, which all have."""
    sizes = set()
    for part in _parts(data):
        if part is None:
            continue
        try:
            sizes.add(len(part))
        except TypeError as error:
            raise ValueError(
                "Expected arrays with a row for each example; received: "
                f"{type(part).__name__}"
            ) from error
    _check_sizes(sizes)
    return min(sizes, default=0)


def _check_sizes(sizes):
    if len(sizes) > 1:
        raise ValueError(
            "Expected as many labels and captions as inputs; received: lengths "
            f"{sorted(sizes)}"
        )


def _rows(data, rows):
    """The same rows of all arrays."""
    if isinstance(data, tuple):
        return tuple(_rows(part, rows) for part in data)
    if isinstance(data, dict):
        return {name: _rows(part, rows) for name, part in data.items()}
    return None if data is None else data[rows]


def _iterable(data) -> Iterable:
    if isinstance(data, keras.utils.PyDataset):
        return (data[index] for index in range(data.num_batches or len(data)))
    if not hasattr(data, "__iter__"):
        raise ValueError(
            "Expected arrays, or an iterable of batches of them; received: "
            f"{type(data).__name__}"
        )
    return data


def _examples(batch, subject):
    """The examples of one batch: inputs, `(inputs, labels)`, or with weights."""
    inputs, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
    second = others[0] if others else None
    captions = None
    if "text" in subject.modalities:
        inputs, captions, second = _of_texts(inputs, second, subject)
    elif isinstance(inputs, dict) and "images" in inputs:
        inputs = inputs["images"]
    inputs = keras.tree.map_structure(array_of, inputs)
    check_inputs(inputs, subject.model)
    examples = Examples(inputs, captions, labels_of(second))
    sizes = {len(x) for x in keras.tree.flatten(inputs)}
    _check_sizes(sizes | {len(x) for x in examples[1:] if x is not None})
    if len(others) > 1 and others[1] is not None:
        # Padding of a last batch has no weight.
        kept = np.asarray(others[1]).reshape(len(others[1]), -1).any(axis=1)
        examples = _chosen(examples, np.flatnonzero(kept))
    return examples


def _of_texts(inputs, second, subject):
    """The inputs of a model of texts, with captions, and labels."""
    captions = None
    if not isinstance(inputs, dict):
        inputs, captions, second = {"images": inputs}, second, None
    inputs = dict(inputs)
    captions = inputs.pop(CAPTIONS, captions)
    if captions is not None:
        captions = captions_of(captions)
        tokenizer = getattr(subject.model, "preprocessor", None)
        if "token_ids" not in inputs:
            if not callable(tokenizer):
                raise ValueError(
                    "Expected token_ids and padding_mask, or a model with a "
                    "TextTokenizer for captions; received: captions, "
                    f"preprocessor={tokenizer!r}"
                )
            inputs |= tokenizer(captions)
    names = list(subject.model.input)
    if missing := [name for name in names if name not in inputs]:
        raise ValueError(
            f"Expected inputs {names}, or images and captions; received: "
            f"{sorted(inputs)} without {missing}"
        )
    return {name: inputs[name] for name in names}, captions, second


def _chosen(examples, rows):
    return Examples(
        keras.tree.map_structure(lambda x: x[rows], examples.inputs),
        None if examples.captions is None else [examples.captions[i] for i in rows],
        None if examples.labels is None else examples.labels[rows],
    )
