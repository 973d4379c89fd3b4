"""k-shot linear evaluation of frozen features by closed-form ridge regression.

The protocol of V-MoE and of the vision transformers: draw k training examples per
class, fit a linear map from standardised features to targets of +-1, and report the
accuracy of its argmax on the whole test set.

Axes: N examples, F feature dim, C classes, L values of l2, k shots per class.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

# Appended to the standardised features: so large that the penalty, which falls on
# its weight too, hardly shrinks the bias.
BIAS_CONSTANT = 100.0
STD_EPSILON = 1e-5
# The grid of the V-MoE configurations.
L2S = tuple(float(l2) for l2 in 2.0 ** np.arange(-10, 20))
SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)
# Scores of this many test examples are held at once.
_CHUNK = 8192
# So many indices are named in an error.
_NAMED = 5


class RidgeClassifier(NamedTuple):
    """A linear classifier on standardised features.

    Fields:
        mean: (F,), of the training features.
        std: (F,), population standard deviation of the training features + 1e-5.
        weights: (F + 1, C), or (L, F + 1, C) for several l2. The last row belongs to
            the constant feature 100.
    """

    mean: np.ndarray
    std: np.ndarray
    weights: np.ndarray

    def scores(self, features: Any) -> np.ndarray:
        """The classifier's outputs for features (N, F): (N, C), or (L, N, C)."""
        features = _check_features("features", features, self.mean.size)
        return _standardise(features, self.mean, self.std) @ self.weights


class FewShotResult(NamedTuple):
    """Accuracies of a few-shot evaluation, and what they come to.

    Fields:
        accuracies: (shots, seeds, l2s) test accuracies in [0, 1].
        shots: the numbers of training examples per class.
        seeds: the seeds of the draws.
        l2s: the penalties.
        best_l2: (shots,) the penalty chosen for each k, see `best_l2`.
        mean: (shots,) accuracy at the best l2, averaged over the seeds.
        std: (shots,) its sample standard deviation over the seeds; 0 for one seed.
    """

    accuracies: np.ndarray
    shots: tuple[int, ...]
    seeds: tuple[int, ...]
    l2s: tuple[float, ...]
    best_l2: np.ndarray
    mean: np.ndarray
    std: np.ndarray

    def table(self, title: str | None = None) -> Any:
        """A table for `rich.print`: one row for each k."""
        from rich.table import Table

        table = Table(title=title)
        for column in ("shots", "accuracy", "std", "best l2"):
            table.add_column(column, justify="right")
        for k, mean, std, l2 in zip(self.shots, self.mean, self.std, self.best_l2):
            table.add_row(str(k), f"{mean:.2%}", f"{std:.2%}", f"{l2:g}")
        return table

    def to_dict(self) -> dict[str, Any]:
        """The fields as lists and numbers that `json` can write."""
        return {name: np.asarray(getattr(self, name)).tolist() for name in self._fields}


def ridge_regression(
    train_features: Any,
    train_labels: Any,
    num_classes: int,
    l2: float | Sequence[float],
) -> RidgeClassifier:
    """Fits the linear classifier, in float64 and in closed form.

    Features become X = [(features - mean) / (std + 1e-5), 100], with the training
    set's mean and population standard deviation; targets Y are 1 for the label's
    class and -1 elsewhere. The weights are (X^T X + l2 I)^-1 X^T Y, the weight of
    the constant feature being penalised like the others. One decomposition, of the
    smaller of X^T X and X X^T, serves all values of l2.

    Args:
        train_features: (N, F).
        train_labels: (N,) integers in [0, num_classes).
        num_classes: C.
        l2: penalty, positive; a number, or L of them.

    Returns:
        A `RidgeClassifier` with weights (F + 1, C), or (L, F + 1, C) if `l2` is a
        sequence.

    Raises:
        ValueError: if an array has the wrong shape or is not finite, if a label is
            out of range, or if an l2 is not positive.

    Example:

    >>> import numpy as np
    >>> from keras_moe.evaluation import ridge_regression
    >>> features = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> ridge = ridge_regression(features, [0, 0, 1, 1], num_classes=2, l2=1.0)
    >>> ridge.weights.shape
    (2, 2)
    >>> ridge.scores([[0.5], [2.5]]).argmax(-1)
    array([0, 1])
    """
    l2s = _check_l2s(np.atleast_1d(l2))
    fit = _decompose(train_features, train_labels, num_classes)
    weights = np.stack([fit.left @ (fit.right / (fit.eigs + l2)) for l2 in l2s])
    return RidgeClassifier(fit.mean, fit.std, weights if np.ndim(l2) else weights[0])


