"""Evaluators of models of pairs, for `PeriodicEvaluation`."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_moe.evaluation.pair_models import encode_pairs, zero_shot_from_model
from keras_moe.evaluation.prompts import read_class_names, read_templates
from keras_moe.evaluation.retrieval import KS


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
        ValueError: if names or templates are of the wrong kind.

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
        self.options = {
            # Mistakes are seen now, and published names may be there twice.
            "class_names": class_names
            if isinstance(class_names, str)
            else read_class_names(class_names),
            "templates": read_templates(templates),
            "ks": ks,
            "batch_size": batch_size,
        }

    def __call__(self, model: keras.Model) -> dict[str, float]:
        return zero_shot_from_model(model, *self.data, **self.options).figures()


class Retrieval:
    """An evaluator: recalls of a model of pairs, and its contrastive accuracy.

    Args:
        pairs: all pairs of all captions, read each time; see
            `keras_moe.evaluation.encode_pairs`. The same in all processes.
        ks: values of k.
        contrastive_batch_size: number of pairs among which contrastive accuracy finds
            each; None leaves it out.
        batch_size: number of images and of texts that are embedded at a time.

    Returns:
        Called with a model, the recalls, as `"image_to_text_r1"`, and
        `"contrastive_accuracy"`.

    Example:

    ```python
    pairs = data.load_pairs("emoji", "test", captions="all", tokenizer=tokenizer)
    PeriodicEvaluation({"retrieval": Retrieval(pairs)}, every=5)
    ```
    """

    def __init__(
        self,
        pairs: Any,
        ks: Sequence[int] = KS,
        contrastive_batch_size: int | None = None,
        batch_size: int = 64,
    ):
        self.pairs, self.ks = pairs, tuple(ks)
        self.contrastive_batch_size = contrastive_batch_size
        self.batch_size = batch_size

    def __call__(self, model: keras.Model) -> dict[str, float]:
        embeddings = encode_pairs(model, self.pairs, self.batch_size)
        figures = embeddings.retrieval(self.ks).figures()
        if self.contrastive_batch_size is not None:
            accuracy = embeddings.contrastive_accuracy(self.contrastive_batch_size)
            figures["contrastive_accuracy"] = accuracy.accuracy
        return figures
