"""Reads data and its routing in one pass. Axes: B batch, N tokens, E experts."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moe._batches import array_length, read_batches, stratified
from keras_moe._checks import fits_shape, unfit
from keras_moe._processes import predict_batch
from keras_moe.ops import Routing
from keras_moe.report.model import IMAGE, TEXT, ReportedModel, plain_text
from keras_moe.report.section import Batch

CAPTIONS = "captions"
# Examples of arrays that are prepared at a time.
_AT_ONCE = 256
# Examples among which some are drawn, at most, if the data may be endless.
_MOST_SEEN = 100_000
# Prepared images are in [-1, 1], or standardised and a few times as large; images in
# 0..255 are far beyond this.
_FAR = 32.0


def mapped(function: Callable[..., Any], *structures: Any) -> Any:
    """Returns `keras.tree.map_structure`, whose result is like the structures."""
    return keras.tree.map_structure(function, *structures)


class Examples(NamedTuple):
    """Some examples of the data."""

    inputs: Any  # The model's inputs: a dict of arrays, or an array of images
    captions: np.ndarray | None  # Object array (B,) of texts, or None
    labels: np.ndarray | None  # Integers (B,), -1 where missing; or None

    def rows(self, index: slice | np.ndarray) -> "Examples":
        return mapped(lambda x: None if x is None else x[index], self)

    def joined(self, other: "Examples") -> "Examples":
        return mapped(
            lambda a, b: None if a is None else np.concatenate([a, b]), self, other
        )

    @property
    def size(self) -> int:
        """B."""
        return len(keras.tree.flatten(self.inputs)[0])


def _all_examples(data, model, at_once):
    """Yields the examples of data of any kind, in batches of any size."""
    if isinstance(data, list) and data and all(isinstance(x, str) for x in data):
        data = np.array(data, object)
    for batch in read_batches(data, at_once, "arrays", may_be_endless=True)[0]:
        yield _examples(batch, model)


def _examples(batch, model):
    """The examples of a batch of inputs, `(inputs, labels)` or with weights."""
    inputs, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
    second = others[0] if others else None
    captions = None
    if TEXT in model.modalities:
        inputs, captions, second = _with_texts(inputs, second, model.keras_model)
    elif isinstance(inputs, dict) and "images" in inputs:
        inputs = inputs["images"]
    inputs = keras.tree.map_structure(keras.ops.convert_to_numpy, inputs)
    _check_inputs(inputs, model.keras_model)
    examples = Examples(inputs, captions, labels_of(second))
    array_length(tuple(examples), "inputs, labels and captions")
    if len(others) > 1 and others[1] is not None:
        # Padding of the last batch has weight 0.
        weights = np.asarray(others[1]).reshape(len(others[1]), -1)
        examples = examples.rows(np.flatnonzero(weights.any(axis=1)))
    return examples


def _with_texts(inputs, second, model):
    """Inputs, captions and labels for a model with texts."""
    captions = None
    if not isinstance(inputs, dict) and "images" in model.input:
        inputs, captions, second = {"images": inputs}, second, None
    elif not isinstance(inputs, dict):
        inputs = _of_texts(inputs, getattr(model, "preprocessor", None))
    inputs = dict(inputs)
    captions = inputs.pop(CAPTIONS, captions)
    if captions is not None:
        # TensorFlow's strings are bytes.
        captions = captions.numpy() if hasattr(captions, "numpy") else captions
        if isinstance(captions, str):
            raise unfit("captions as a list of texts", f"{captions!r:.80}")
        captions = [plain_text(caption) for caption in captions]
        if "token_ids" not in inputs:
            if getattr(model, "preprocessor", None) is None:
                expected = "a model with a TextTokenizer for captions"
                raise unfit(expected, preprocessor=None)
            inputs |= model.preprocessor(captions)
        captions = np.array(captions, object)
    return {x: inputs[x] for x in model.input if x in inputs}, captions, second


def _of_texts(inputs, tokenizer):
    """The dict of a language model's texts, or of rows of their token ids."""
    array = np.asarray(inputs)
    if array.dtype.kind not in "iu":
        return {CAPTIONS: inputs}
    return {
        "token_ids": array,
        "padding_mask": array != getattr(tokenizer, "padding_id", 0),
    }