def few_shot_accuracies(
    train_features: Any,
    train_labels: Any,
    test_features: Any,
    test_labels: Any,
    num_classes: int,
    l2s: Sequence[float] = L2S,
) -> np.ndarray:
    """Test accuracy of ridge regression on all of the given training examples.

    Args:
        train_features: (N, F).
        train_labels: (N,) integers in [0, num_classes).
        test_features: (M, F).
        test_labels: (M,) integers in [0, num_classes).
        num_classes: C.
        l2s: L positive penalties.

    Returns:
        (L,) accuracies in [0, 1]. Of equal scores the first class wins.

    Raises:
        ValueError: as `ridge_regression`.

    Example:

    >>> from keras_moe.evaluation import few_shot_accuracies
    >>> few_shot_accuracies([[0.0], [1.0]], [0, 1], [[-1.0], [2.0]], [0, 1], 2, [0.1])
    array([1.])
    """
    l2s = _check_l2s(l2s)
    fit = _decompose(train_features, train_labels, num_classes)
    test_features = _check_features("test_features", test_features, fit.mean.size)
    test_labels = _check_labels(
        "test_labels", test_labels, len(test_features), num_classes
    )
    correct = np.zeros(len(l2s))
    for start in range(0, len(test_features), _CHUNK):
        rows = slice(start, start + _CHUNK)
        # The weights are never formed: (M, F)(F, R) once, then (M, R)(R, C) per l2.
        rotated = _standardise(test_features[rows], fit.mean, fit.std) @ fit.left
        for i, l2 in enumerate(l2s):
            scores = rotated @ (fit.right / (fit.eigs + l2))
            correct[i] += np.sum(scores.argmax(axis=1) == test_labels[rows])
    return correct / len(test_features)


def sample_shots(
    labels: Any, shots: int, num_classes: int, seed: int = 0
) -> np.ndarray:
    """Draws the same number of examples of every class.

    The draws of one seed are nested: those of 1 shot are among those of 5. They are
    the draws of V-MoE's evaluator for the same seed.

    Args:
        labels: (N,) integers in [0, num_classes).
        shots: k, examples per class.
        num_classes: C.
        seed: of the draw.

    Returns:
        (C * k,) distinct indices into `labels`, class after class.

    Raises:
        ValueError: if a class has fewer examples than `shots`, or a label is out of
            range.

    Example:

    >>> from keras_moe.evaluation import sample_shots
    >>> labels = [0, 1, 0, 1, 1, 0]
    >>> [labels[i] for i in sample_shots(labels, shots=2, num_classes=2, seed=0)]
    [0, 0, 1, 1]
    """
    labels = _check_labels("labels", labels, None, num_classes)
    shots = _check_count("shots", shots)
    counts = np.bincount(labels, minlength=num_classes)
    if counts.min() < shots:
        poorest = int(counts.argmin())
        raise ValueError(
            f"Expected at least shots={shots} examples of every class; received: "
            f"{counts[poorest]} of class {poorest}, and too few of "
            f"{np.sum(counts < shots)} of {num_classes} classes"
        )
    rng = np.random.default_rng(seed)
    # All of a class is permuted, whatever the shots: this nests the draws.
    permuted = [
        rng.permutation(np.flatnonzero(labels == c)) for c in range(num_classes)
    ]
    return np.concatenate([indices[:shots] for indices in permuted])


