"""One pass over data: its batches, and the routing that a model gives them.

Axes: B batch, N tokens, E experts.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_moe.analysis.report.examples import all_examples, joined
from keras_moe.analysis.report.section import Batch, Subject
from keras_moe.checks import check_integer
from keras_moe.processes import predict_batch

# Examples of arrays that are prepared at once.
_AT_ONCE = 256


class Collection:
    """The routing of a model for the batches of data, one after the other."""

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
        """The batches of the data with their routing."""
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
        # Whole batches, and not too few examples at once.
        at_once = self.batch_size * max(_AT_ONCE // self.batch_size, 1)
        for examples in all_examples(data, self.subject, at_once):
            if not examples.size:
                continue
            waiting = examples if waiting is None else joined(waiting, examples)
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
        routing, finite = {}, {}
        for key, record in records["routing"].items():
            routing[key], is_finite = _without_broken(record)
            if not is_finite.all():
                finite[key] = is_finite
        masks = {}
        for modality in subject.modalities:
            masks[modality] = self._mask(modality, inputs, records["routing"])
        words = None if ids is None else words_of(subject.model, ids, masks["text"])
        captions = examples.captions
        if words is not None and (captions is None or None in captions):
            texts = _joined_words(subject.model, np.asarray(ids), words)
            captions = captions or [None] * len(texts)
            captions = [y if x is None else x for x, y in zip(captions, texts)]
        return Batch(
            start=self.num_examples,
            images=None if images is None else _finite_pixels(images),
            captions=captions,
            words=words,
            masks=masks,
            labels=examples.labels,
            routing={key: record_class(**x) for key, x in routing.items()},
            outputs=np.asarray(records["outputs"]) if self._has_logits else None,
            shared={},
            finite=finite or None,
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


def _without_broken(record):
    """A record with zeros for tokens that are not finite, and which are: (B, N)."""
    record = {name: np.asarray(x) for name, x in record.items()}
    # Logits may well be minus infinity, for experts that are gone; and plans of them.
    is_finite = ~np.isnan(record["affinity"]).any(axis=-1)
    for name in ("gates", "dispatched", "combined"):
        is_finite &= np.isfinite(record[name]).all(axis=-1)
    if not is_finite.all():
        broken = ~is_finite
        for name, x in record.items():
            record[name] = x = np.array(x)
            x[broken] = 0.0
    return record, is_finite


def _finite_pixels(images):
    """Images that can be drawn."""
    images = np.asarray(images, "float32")
    return np.nan_to_num(images, nan=0.0, posinf=1.0, neginf=-1.0)


class _Records(keras.Model):
    """The records of a model at inference."""

    def __init__(self, records):
        # The global policy is not the model's.
        super().__init__(name="report_records", dtype="float32")
        self.records = records

    def call(self, inputs):
        return self.records(inputs, training=False)


def words_of(model: Any, token_ids: Any, mask: Any) -> list[list[str]]:
    """The strings of tokens, `""` for padding."""
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
