"""Reads data of any kind in one pass, with the model's routing of it.

Axes: B batch, N tokens, E experts.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe.checks import check_integer
from keras_moe.processes import predict_batch
from keras_moe.report.model import TEXT, ReportedModel, plain_text
from keras_moe.report.section import Batch

CAPTIONS = "captions"
# Examples of arrays that are prepared at a time.
_AT_ONCE = 256
# Prepared images are in [-1, 1], or standardised and a few times as large; images in
# 0..255 are far beyond this.
_FAR = 32.0
# Larger floats cannot represent all integers.
_WHOLE = 2.0**53


class Examples(NamedTuple):
    """Some examples of the data."""

    # The model's inputs: a dict of arrays, or an array of images.
    inputs: Any
    # Object array (B,) of texts, None where missing; or None.
    captions: np.ndarray | None
    # Integers (B,), -1 where missing; or None.
    labels: np.ndarray | None

    def rows(self, index: Any) -> "Examples":
        """Selects examples by a slice or indices."""
        return Examples(
            *(
                None if x is None else keras.tree.map_structure(lambda y: y[index], x)
                for x in self
            )
        )

    def joined(self, other: "Examples") -> "Examples":
        """Concatenates two batches, either of which may lack labels or captions."""
        inputs = keras.tree.map_structure(
            lambda a, b: np.concatenate([a, b]), self.inputs, other.inputs
        )
        parts = [inputs]
        for field, missing in (("captions", None), ("labels", -1)):
            arrays = [getattr(self, field), getattr(other, field)]
            known = next((x for x in arrays if x is not None), None)
            if known is not None:
                arrays = [
                    np.full(part.size, missing, known.dtype) if x is None else x
                    for x, part in zip(arrays, (self, other))
                ]
                known = np.concatenate(arrays)
            parts.append(known)
        return Examples(*parts)

    @property
    def size(self) -> int:
        """B."""
        return len(keras.tree.flatten(self.inputs)[0])


def array_length(data: Any) -> int | None:
    """Number of examples of arrays; None for batches."""
    return _checked_length(data) if _is_arrays(data) else None


def all_examples(data: Any, model: ReportedModel, at_once: int) -> Iterator[Examples]:
    """Yields the examples of data of any kind, in batches of any size."""
    if not _is_arrays(data):
        for batch in _iterable(data):
            yield _examples(batch, model)
        return
    for start in range(0, max(_checked_length(data), 1), at_once):
        rows = slice(start, start + at_once)
        yield _examples(_sliced(data, rows), model)


def _is_arrays(data):
    """Whether data are arrays rather than an iterable of batches."""
    if isinstance(data, dict) or hasattr(data, "shape"):
        return True
    # A tuple is (images, labels) or (images, captions); a list has batches.
    return isinstance(data, tuple) and len(data) > 1 and _is_arrays(data[0])


def _checked_length(data):
    """Number of examples of arrays, after checking that all agree."""
    sizes = set()
    for part in data if isinstance(data, tuple) else (data,):
        for array in part.values() if isinstance(part, dict) else (part,):
            if array is None:
                continue
            try:
                sizes.add(len(array))
            except TypeError as error:
                raise ValueError(
                    "Expected arrays with a row for each example; received: "
                    f"{type(array).__name__}"
                ) from error
    _check_sizes(sizes)
    return min(sizes, default=0)


def _check_sizes(sizes):
    if len(sizes) > 1:
        raise ValueError(
            "Expected as many labels and captions as inputs; received: lengths "
            f"{sorted(sizes)}"
        )


def _sliced(data, rows):
    """Slices all arrays alike."""
    if isinstance(data, tuple):
        return tuple(_sliced(part, rows) for part in data)
    if isinstance(data, dict):
        return {name: _sliced(part, rows) for name, part in data.items()}
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


def _examples(batch, model):
    """The examples of a batch of inputs, `(inputs, labels)` or with weights."""
    inputs, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
    second = others[0] if others else None
    captions = None
    if TEXT in model.modalities:
        inputs, captions, second = _with_texts(inputs, second, model.keras_model)
    elif isinstance(inputs, dict) and "images" in inputs:
        inputs = inputs["images"]
    inputs = keras.tree.map_structure(array_of, inputs)
    check_inputs(inputs, model.keras_model)
    examples = Examples(inputs, captions, labels_of(second))
    sizes = {len(x) for x in keras.tree.flatten(inputs)}
    _check_sizes(sizes | {len(x) for x in examples[1:] if x is not None})
    if len(others) > 1 and others[1] is not None:
        # Padding of the last batch has weight 0.
        weights = np.asarray(others[1]).reshape(len(others[1]), -1)
        examples = examples.rows(np.flatnonzero(weights.any(axis=1)))
    return examples


def _with_texts(inputs, second, model):
    """Inputs, captions and labels for a model with texts."""
    captions = None
    if not isinstance(inputs, dict):
        inputs, captions, second = {"images": inputs}, second, None
    inputs = dict(inputs)
    captions = inputs.pop(CAPTIONS, captions)
    if captions is not None:
        captions = captions_of(captions)
        tokenizer = getattr(model, "preprocessor", None)
        if "token_ids" not in inputs:
            if not callable(tokenizer):
                raise ValueError(
                    "Expected token_ids and padding_mask, or a model with a "
                    "TextTokenizer for captions; received: captions, "
                    f"preprocessor={tokenizer!r}"
                )
            inputs |= tokenizer(captions)
        captions = np.array([*captions, None], object)[:-1]
    names = list(model.input)
    if missing := [name for name in names if name not in inputs]:
        raise ValueError(
            f"Expected inputs {names}, or images and captions; received: "
            f"{sorted(inputs)} without {missing}"
        )
    return {name: inputs[name] for name in names}, captions, second


def array_of(x: Any) -> np.ndarray:
    """Converts an array or tensor of any backend to NumPy."""
    return np.asarray(keras.ops.convert_to_numpy(x) if keras.ops.is_tensor(x) else x)


def captions_of(captions: Any) -> list[str]:
    """Converts captions to strings."""
    # TensorFlow's strings are bytes.
    captions = captions.numpy() if hasattr(captions, "numpy") else captions
    if isinstance(captions, (str, bytes)) or not hasattr(captions, "__iter__"):
        raise ValueError(
            f"Expected captions as a list of texts; received: {captions!r:.80}, "
            f"{type(captions).__name__}"
        )
    return [plain_text(caption) for caption in captions]


def labels_of(labels: Any) -> np.ndarray | None:
    """The class of each example as an integer."""
    if labels is None or isinstance(labels, dict):
        return None
    labels = array_of(labels)
    kind = labels.dtype.kind
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 1 and kind in "iub":
        return labels.astype("int64")
    if labels.ndim == 1 and kind == "f":
        # False for NaN, which differs from itself, and for infinity.
        if ((labels == np.round(labels)) & (np.abs(labels) < _WHOLE)).all():
            return labels.astype("int64")
    elif labels.ndim == 2 and kind in "iubf":
        if ((labels == 0) | (labels == 1)).all():
            is_single = (labels == 1).sum(axis=1) == 1
            return np.where(is_single, labels.argmax(axis=1), -1)
        if kind == "i" and labels.min() >= -1:
            is_single = (labels >= 0).sum(axis=1) == 1
            return np.where(is_single, labels.max(axis=1), -1)
    raise ValueError(
        "Expected labels as whole numbers (batch,), or as 0-1 vectors (batch, "
        "classes), none of them soft; received: "
        f"shape={labels.shape}, dtype={labels.dtype}"
    )


def check_inputs(inputs: Any, model: Any) -> None:
    """Checks names, shapes and ranges of inputs before they reach the model.

    On JAX, a failed prediction would leave the model without weights.
    """
    expected = model.input
    if not isinstance(expected, dict):
        expected = {"images": expected}
    if not isinstance(inputs, dict):
        inputs = {"images": inputs}
    for name, symbol in expected.items():
        if name not in inputs:
            raise ValueError(
                f"Expected {' and '.join(expected)}, an array or in a dict; received: "
                f"a dict of {sorted(map(str, inputs))}"
            )
        shape = tuple(inputs[name].shape)
        fits = len(shape) == len(symbol.shape) and all(
            size in (None, actual) for size, actual in zip(symbol.shape, shape)
        )
        if not fits:
            wanted = ", ".join(str(x or "any") for x in symbol.shape[1:])
            raise ValueError(
                f"Expected {name} of shape (batch, {wanted}); received: shape={shape}"
            )
    if "images" in expected:
        _check_range(inputs["images"], getattr(model, "preprocessor", None))


def _check_range(images, preprocessor):
    """Raises ValueError for images that were not prepared for the model."""
    if not images.size:
        return
    is_float = images.dtype.kind not in "iub"
    with np.errstate(invalid="ignore"):
        low, high = images.min(), images.max()
        if not np.isfinite([low, high]).all():
            images = images[np.isfinite(images)]
            low, high = images.min(initial=0.0), images.max(initial=0.0)
    if is_float and max(-low, high) <= _FAR * _largest(preprocessor):
        return
    raise ValueError(
        "Expected floating-point images that are prepared for the model, in [-1, 1] as "
        "keras_moe.data.load, images / 127.5 - 1 or the model's ImagePreprocessor "
        f"gives them; received: dtype={images.dtype}, from {low} to {high}"
    )


def _largest(preprocessor):
    """Largest value of prepared images; 1 without a preprocessor."""
    mean, std = (getattr(preprocessor, name, None) for name in ("mean", "std"))
    if mean is None or std is None:
        return 1.0
    mean = np.asarray(mean, "float64")
    return max(float((np.maximum(mean, 1.0 - mean) / np.asarray(std)).max()), 1.0)


class RoutedData:
    """The batches of data, each with the model's routing."""

    def __init__(
        self,
        model: ReportedModel,
        batch_size: int = 32,
        max_examples: int | None = None,
        on_progress: Callable[[int], None] | None = None,
    ):
        self.model = model
        self.batch_size = check_integer("batch_size", batch_size)
        if max_examples is not None:
            max_examples = check_integer("max_examples", max_examples)
        self.max_examples, self.on_progress = max_examples, on_progress
        self.num_examples = 0
        keras_model = model.keras_model
        self._records = _Records(keras.Model(keras_model.input, _symbols(keras_model)))

    def batches(self, data: Any) -> Iterator[Batch]:
        """Yields the batches of the data with their routing."""
        for examples in self._sized(data):
            yield self._routed(examples)
            self.num_examples += examples.size
            if self.on_progress is not None:
                self.on_progress(self.num_examples)
        if not self.num_examples:
            raise ValueError("Expected at least one example; received: none")

    def _sized(self, data):
        """Rebatches examples to the batch size; the last batch may be smaller."""
        left, waiting = self.max_examples, None
        # A multiple of the batch size, and not too few examples.
        at_once = self.batch_size * max(_AT_ONCE // self.batch_size, 1)
        for examples in all_examples(data, self.model, at_once):
            if not examples.size:
                continue
            waiting = examples if waiting is None else waiting.joined(examples)
            while waiting.size >= self.batch_size:
                if left is not None and left <= self.batch_size:
                    break
                yield waiting.rows(slice(self.batch_size))
                waiting = waiting.rows(slice(self.batch_size, None))
                left = None if left is None else left - self.batch_size
            if left is not None and waiting.size >= left:
                break
        if waiting is not None and waiting.size:
            yield waiting.rows(slice(left))

    def _routed(self, examples):
        model, inputs = self.model.keras_model, examples.inputs
        records = predict_batch(self._records, inputs)
        record_class = type(next(iter(model.routing.values())))
        images, ids = inputs, None
        if isinstance(inputs, dict):
            images, ids = inputs.get("images"), inputs.get("token_ids")
        routing, finite = {}, {}
        for key, record in records["routing"].items():
            record, is_finite = _without_broken(record)
            routing[key] = record_class(**record)
            if not is_finite.all():
                finite[key] = is_finite
        masks = {x: self._mask(x, inputs, routing) for x in self.model.modalities}
        words, captions = None, examples.captions
        if ids is not None:
            words = words_of(model, ids, masks[TEXT])
            if captions is None:
                captions = np.full(len(words), None)
            texts = _joined_words(model, np.asarray(ids), words)
            captions = [y if x is None else x for x, y in zip(captions, texts)]
        outputs = records.get("outputs")
        return Batch(
            start=self.num_examples,
            images=None if images is None else _finite_pixels(images),
            captions=None if captions is None else list(captions),
            words=words,
            masks=masks,
            labels=examples.labels,
            routing=routing,
            outputs=None if outputs is None else np.asarray(outputs),
            finite=finite,
            shared={},
        )

    def _mask(self, modality, inputs, routing):
        if modality == TEXT:
            return np.asarray(inputs["padding_mask"], bool)
        for block in self.model.blocks.values():
            if block.modality == modality and block.is_of_tokens:
                return np.ones(routing[block.key].dispatched.shape[:2], bool)
        rows, columns = self.model.grid or (1, 1)
        size = len(keras.tree.flatten(inputs)[0])
        return np.ones((size, rows * columns), bool)


def _symbols(model):
    """Symbolic routing records, and the logits of a classifier."""
    routing = {key: record._asdict() for key, record in model.routing.items()}
    symbols = {"routing": routing}
    if hasattr(model, "num_classes"):
        symbols["outputs"] = model.output
    pooler = getattr(model, "pooler", None)
    if pooler is None or "outputs" not in symbols:
        return symbols
    # A classifier calls its backbone as a layer, and records are in the backbone's
    # graph: one model of both would compute the backbone twice.
    after = {"outputs": model.output}
    if "head" in routing:
        after["head"] = routing["head"]
    after = keras.Model(pooler.input, after)(model.backbone.output)
    symbols["outputs"] = after.pop("outputs")
    return {**symbols, "routing": {**routing, **after}}


def _without_broken(record):
    """Zeroes non-finite tokens; also returns a mask (B, N) of the others."""
    record = {name: np.asarray(x) for name, x in record.items()}
    # Logits may be minus infinity for removed experts, and affinities of them, too.
    is_finite = ~np.isnan(record["affinity"]).any(axis=-1)
    for name in ("gates", "dispatched", "combined"):
        is_finite &= np.isfinite(record[name]).all(axis=-1)
    if not is_finite.all():
        for name, x in record.items():
            record[name] = np.array(x)
            record[name][~is_finite] = 0.0
    return record, is_finite


def _finite_pixels(images):
    """Replaces non-finite pixels, so that images can be drawn."""
    images = np.asarray(images, "float32")
    return np.nan_to_num(images, nan=0.0, posinf=1.0, neginf=-1.0)


class _Records(keras.Model):
    """Computes a model's routing records at inference."""

    def __init__(self, records):
        # The global dtype policy may differ from the model's.
        super().__init__(name="report_records", dtype="float32")
        self.records = records

    def call(self, inputs):
        return self.records(inputs, training=False)


def words_of(model: Any, token_ids: Any, mask: Any) -> list[list[str]]:
    """Strings of tokens, `""` for padding."""
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
    """Captions from words, without start and end tokens."""
    tokenizer = getattr(model, "preprocessor", None)
    special = [getattr(tokenizer, name, None) for name in ("start_id", "end_id")]
    return [
        " ".join(word for id, word in zip(ids, row) if word and id not in special)
        for ids, row in zip(token_ids.tolist(), words)
    ]