def best_l2(accuracies: Any, l2s: Sequence[float]) -> np.ndarray:
    """Chooses one l2 for each k, over all data sets (or seeds) together.

    In each data set the l2s are ranked by accuracy, and the l2 with the highest mean
    rank wins, the first of them if several do, as in V-MoE's evaluator. That leaves
    the ranks of equal accuracies to numpy's sort, which differs between processors;
    here the earlier l2 ranks higher. The choice reads test accuracies; one l2 for
    all data sets limits the optimism of that, and a single fixed l2 avoids it.

    Args:
        accuracies: (datasets, shots, L).
        l2s: (L,) penalties.

    Returns:
        (shots,) the chosen penalties.

    Raises:
        ValueError: if the shapes do not fit.

    Example:

    >>> from keras_moe.evaluation import best_l2
    >>> best_l2([[[0.5, 0.6, 0.7]], [[0.1, 0.2, 0.9]]], l2s=[1.0, 2.0, 4.0])
    array([4.])
    """
    accuracies, l2s = np.asarray(accuracies, "float64"), np.asarray(l2s, "float64")
    if accuracies.ndim != 3 or l2s.shape != accuracies.shape[2:] or not accuracies.size:
        raise ValueError(
            "Expected accuracies (datasets, shots, l2s) and one l2 for each of the "
            f"last axis; received: accuracies.shape={accuracies.shape}, "
            f"l2s.shape={l2s.shape}"
        )
    # Stable sorts of the reversed axis, so that of equal accuracies the earlier l2
    # comes last and has the higher rank.
    order = accuracies[..., ::-1].argsort(axis=-1, kind="stable")
    ranks = order.argsort(axis=-1, kind="stable")[..., ::-1]
    return l2s[ranks.mean(axis=0).argmax(axis=-1)]


def few_shot(
    train_features: Any,
    train_labels: Any,
    test_features: Any,
    test_labels: Any,
    shots: Sequence[int] = SHOTS,
    l2s: Sequence[float] = L2S,
    seeds: Sequence[int] = SEEDS,
    num_classes: int | None = None,
) -> FewShotResult:
    """Few-shot accuracy of frozen features, for several k, penalties and draws.

    Args:
        train_features: (N, F), the pool from which the shots are drawn.
        train_labels: (N,) integers in [0, num_classes).
        test_features: (M, F).
        test_labels: (M,) integers in [0, num_classes).
        shots: the numbers k of training examples per class.
        l2s: positive penalties; by default 2^-10, 2^-9, ..., 2^19, the grid of the
            V-MoE configurations.
        seeds: one draw of the shots for each.
        num_classes: C; by default the highest label + 1.

    Returns:
        A `FewShotResult`. The l2 of each k is chosen by `best_l2` over the seeds.

    Raises:
        ValueError: if an array has the wrong shape or is not finite, if a label is
            out of range, if a class has fewer examples than the largest k, or if
            `shots`, `l2s` or `seeds` is empty.

    Example:

    >>> import numpy as np
    >>> from keras_moe.evaluation import few_shot
    >>> labels = np.arange(40) % 2
    >>> features = np.random.default_rng(0).normal(size=(40, 3)) + 9 * labels[:, None]
    >>> result = few_shot(features, labels, features, labels, shots=(1, 5))
    >>> result.accuracies.shape
    (2, 3, 30)
    >>> result.mean
    array([1., 1.])
    """
    shots = tuple(_check_count("shots", k) for k in shots)
    seeds = tuple(_check_count("seeds", seed, minimum=0) for seed in seeds)
    l2s = _check_l2s(l2s)
    if not shots or not seeds:
        raise ValueError(
            "Expected at least one number of shots and one seed; received: "
            f"shots={shots}, seeds={seeds}"
        )
    train_features = _check_features("train_features", train_features)
    test_features = _check_features(
        "test_features", test_features, train_features.shape[1]
    )
    train_labels = _check_labels("train_labels", train_labels, len(train_features))
    test_labels = _check_labels("test_labels", test_labels, len(test_features))
    if num_classes is None:
        num_classes = int(max(train_labels.max(), test_labels.max())) + 1
    num_classes = _check_count("num_classes", num_classes)
    # Before the sweep, which may be long: labels and a k that it would refuse.
    _check_labels("train_labels", train_labels, None, num_classes)
    _check_labels("test_labels", test_labels, None, num_classes)
    sample_shots(train_labels, max(shots), num_classes)

    accuracies = np.empty((len(shots), len(seeds), len(l2s)))
    for i, k in enumerate(shots):
        for j, seed in enumerate(seeds):
            drawn = sample_shots(train_labels, k, num_classes, seed)
            accuracies[i, j] = few_shot_accuracies(
                train_features[drawn],
                train_labels[drawn],
                test_features,
                test_labels,
                num_classes,
                l2s,
            )
    return _summarise(accuracies, shots, seeds, l2s)