def labels_of(labels: object) -> np.ndarray | None:
    """The class of each example as an integer, -1 for none or several."""
    if labels is None or isinstance(labels, dict):
        return None
    labels = keras.ops.convert_to_numpy(labels)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind in "iubf" and labels.ndim in (1, 2):
        # NaN, infinity and fractions differ from their integers.
        with np.errstate(invalid="ignore"):
            classes = labels.astype("int64")
        if (classes == labels).all():
            if labels.ndim == 1:
                return classes
            lowest, highest = classes.min(initial=0), classes.max(initial=0)
            if lowest == 0 and highest <= 1:
                return np.where(classes.sum(axis=1) == 1, classes.argmax(axis=1), -1)
            if lowest >= -1:
                # Lists of classes, padded with -1.
                is_single = (classes >= 0).sum(axis=1) == 1
                return np.where(is_single, classes.max(axis=1), -1)
    expected = "labels as whole numbers (batch,) or 0-1 vectors (batch, classes)"
    raise unfit(expected, shape=labels.shape, dtype=str(labels.dtype))


def _check_inputs(inputs, model):
    expected = model.input
    if not isinstance(expected, dict):
        expected = {"images": expected}
    if not isinstance(inputs, dict):
        inputs = {"images": inputs}
    for name, symbol in expected.items():
        if name not in inputs:
            names = " and ".join(expected)
            given = f"a dict of {sorted(map(str, inputs))}"
            raise unfit(f"{names}, an array or in a dict", given)
        shape = tuple(inputs[name].shape)
        if not fits_shape(shape, symbol.shape):
            wanted = ", ".join(str(x or "any") for x in symbol.shape[1:])
            raise unfit(f"{name} of shape (batch, {wanted})", shape=shape)
    if "images" in expected:
        _check_range(inputs["images"], getattr(model, "preprocessor", None))


def _check_range(images, preprocessor):
    values = np.abs(images[np.isfinite(images)])
    # A smaller standard deviation makes larger images.
    most = _FAR * max(0.5 / np.min(getattr(preprocessor, "std", 0.5)), 1.0)
    # NumPy has no kind for bfloat16.
    if images.dtype.kind not in "iub" and values.max(initial=0.0) <= most:
        return
    raise ValueError(
        "Expected floating-point images that are prepared for the model, in [-1, 1] as "
        "keras_moe.data.load, images / 127.5 - 1 or the model's ImagePreprocessor "
        f"gives them; received: dtype={images.dtype}, up to {values.max(initial=0)}"
    )


class Drawn(NamedTuple):
    """Which of `total` examples to read: those of sorted `numbers`; None for all.

    The data may have more examples if the pass over them was `cut` short.
    """

    numbers: np.ndarray | None
    total: int
    cut: bool = False


def draw_examples(
    model: ReportedModel, data: object, number: int | None, seed: int
) -> Drawn | None:
    """Draws examples, of all classes alike; None to take those that come first."""
    if number is None or isinstance(data, Iterator):
        # An iterator can be read only once.
        return None
    _, length = read_batches(data, _AT_ONCE, "arrays", may_be_endless=True)
    cardinality = getattr(data, "cardinality", None)
    if cardinality is not None and int(cardinality()) == -1:
        # It never ends.
        return None
    most = None if length is not None else max(_MOST_SEEN, number)
    labels, total, cut = [], 0, False
    for examples in _all_examples(data, model, _AT_ONCE):
        own = examples.labels
        labels.append(np.full(examples.size, -1) if own is None else own)
        total += examples.size
        if most is not None and total >= most:
            cut = True
            break
    if total <= number:
        return Drawn(None, total)
    return Drawn(stratified(np.concatenate(labels), number, seed), total, cut)


