"""Evaluators of models of pairs, for `PeriodicEvaluation`."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_moe.checks import check_integer
from keras_moe.evaluation.pair_models import encode_pairs, zero_shot_from_model
from keras_moe.evaluation.prompts import (
    PUBLISHED_NAMES,
    read_class_names,
    read_templates,
)
from keras_moe.evaluation.retrieval import KS
from keras_moe.evaluation.similarities import check_ks


class ZeroShot:
    """An evaluator: zero-shot accuracies of a model of pairs.

    Args:
        data: tuple of arrays (images, labels), or an iterable of batches of them, which
            is read each time; the same in all processes.
        class_names: names; see `keras_moe.evaluation.read_class_names`.
        templates: templates; see `keras_moe.evaluation.read_templates`.
        ks: values of k; None takes 1, and 5 where there are as many classes.
        batch_size: number of images and of texts that are embedded at a time.

    Returns:
        Called with a model, the accuracies, as `"top_1"`, `"top_5"` and
        `"mean_per_class"`.

    Raises:
        ValueError: if names or templates are of the wrong kind, or a k is above the
            number of names.

    Example:

    ```python
    digits = data.load("digits", "test", (32, 32, 3))
    zero_shot = ZeroShot(digits, list("0123456789"), "the digit {}")
    PeriodicEvaluation({"zero_shot": zero_shot}, every=5)
    ```
    """

    def __init__(
        self,
        data: Any,
        class_names: Any,
        templates: Any = "ours",
        ks: Sequence[int] | None = None,
        batch_size: int = 64,
    ):
        self.data = data if isinstance(data, tuple) else (data, None)
        # Mistakes are seen now, not after an epoch.
        names = read_class_names(class_names)
        is_published = isinstance(class_names, str) and class_names in PUBLISHED_NAMES
        self.options = {
            # Published names may be there twice, which names of one's own may not.
            "class_names": class_names if is_published else names,
            "templates": read_templates(templates),
            "ks": None if ks is None else check_ks(ks, len(names), "classes"),
            "batch_size": batch_size,
        }

    def __call__(self, model: keras.Model) -> dict[str, float]:
        return zero_shot_from_model(model, *self.data, **self.options).figures()


class Retrieval:
    """An evaluator: recalls of a model of pairs, and its contrastive accuracy.

    Args:
        pairs: all pairs of all captions, read each time; see
            `keras_moe.evaluation.encode_pairs`. The same in all processes.
        ks: values of k; None for those of 1, 5 and 10 for which there are as many
            images and texts.
        contrastive_batch_size: number of images among which contrastive accuracy finds
            each, fewer if there are fewer; None leaves it out.
        batch_size: number of images and of texts that are embedded at a time.

    Returns:
        Called with a model, the recalls, as `"image_to_text_r1"`, and
        `"contrastive_accuracy"`.

    Raises:
        ValueError: if there are no `ks`, or a number is below 1.

    Example:

    ```python
    pairs = data.load_pairs("emoji", "test", captions="all", tokenizer=tokenizer)
    PeriodicEvaluation({"retrieval": Retrieval(pairs)}, every=5)
    ```
    """

    def __init__(
        self,
        pairs: Any,
        ks: Sequence[int] | None = None,
        contrastive_batch_size: int | None = None,
        batch_size: int = 64,
    ):
        self.pairs, self.ks = pairs, None if ks is None else check_ks(ks)
        if contrastive_batch_size is not None:
            check_integer("contrastive_batch_size", contrastive_batch_size)
        self.contrastive_batch_size = contrastive_batch_size
        self.batch_size = batch_size

    def __call__(self, model: keras.Model) -> dict[str, float]:
        embeddings = encode_pairs(model, self.pairs, self.batch_size)
        num_images = len(embeddings.images)
        fewest = min(num_images, len(embeddings.texts))
        ks = self.ks or [k for k in KS if k <= fewest]
        figures = embeddings.retrieval(ks).figures()
        if self.contrastive_batch_size is not None:
            size = min(self.contrastive_batch_size, num_images)
            accuracy = embeddings.contrastive_accuracy(size)
            figures["contrastive_accuracy"] = accuracy.accuracy
        return figures