def few_shot_from_model(
    model: keras.Model | Callable,
    train_data: Any,
    test_data: Any,
    shots: Sequence[int] = SHOTS,
    l2s: Sequence[float] = L2S,
    seeds: Sequence[int] = SEEDS,
    num_classes: int | None = None,
    batch_size: int = 64,
    verbose: int = 1,
) -> FewShotResult:
    """Few-shot accuracy of a model's features: extracts them, then `few_shot`.

    Args:
        model: a `keras.Model`, or any callable, from a batch of images, a numpy
            array, to features (batch, F).
        train_data: a tuple of arrays (images, labels), or an iterable of batches of
            them, such as a `tf.data.Dataset`; read once. Labels are integers.
        test_data: the same for the test set.
        shots: the numbers k of training examples per class.
        l2s: positive penalties; by default 2^-10, ..., 2^19.
        seeds: one draw of the shots for each.
        num_classes: C; by default the highest label + 1.
        batch_size: for data given as arrays.
        verbose: 1 shows a progress bar for each set, 2 one line at its end, 0
            nothing.

    Returns:
        A `FewShotResult`.

    Raises:
        ValueError: if images or features are not finite (with their number and the
            first indices), if features are not of rank 2, if data has no end or no
            batches, and as `few_shot`.

    Example:

    >>> import numpy as np
    >>> from keras_moe.evaluation import few_shot_from_model
    >>> labels = np.arange(20) % 2
    >>> images = np.ones((20, 4, 4, 1)) * (labels * 2 - 1)[:, None, None, None]
    >>> data = (images.astype("float32"), labels)
    >>> brightness = lambda images: images.mean(axis=(1, 2))
    >>> few_shot_from_model(brightness, data, data, shots=(1,), verbose=0).mean
    array([1.])
    """
    batch_size = _check_count("batch_size", batch_size)
    train = _extract("train_data", model, train_data, batch_size, verbose)
    test = _extract("test_data", model, test_data, batch_size, verbose)
    return few_shot(
        *train, *test, shots=shots, l2s=l2s, seeds=seeds, num_classes=num_classes
    )


class _Decomposition(NamedTuple):
    """The weights for any l2 are `left @ (right / (eigs + l2))`."""

    mean: np.ndarray  # (F,)
    std: np.ndarray  # (F,)
    left: np.ndarray  # (F + 1, R)
    eigs: np.ndarray  # (R, 1)
    right: np.ndarray  # (R, C)


def _decompose(features: Any, labels: Any, num_classes: int) -> _Decomposition:
    features = _check_features("train_features", features)
    num_classes = _check_count("num_classes", num_classes)
    labels = _check_labels("train_labels", labels, len(features), num_classes)
    mean, std = features.mean(axis=0), features.std(axis=0) + STD_EPSILON
    x = _standardise(features, mean, std)
    y = np.where(labels[:, None] == np.arange(num_classes), 1.0, -1.0)
    if len(x) >= x.shape[1]:
        # X^T X = V diag(eigs) V^T: the weights are V (eigs + l2)^-1 V^T X^T Y.
        eigs, vectors = np.linalg.eigh(x.T @ x)
        left, right = vectors, vectors.T @ (x.T @ y)
    else:
        # X X^T = U diag(eigs) U^T: the same weights are X^T U (eigs + l2)^-1 U^T Y.
        eigs, vectors = np.linalg.eigh(x @ x.T)
        left, right = x.T @ vectors, vectors.T @ y
    # Rounding may leave a zero eigenvalue negative and eigs + l2 near nothing.
    return _Decomposition(mean, std, left, np.maximum(eigs, 0.0)[:, None], right)