def routed_batches(
    model: ReportedModel,
    data: object,
    batch_size: int = 32,
    max_examples: int | None = None,
    numbers: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Yields the batches of data, or of some examples, with the model's routing."""
    keras_model = model.keras_model
    records = keras.Model(keras_model.input, _symbols(keras_model))
    start = 0
    for examples in _sized(data, model, batch_size, max_examples, numbers):
        yield _routed(model, examples, predict_batch(records, examples.inputs), start)
        start += examples.size
    if not start:
        raise ValueError("Expected at least one example; received: none")


def _sized(data, model, batch_size, left, numbers=None):
    """Rebatches examples to the batch size; the last batch may be smaller."""
    waiting, start = None, 0
    # A multiple of the batch size, and not too few examples.
    at_once = batch_size * max(_AT_ONCE // batch_size, 1)
    for examples in _all_examples(data, model, at_once):
        if numbers is not None:
            first, last = np.searchsorted(numbers, [start, start + examples.size])
            start += examples.size
            examples = examples.rows(numbers[first:last] - start + examples.size)
        if left is not None:
            examples = examples.rows(slice(left))
            left -= examples.size
        waiting = examples if waiting is None else waiting.joined(examples)
        while waiting.size >= batch_size:
            yield waiting.rows(slice(batch_size))
            waiting = waiting.rows(slice(batch_size, None))
        if left == 0:
            break
    if waiting is not None and waiting.size:
        yield waiting


def _symbols(model):
    """Symbolic routing records, and the logits of a classifier."""
    routing = {key: record._asdict() for key, record in model.routing.items()}
    if not hasattr(model, "num_classes"):
        outputs = model.output if isinstance(model.output, dict) else {}
        names = [f"{modality}_embeddings" for modality in (IMAGE, TEXT)]
        if {*names} <= {*outputs}:
            return {"routing": routing, "embeddings": [outputs[x] for x in names]}
        return {"routing": routing}
    if getattr(model, "encoded", None) is None:
        return {"routing": routing, "outputs": model.output}
    # A classifier calls its backbone as a layer, and records are in the backbone's
    # graph: one model of both would compute the backbone twice.
    after = {"outputs": model.output}
    if "head" in routing:
        after["head"] = routing["head"]
    after = keras.Model(model.encoded, after)(model.backbone.output)
    outputs = after.pop("outputs")
    return {"routing": {**routing, **after}, "outputs": outputs}


def _routed(model, examples, records, start):
    """A batch of examples with the records of its routing."""
    inputs, captions = examples.inputs, examples.captions
    routing, finite = {}, {}
    for key, record in records["routing"].items():
        record, is_finite = _without_broken(record)
        routing[key] = Routing(**record)
        if not is_finite.all():
            finite[key] = is_finite
    masks = {x: _mask(model, x, inputs, routing) for x in model.modalities}
    images, words = inputs, None
    if isinstance(inputs, dict):
        images = inputs.get("images")
        words, texts = _words(model.keras_model, inputs["token_ids"], masks[TEXT])
        captions = texts if captions is None else list(captions)
    if images is not None:
        # Non-finite pixels are replaced, so that images can be drawn.
        images = np.asarray(images, "float32")
        images = np.nan_to_num(images, nan=0.0, posinf=1.0, neginf=-1.0)
    outputs, embeddings = records.get("outputs"), records.get("embeddings")
    return Batch(
        start=start,
        images=images,
        captions=captions,
        words=words,
        masks=masks,
        labels=examples.labels,
        routing=routing,
        outputs=None if outputs is None else np.asarray(outputs),
        finite=finite,
        shared={},
        embeddings=None if embeddings is None else (embeddings[0], embeddings[1]),
    )


def _mask(model, modality, inputs, routing):
    """Boolean (B, N), True for tokens that count."""
    if modality == TEXT:
        return np.asarray(inputs["padding_mask"], bool)
    for block in model.blocks.values():
        if block.modality == modality and block.is_of_tokens:
            return np.ones(routing[block.key].dispatched.shape[:2], bool)
    rows, columns = model.grid or (1, 1)
    return np.ones((len(keras.tree.flatten(inputs)[0]), rows * columns), bool)


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


def _words(model, token_ids, mask):
    """Strings of tokens, `""` for padding; and their texts, without start and end."""
    tokenizer: Any = getattr(model, "preprocessor", None)
    special = ()
    if hasattr(tokenizer, "tokens"):
        strings = tokenizer.tokens(token_ids)
        special = (tokenizer.start_id, tokenizer.end_id)
    else:
        strings = [[f"#{id}" for id in row] for row in token_ids.tolist()]
    words, texts = [], []
    for ids, row, counts in zip(token_ids.tolist(), strings, mask.tolist()):
        row = [word if kept else "" for word, kept in zip(row, counts)]
        words.append(row)
        texts.append(
            " ".join(word for id, word in zip(ids, row) if word and id not in special)
        )
    return words, texts
