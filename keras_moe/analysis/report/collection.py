"""One pass over data: its batches, and the routing that a model gives them.

Axes: B batch, N tokens, E experts.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe.analysis.report.section import Batch, Subject
from keras_moe.checks import check_integer
from keras_moe.processes import predict_batch

CAPTIONS = "captions"


class Examples(NamedTuple):
    """Some examples as the data has them.

    Attributes:
        inputs: the model's inputs, arrays by name or one of images.
        captions: texts, or None.
        labels: integers (B,), or None.
    """

    inputs: Any
    captions: list[str] | None
    labels: np.ndarray | None

    def part(self, start: int, stop: int) -> "Examples":
        """The examples of a range.

        Args:
            start: number of the first one.
            stop: number behind the last one.
        """
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


class Collection:
    """The routing of a model for the batches of data, one after the other.

    Args:
        subject: model.
        batch_size: number of examples that are routed at once. Batches of the data are
            divided or put together, so that one function is compiled.
        max_examples: number of examples after which it ends, or None.
        progress: function that is called with the number of examples so far; None for
            none.
    """

    def __init__(
        self,
        subject: Subject,
        batch_size: int = 32,
        max_examples: int | None = None,
        progress: Callable[[int], None] | None = None,
    ):
        self.subject = subject
        self.batch_size = check_integer("batch_size", batch_size)
        if max_examples is not None:
            max_examples = check_integer("max_examples", max_examples)
        self.max_examples, self.progress = max_examples, progress
        self.num_examples = 0
        model = subject.model
        self._has_logits = hasattr(model, "num_classes")
        self._records = _Records(keras.Model(model.input, _symbols(model)))

    def batches(self, data: Any) -> Iterator[Batch]:
        """The batches of the data with their routing.

        Args:
            data: argument of `keras_moe.analysis.report`.

        Raises:
            ValueError: if the data does not fit the model, or has no example.
        """
        for examples in self._sized(data):
            yield self._routed(examples)
            self.num_examples += examples.size
            if self.progress is not None:
                self.progress(self.num_examples)
        if not self.num_examples:
            raise ValueError("Expected at least one example; received: none")

    def _sized(self, data):
        """The examples in batches of the batch size; the last one may be smaller."""
        left = self.max_examples
        waiting = None
        for examples in all_examples(data, self.subject):
            if not examples.size:
                continue
            waiting = examples if waiting is None else _joined(waiting, examples)
            while waiting.size >= self.batch_size:
                if left is not None and left <= self.batch_size:
                    break
                yield waiting.part(0, self.batch_size)
                waiting = waiting.part(self.batch_size, waiting.size)
                left = None if left is None else left - self.batch_size
            if left is not None and waiting.size >= left:
                break
        if waiting is not None and waiting.size:
            yield waiting if left is None else waiting.part(0, left)

    def _routed(self, examples):
        subject, inputs = self.subject, examples.inputs
        records = predict_batch(self._records, inputs)
        record_class = type(next(iter(subject.model.routing.values())))
        images, ids = inputs, None
        if isinstance(inputs, dict):
            images, ids = inputs.get("images"), inputs.get("token_ids")
        masks = {}
        for modality in subject.modalities:
            masks[modality] = self._mask(modality, inputs, records["routing"])
        words = None if ids is None else words_of(subject.model, ids, masks["text"])
        captions = examples.captions
        if captions is None and words is not None:
            captions = _joined_words(subject.model, np.asarray(ids), words)
        return Batch(
            start=self.num_examples,
            images=None if images is None else np.asarray(images, "float32"),
            captions=captions,
            words=words,
            masks=masks,
            labels=examples.labels,
            routing={
                key: record_class(**{k: np.asarray(x) for k, x in record.items()})
                for key, record in records["routing"].items()
            },
            outputs=np.asarray(records["outputs"]) if self._has_logits else None,
            shared={},
        )

    def _mask(self, modality, inputs, records):
        if modality == "text":
            return np.asarray(inputs["padding_mask"], bool)
        for key, block in self.subject.blocks.items():
            if block.modality == modality and block.is_of_tokens:
                return np.ones(records[key]["dispatched"].shape[:2], bool)
        grid = self.subject.grid or (1, 1)
        size = len(keras.tree.flatten(inputs)[0])
        return np.ones((size, grid[0] * grid[1]), bool)


def _symbols(model):
    """The symbolic records of routing, and the logits of a classifier."""
    routing = {key: record._asdict() for key, record in model.routing.items()}
    symbols = {"routing": routing}
    if hasattr(model, "num_classes"):
        symbols["outputs"] = model.output
    pooler = getattr(model, "pooler", None)
    if pooler is None or "outputs" not in symbols:
        return symbols
    # A classifier calls its backbone as a layer, and the records are in the backbone's
    # own graph: both together would compute the backbone twice.
    behind = {"outputs": model.output}
    if "head" in routing:
        behind["head"] = routing["head"]
    behind = keras.Model(pooler.input, behind)(model.backbone.output)
    symbols["outputs"] = behind.pop("outputs")
    return {**symbols, "routing": {**routing, **behind}}


class _Records(keras.Model):
    """The records of a model at inference."""

    def __init__(self, records):
        # The global policy is not the model's.
        super().__init__(name="report_records", dtype="float32")
        self.records = records

    def call(self, inputs):
        return self.records(inputs, training=False)


def words_of(model: Any, token_ids: Any, mask: Any) -> list[list[str]]:
    """The strings of tokens, `""` for padding.

    Args:
        model: model whose `preprocessor` is a tokenizer with `tokens`; without one,
            ids stand for the strings.
        token_ids: integers (B, N).
        mask: boolean (B, N), False for padding.
    """
    tokenizer = getattr(model, "preprocessor", None)
    if hasattr(tokenizer, "tokens"):
        rows = tokenizer.tokens(token_ids)
    else:
        rows = [[f"#{id}" for id in row] for row in np.asarray(token_ids).tolist()]
    return [
        [word if counts else "" for word, counts in zip(row, kept)]
        for row, kept in zip(rows, np.asarray(mask, bool).tolist())
    ]


def _joined_words(model, token_ids, words):
    """Captions of words, without those that stand for their start and end."""
    tokenizer = getattr(model, "preprocessor", None)
    special = [getattr(tokenizer, name, None) for name in ("start_id", "end_id")]
    return [
        " ".join(word for id, word in zip(ids, row) if word and id not in special)
        for ids, row in zip(token_ids.tolist(), words)
    ]


def all_examples(data: Any, subject: Subject) -> Iterator[Examples]:
    """The examples of data of any kind, as its batches come.

    Args:
        data: argument of `keras_moe.analysis.report`.
        subject: model.

    Raises:
        ValueError: if the data does not fit the model.
    """
    if _is_examples(data):
        yield _examples(data, subject)
        return
    for batch in _iterable(data):
        yield _examples(batch, subject)


def _is_examples(data):
    """Whether data are arrays, and no iterable of batches."""
    if isinstance(data, dict) or hasattr(data, "shape"):
        return True
    # A pair of arrays is one of images and labels, or captions; a list is of batches.
    return isinstance(data, tuple) and len(data) > 1 and _is_examples(data[0])


def array_length(data: Any) -> int | None:
    """The number of examples of arrays; None for batches, which may have any.

    Args:
        data: argument of `keras_moe.analysis.report`.
    """
    if not _is_examples(data):
        return None
    inputs = data[0] if isinstance(data, tuple) else data
    return len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs)


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
    inputs = keras.tree.map_structure(_array, inputs)
    _check_shapes(inputs, subject.model.input)
    examples = Examples(inputs, captions, _integers(second))
    sizes = {len(x) for x in keras.tree.flatten(inputs)}
    sizes |= {len(x) for x in examples[1:] if x is not None}
    if len(sizes) > 1:
        raise ValueError(
            "Expected as many labels and captions as inputs; received: lengths "
            f"{sorted(sizes)}"
        )
    if len(others) > 1 and others[1] is not None:
        # Padding of a last batch has no weight.
        kept = np.asarray(others[1]).reshape(len(others[1]), -1).any(axis=1)
        examples = _chosen(examples, np.flatnonzero(kept))
    return examples


def _check_shapes(inputs, expected):
    """Raises ValueError for inputs of other shapes than the model's.

    On JAX a failed prediction would leave the model without its weights.
    """
    if not isinstance(inputs, dict):
        inputs = {"images": inputs}
    if not isinstance(expected, dict):
        expected = {"images": expected}
    for name, symbol in expected.items():
        shape = tuple(inputs[name].shape)
        fits = len(shape) == len(symbol.shape) and all(
            size in (None, actual) for size, actual in zip(symbol.shape, shape)
        )
        if not fits:
            wanted = ", ".join(str(x or "any") for x in symbol.shape[1:])
            raise ValueError(
                f"Expected {name} of shape (batch, {wanted}); received: shape={shape}"
            )


def _of_texts(inputs, second, subject):
    """The inputs of a model of texts, with captions, and labels."""
    captions = None
    if not isinstance(inputs, dict):
        inputs, captions, second = {"images": inputs}, second, None
    inputs = dict(inputs)
    captions = inputs.pop(CAPTIONS, captions)
    if captions is not None:
        # Strings of TensorFlow become bytes.
        captions = captions.numpy() if hasattr(captions, "numpy") else captions
        captions = [_string(caption) for caption in captions]
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


def _array(x):
    return np.asarray(keras.ops.convert_to_numpy(x) if keras.ops.is_tensor(x) else x)


def _string(caption):
    if isinstance(caption, bytes):
        return caption.decode("utf-8", "replace")
    return str(caption)


def _integers(labels):
    """Labels (B,) as integers, those of one-hot vectors too; None for others."""
    if labels is None or isinstance(labels, dict):
        return None
    labels = _array(labels)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 1 and labels.dtype.kind in "iub":
        return labels.astype("int64")
    if labels.ndim == 2 and ((labels == 1).sum(axis=1) == 1).all():
        return labels.argmax(axis=1)
    return None


def _chosen(examples, rows):
    return Examples(
        keras.tree.map_structure(lambda x: x[rows], examples.inputs),
        None if examples.captions is None else [examples.captions[i] for i in rows],
        None if examples.labels is None else examples.labels[rows],
    )


def _joined(first, second):
    captions = labels = None
    if first.captions is not None and second.captions is not None:
        captions = first.captions + second.captions
    if first.labels is not None and second.labels is not None:
        labels = np.concatenate([first.labels, second.labels])
    inputs = keras.tree.map_structure(
        lambda a, b: np.concatenate([a, b]), first.inputs, second.inputs
    )
    return Examples(inputs, captions, labels)