def _standardise(features: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    constant = np.full((len(features), 1), BIAS_CONSTANT)
    return np.concatenate([(features - mean) / std, constant], axis=1)


def _summarise(accuracies, shots, seeds, l2s) -> FewShotResult:
    # A seed counts as a data set in the choice, as in V-MoE's evaluator.
    chosen = best_l2(accuracies.transpose(1, 0, 2), l2s)
    at_best = np.stack([a[:, l2s == l2][:, 0] for a, l2 in zip(accuracies, chosen)])
    std = at_best.std(axis=1, ddof=1) if len(seeds) > 1 else np.zeros(len(shots))
    return FewShotResult(
        accuracies=accuracies,
        shots=shots,
        seeds=seeds,
        l2s=tuple(float(l2) for l2 in l2s),
        best_l2=chosen,
        mean=at_best.mean(axis=1),
        std=std,
    )


def _extract(
    name: str, model: Callable, data: Any, batch_size: int, verbose: int
) -> tuple[np.ndarray, np.ndarray]:
    """Runs the model over all batches: features (N, F) and labels (N,)."""
    if not callable(model):
        raise ValueError(
            f"Expected a keras.Model or a callable; received: model={model!r}"
        )
    # A model's own prediction step is compiled; calling it is not.
    predict = model
    if isinstance(model, keras.Model):
        predict = model.predict_on_batch
        if keras.distribution.distribution() is not None:
            predict = _of_full_batches(predict)
    batches, num_batches = _batches(name, data, batch_size)
    progress = keras.utils.Progbar(num_batches, verbose=verbose, unit_name="batch")
    features, labels, bad_images, seen = [], [], [], 0
    for index, batch in enumerate(batches):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(
                f"Expected {name} to give batches (images, labels); "
                f"received: {type(batch).__name__}"
            )
        # A tensor of tf.data means nothing to a model of another backend.
        images = _to_numpy(batch[0])
        bad = _non_finite(images)
        bad_images.extend(bad + seen)
        # One bad image is reported with all others, so the rest is read, not run.
        if not bad_images:
            output = predict(images)
            features.append(_check_output(name, output, len(images)))
        labels.append(_to_numpy(batch[1]))
        if labels[-1].shape != (len(images),):
            raise ValueError(
                f"Expected {name} to give one integer label per image, of shape "
                f"({len(images)},); received: labels.shape={labels[-1].shape}"
            )
        seen += len(images)
        progress.update(index + 1)
    if not seen:
        raise ValueError(f"Expected at least one image in {name}; received: none")
    if num_batches is None:
        progress.update(index + 1, finalize=True)
    if bad_images:
        raise ValueError(
            f"Expected finite images in {name}; received: NaN or Inf in "
            f"{len(bad_images)} of {seen} images, first at indices "
            f"{[int(i) for i in bad_images[:_NAMED]]}"
        )
    features = np.concatenate(features)
    return _check_features(f"features of {name}", features), np.concatenate(labels)


def _of_full_batches(predict: Callable) -> Callable:
    """Fills a last batch up to the first one's size: devices share each batch."""
    size = 0

    def of_images(images):
        nonlocal size
        size = max(size, len(images))
        padding = np.repeat(images[-1:], size - len(images), axis=0)
        outputs = predict(np.concatenate([images, padding]))
        return keras.tree.map_structure(lambda x: x[: len(images)], outputs)

    return of_images


def _batches(name: str, data: Any, batch_size: int) -> tuple[Iterator, int | None]:
    """An iterator of (images, labels), and how many batches it has if known."""
    if isinstance(data, keras.utils.PyDataset):
        return (data[i] for i in range(data.num_batches)), data.num_batches
    if isinstance(data, tuple) and len(data) == 2 and hasattr(data[0], "shape"):
        images, labels = _to_numpy(data[0]), _to_numpy(data[1])
        if not images.ndim or labels.ndim != 1 or len(images) != len(labels):
            raise ValueError(
                f"Expected {name} to have one integer label per image; received: "
                f"images.shape={images.shape}, labels.shape={labels.shape}"
            )
        starts = range(0, len(images), batch_size)
        sliced = (
            (images[i : i + batch_size], labels[i : i + batch_size]) for i in starts
        )
        return sliced, len(starts)
    if not isinstance(data, Iterable):
        raise ValueError(
            f"Expected {name} to be a tuple (images, labels) of arrays or an iterable "
            f"of such batches; received: {type(data).__name__}"
        )
    # tf.data says -1 for a data set that repeats for ever, -2 for an unknown length.
    if hasattr(data, "cardinality"):
        length = int(data.cardinality())
    else:
        length = len(data) if hasattr(data, "__len__") else -2
    if length == -1:
        raise ValueError(
            f"Expected {name} to end; received: a data set that repeats for ever"
        )
    return iter(data), length if length >= 0 else None


def _check_output(name: str, output: Any, batch: int) -> np.ndarray:
    shape = getattr(output, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != batch:
        received = type(output).__name__ if shape is None else f"shape={tuple(shape)}"
        raise ValueError(
            f"Expected features of {name} of shape (batch, dim) = ({batch}, dim); "
            f"received: {received}"
        )
    return _to_numpy(output)


def _to_numpy(array: Any) -> np.ndarray:
    # A tensor of the backend may sit on an accelerator or ask for gradients; one of
    # tf.data may belong to another backend.
    if keras.ops.is_tensor(array):
        return keras.ops.convert_to_numpy(array)
    return np.asarray(array)


def _non_finite(array: np.ndarray) -> np.ndarray:
    """Indices along the first axis at which something is NaN or infinite."""
    if array.dtype.kind in "biu":
        return np.array([], "int64")
    # np.isfinite does not know bfloat16.
    values = array if array.dtype.kind == "f" else array.astype("float32")
    return np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))


