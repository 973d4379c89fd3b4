"""Evaluation during training: few-shot, zero-shot, retrieval, or your own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_moe._checks import check_integer, unfit
from keras_moe.evaluation.few_shot import L2S, SEEDS, extract_features, few_shot
from keras_moe.evaluation.image_text import encode_pairs, zero_shot_from_model
from keras_moe.evaluation.retrieval import check_ks
from keras_moe.evaluation.zero_shot import read_class_names, read_templates
from keras_moe.training.callbacks import PeriodicCallback, averages_in_place


class PeriodicEvaluation(PeriodicCallback):
    """Evaluates a model every few epochs or steps.

    An evaluator is any function from the model to a dict of numbers that does not
    change weights; it sees the averaged weights if the optimizer keeps them. Metrics
    appear in logs, history and `records` under names such as `"few_shot/5_shot"`.

    Args:
        evaluators: evaluators by name.
        every: number of epochs or steps between evaluations.
        unit: `"epochs"` or `"steps"`.

    Example:

    >>> from keras_moe.training import PeriodicEvaluation
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> size = lambda model: {"weights": model.count_params()}
    >>> callback = PeriodicEvaluation({"size": size})
    >>> x = np.ones((4, 1))
    >>> sorted(model.fit(x, x, verbose=0, callbacks=[callback]).history)
    ['loss', 'size/weights']
    """

    def __init__(
        self,
        evaluators: Mapping[str, Callable[[keras.Model], Mapping[str, float]]],
        every: int = 1,
        unit: str = "epochs",
    ):
        super().__init__(every, unit)
        self.evaluators = dict(evaluators)
        # Fails here rather than after an epoch.
        if not evaluators or not all(map(callable, evaluators.values())):
            expected = "a dict of functions from a model to a dict of numbers"
            raise unfit(expected, evaluators=evaluators)

    def measure(self):
        figures = {}
        for name, evaluator in self.evaluators.items():
            # `fit` evaluates the averages, too.
            with averages_in_place(self.model):
                results = evaluator(self.model)
            for key, value in results.items():
                figures[f"{name}/{key}"] = float(value)
        return figures


class FewShot:
    """Evaluates the k-shot accuracy of the features that a classifier's head reads.

    For image-text models the features are the image embeddings. Call it with a model to
    get the mean accuracy over seeds, as `{"5_shot": ...}`.

    Args:
        train_data: pool from which shots are drawn, read at each evaluation; see
            `keras_moe.evaluation.extract_features`.
        test_data: the same for the test images.
        shots: numbers k of training examples per class.
        l2s: L2 penalties to try.
        seeds: one draw of the shots per seed.
        num_classes: number of classes; the highest label + 1 by default.
        batch_size: batch size for data given as arrays.

    Example:

    >>> from keras_moe import models
    >>> from keras_moe.training import FewShot
    >>> labels = np.arange(6) % 2
    >>> images = np.ones((6, 16, 16, 1), "float32") * labels[:, None, None, None]
    >>> model = models.from_preset(
    ...     "vmoe_digits", num_classes=2, num_layers=2, load_weights=False
    ... )
    >>> FewShot((images, labels), (images, labels), shots=(1,))(model)
    {'1_shot': 1.0}
    """

    def __init__(
        self,
        train_data: object,
        test_data: object,
        shots: Sequence[int] = (5, 10),
        *,
        l2s: Sequence[float] = L2S,
        seeds: Sequence[int] = SEEDS,
        num_classes: int | None = None,
        batch_size: int = 32,
    ):
        self.train_data, self.test_data = train_data, test_data
        self.options = {
            "shots": tuple(shots),
            "l2s": tuple(l2s),
            "seeds": tuple(seeds),
            "num_classes": num_classes,
        }
        self.batch_size = batch_size
        self._of, self._features = None, None

    def __call__(self, model: keras.Model) -> dict[str, float]:
        if self._of is not model:
            # Compiled once, not at each evaluation.
            self._of, self._features = model, _feature_model(model)
        train, test = (
            extract_features(self._features, pool, self.batch_size, verbose=0)
            for pool in (self.train_data, self.test_data)
        )
        result = few_shot(*train, *test, **self.options)
        return {f"{k}_shot": float(x) for k, x in zip(result.shots, result.mean)}


def _feature_model(model):
    encoder = getattr(getattr(model, "backbone", model), "encoder", None)
    if encoder is not None:
        return encoder("image")
    features = getattr(model, "features", None)
    if isinstance(features, Mapping):
        features = features.get("pooled")
    if features is None:
        raise unfit("a classifier or a backbone with features", type(model).__name__)
    return keras.Model(model.input, features)


class ZeroShot:
    """Evaluates the zero-shot accuracies of an image-text model.

    Call it with a model to get `"top_1"`, `"top_5"` and `"mean_per_class"`.

    Args:
        data: tuple of arrays (images, labels), or batches to read at each evaluation;
            the same in all processes.
        class_names: see `keras_moe.evaluation.read_class_names`.
        templates: see `keras_moe.evaluation.read_templates`.
        ks: values of k for top-k; None uses 1, and 5 if there are enough classes.
        batch_size: number of images and of texts to embed at a time.

    Example:

    ```python
    digits = data.load("digits", "test", (32, 32, 3))
    zero_shot = ZeroShot(digits, list("0123456789"), "the digit {}")
    PeriodicEvaluation({"zero_shot": zero_shot}, every=5)
    ```
    """

    def __init__(
        self,
        data: object,
        class_names: str | Sequence[str],
        templates: Any = "ours",
        ks: Sequence[int] | None = None,
        batch_size: int = 32,
    ):
        self.data: Any = data if isinstance(data, tuple) else (data, None)
        # Fails here rather than after an epoch.
        names = read_class_names(class_names)
        self.options: dict[str, Any] = {
            "class_names": class_names,
            "templates": read_templates(templates),
            "ks": None if ks is None else check_ks(ks, len(names)),
            "batch_size": batch_size,
            "verbose": 0,
        }

    def __call__(self, model: keras.Model) -> dict[str, float]:
        return zero_shot_from_model(model, *self.data, **self.options).figures()


class Retrieval:
    """Evaluates the retrieval recalls and contrastive accuracy of an image-text model.

    Call it with a model to get recalls such as `"image_to_text_r1"`, and
    `"contrastive_accuracy"`.

    Args:
        pairs: all pairs with all captions, see `keras_moe.evaluation.encode_pairs`;
            read at each evaluation; the same in all processes.
        ks: values of k for recall@k; None uses 1, 5 and 10, if there are enough pairs.
        contrastive_batch_size: batch size for the contrastive accuracy, at most the
            number of images; None leaves it out.
        batch_size: number of images and of texts to embed at a time.

    Example:

    ```python
    pairs = data.load_pairs("emoji", "test", captions="all", tokenizer=tokenizer)
    PeriodicEvaluation({"retrieval": Retrieval(pairs)}, every=5)
    ```
    """

    def __init__(
        self,
        pairs: object,
        ks: Sequence[int] | None = None,
        contrastive_batch_size: int | None = None,
        batch_size: int = 32,
    ):
        self.pairs, self.ks = pairs, None if ks is None else check_ks(ks)
        self.contrastive_batch_size = check_integer(
            "contrastive_batch_size", contrastive_batch_size, optional=True
        )
        self.batch_size = batch_size

    def __call__(self, model: keras.Model) -> dict[str, float]:
        embeddings = encode_pairs(model, self.pairs, self.batch_size)
        figures = embeddings.retrieval(self.ks).figures()
        if self.contrastive_batch_size is not None:
            size = min(self.contrastive_batch_size, len(embeddings.images))
            accuracy = embeddings.contrastive_accuracy(size)
            figures["contrastive_accuracy"] = accuracy.accuracy
        return figures