def _check_features(name: str, features: Any, dim: int | None = None) -> np.ndarray:
    features = _to_numpy(features).astype("float64")
    if features.ndim != 2 or not features.size:
        raise ValueError(
            f"Expected {name} of shape (examples, dim), neither of them 0; "
            f"received: shape={features.shape}"
        )
    if dim is not None and features.shape[1] != dim:
        raise ValueError(
            f"Expected {name} with the {dim} features of the training set; "
            f"received: shape={features.shape}"
        )
    bad = _non_finite(features)
    if bad.size:
        raise ValueError(
            f"Expected finite {name}; received: NaN or Inf in {bad.size} of "
            f"{len(features)} rows, first at indices {bad[:_NAMED].tolist()}"
        )
    return features


def _check_labels(
    name: str, labels: Any, length: int | None, num_classes: int | None = None
) -> np.ndarray:
    labels = _to_numpy(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not labels.size:
        raise ValueError(
            f"Expected {name} of shape (examples,), integers; received: "
            f"shape={labels.shape}, dtype={labels.dtype}"
        )
    if length is not None and len(labels) != length:
        raise ValueError(
            f"Expected {name} for {length} examples; received: shape={labels.shape}"
        )
    highest = np.inf if num_classes is None else num_classes - 1
    outside = labels[(labels < 0) | (labels > highest)]
    if outside.size:
        expected = ">= 0" if num_classes is None else f"in [0, {num_classes})"
        raise ValueError(
            f"Expected {name} {expected}; received: {int(outside[0])}, and "
            f"{outside.size} out of range in all"
        )
    return labels.astype("int64")


def _check_l2s(l2s: Any) -> np.ndarray:
    array = np.asarray(l2s, "float64")
    if array.ndim != 1 or not array.size or not np.all((array > 0) & (array < np.inf)):
        raise ValueError(f"Expected positive finite penalties; received: l2s={l2s}")
    return array


def _check_count(name: str, value: Any, minimum: int = 1) -> int:
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or value < minimum:
        raise ValueError(
            f"Expected an integer of at least {minimum}; received: {name}={value!r}"
        )
    return int(value)
