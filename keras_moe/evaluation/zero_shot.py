"""Zero-shot classification: comparing images with texts that name the classes.

Axes: N images, C classes, S of a subset, T templates, P embedding, K values of k.
"""

import importlib.util
import json
import os
import runpy
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from keras_moe._checks import check_one_of, unfit
from keras_moe._templates import PLACE, Template, fill, read_lines
from keras_moe._templates import read_templates as check_templates
from keras_moe.evaluation._features import check_labels, to_numpy
from keras_moe.evaluation.retrieval import (
    CHUNK_SIZE,
    check_embeddings,
    check_ks,
    count_before,
    norms,
    unit_vectors,
)

ClassNames: TypeAlias = str | os.PathLike[str] | Sequence[str]
KS = (1, 5)
NUM_CLASSES = 1000
SUBSETS = ("imagenet_a", "imagenet_r")
TEMPLATES = {
    "name": (PLACE,),
    "ours": (
        "a photo of a {}.",
        "a picture of the {}.",
        "a drawing of a {}.",
        "a small image of a {}.",
        "a {} on a plain background.",
        "{}",
    ),
}
# Templates and names from an installed open_clip.
PUBLISHED = {
    "imagenet": "OPENAI_IMAGENET_TEMPLATES",
    "simple": "SIMPLE_IMAGENET_TEMPLATES",
}
PUBLISHED_NAMES = {"imagenet": "IMAGENET_CLASSNAMES"}


def read_templates(templates: str | os.PathLike | Sequence[Template]) -> tuple:
    """Reads prompt templates from a set, a file or a sequence.

    Args:
        templates: `"ours"` (six for photos and drawings), `"name"` (the bare name), or
            from an installed open_clip `"imagenet"` (CLIP's 80) or `"simple"` (7 of
            them); a single text with a `{}`; a file, with a JSON list or one text per
            line; or a sequence of texts with one `{}` each, and of functions from name
            to text.

    Returns:
        Tuple of texts and functions.

    Example:

    >>> from keras_moe.evaluation import read_templates
    >>> read_templates("a sketch of a {}")
    ('a sketch of a {}',)
    """
    if isinstance(templates, str) and templates in TEMPLATES:
        return TEMPLATES[templates]
    if isinstance(templates, str) and templates in PUBLISHED:
        return _published(PUBLISHED[templates])
    return check_templates(templates, (*TEMPLATES, *PUBLISHED))


def read_class_names(class_names: ClassNames) -> tuple[str, ...]:
    """Reads class names, in the order of the labels, from a file or a sequence.

    Args:
        class_names: a file, with a JSON list or one name per line; a sequence of names;
            or `"imagenet"`, OpenAI's names of the 1,000 classes from an installed
            open_clip (two appear twice, as published).

    Example:

    >>> from keras_moe.evaluation import read_class_names
    >>> read_class_names(["zero", "one"])
    ('zero', 'one')
    """
    if isinstance(class_names, str) and class_names in PUBLISHED_NAMES:
        return _published(PUBLISHED_NAMES[class_names])
    if isinstance(class_names, (str, os.PathLike)):
        class_names = read_lines(class_names, "class names", [*PUBLISHED_NAMES])
    names = tuple(class_names)
    bad = [name for name in names if not isinstance(name, str) or not name.strip()]
    # Sets and dicts by name would come in another order than the labels.
    if bad or not names or isinstance(class_names, (Mapping, Set)):
        expected = "a file of class names, or a sequence of names, not empty"
        raise unfit(expected, f"{class_names!r:.100}")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise unfit("each class name once", f"{twice[0]!r} for several classes")
    return names


def prompts(class_names: Sequence[str], templates: Sequence[Template]) -> list[str]:
    """Fills all templates with all class names: C * T texts, ordered by class.

    Args:
        class_names: C names.
        templates: T templates, or anything that `read_templates` accepts.

    Example:

    >>> from keras_moe.evaluation import prompts
    >>> prompts(["cat", "dog"], ["a {}", lambda name: f"two {name}s"])
    ['a cat', 'two cats', 'a dog', 'two dogs']
    """
    if isinstance(class_names, str):
        raise unfit("a sequence of class names", class_names=class_names)
    templates = read_templates(templates)
    return [fill(template, name) for name in class_names for template in templates]


def _published(name: str) -> tuple:
    """A constant of open_clip, read without importing the package."""
    package = importlib.util.find_spec("open_clip")
    if package is None or package.submodule_search_locations is None:
        raise ImportError(
            f"{name} comes from open_clip, which is not installed: "
            "pip install open_clip_torch"
        )
    path = Path(package.submodule_search_locations[0]) / "zero_shot_metadata.py"
    return tuple(runpy.run_path(str(path))[name])


# Some of ImageNet's classes


class ClassSubset(NamedTuple):
    """A subset of ImageNet's 1,000 classes among which a model chooses.

    Attributes:
        name: name of the subset, for errors.
        numbers: int (S,), its class numbers among the 1,000.
        wordnet_ids: their S WordNet ids, such as `"n01498041"`.
    """

    name: str
    numbers: np.ndarray
    wordnet_ids: tuple[str, ...]

    def indices(
        self, class_names: Sequence[str] | None = None, num_classes: int = NUM_CLASSES
    ) -> np.ndarray:
        """Index of each WordNet id (None: all 1,000) in the subset, or -1."""
        known, keys = self.wordnet_ids, class_names or ()
        if class_names is None and num_classes == NUM_CLASSES:
            known, keys = self.numbers.tolist(), range(NUM_CLASSES)
        index: dict[str | int, int] = {key: s for s, key in enumerate(known)}
        indices = np.array([index.get(key, -1) for key in keys], int)
        if not np.any(indices >= 0):
            raise ValueError(
                f"Expected data with classes of {self.name}, named by WordNet ids, or "
                f"with ImageNet's {NUM_CLASSES:,} classes; received: {num_classes} "
                f"classes, {keys[:3]}"
            )
        return indices

    def labels(
        self, labels: ArrayLike, indices: np.ndarray | None = None
    ) -> np.ndarray:
        """Converts labels (N,) of a data set to labels in the subset."""
        indices = self.indices() if indices is None else indices
        labels = check_labels("labels", labels, None, len(indices))
        found = indices[labels]
        if np.any(found < 0):
            expected = f"only images of the {len(self.numbers)} classes of {self.name}"
            raise unfit(expected, f"an image of class {labels[found < 0][0]}")
        return found


def read_class_subset(name: str) -> ClassSubset:
    """Reads the classes of an ImageNet variant that has fewer than 1,000.

    On ImageNet-A and ImageNet-R, a model for all 1,000 classes chooses only among the
    variant's 200. ImageNet-V2 has all classes.

    Args:
        name: `"imagenet_a"` or `"imagenet_r"`.

    Reference:
        The released evaluations of *Natural Adversarial Examples* and *The Many Faces
        of Robustness*.

    Example:

    >>> from keras_moe.evaluation import read_class_subset
    >>> subset = read_class_subset("imagenet_a")
    >>> logits = np.zeros((2, 1000))
    >>> logits[:, subset.numbers].shape, subset.labels([6, 988]).tolist()
    ((2, 200), [0, 199])
    """
    check_one_of("class_subset", name, SUBSETS)
    path = Path(__file__).with_name("imagenet_subsets.json")
    numbers = json.loads(path.read_text(encoding="utf-8"))[name]
    return ClassSubset(name, np.array([*numbers.values()]), tuple(numbers))


# Accuracy


class ZeroShotResult(NamedTuple):
    """Accuracies of a zero-shot classification.

    Attributes:
        ks: values of k.
        accuracy: (K,), share of images whose class is among the k nearest.
        per_class: (C,), top-1 accuracy per class; NaN for classes without images.
        ranks: int (N,), rank from 1 of each image's class.
    """

    ks: tuple[int, ...]
    accuracy: np.ndarray
    per_class: np.ndarray
    ranks: np.ndarray

    def figures(self) -> dict[str, float]:
        """The accuracies by name, such as `"top_5"` and `"mean_per_class"`."""
        figures = {f"top_{k}": float(x) for k, x in zip(self.ks, self.accuracy)}
        return {**figures, "mean_per_class": float(np.nanmean(self.per_class))}


def class_embeddings(prompt_embeddings: ArrayLike) -> np.ndarray:
    """Averages the embeddings of each class's prompts to float64 unit vectors (C, P).

    Embeddings are normalised, averaged, and normalised again, as in CLIP.

    Args:
        prompt_embeddings: (C, T, P), with T templates per class.

    Reference:
        *Learning Transferable Visual Models From Natural Language Supervision*, 3.1.4.

    Example:

    >>> from keras_moe.evaluation import class_embeddings
    >>> class_embeddings([[[2.0, 0.0], [0.0, 1.0]], [[0.0, 3.0], [0.0, 1.0]]]).round(3)
    array([[0.707, 0.707],
           [0.   , 1.   ]])
    """
    prompts = to_numpy(prompt_embeddings)
    if prompts.ndim != 3:
        expected = "prompt_embeddings of shape (classes, templates, dim)"
        raise unfit(expected, shape=prompts.shape)
    flat = check_embeddings("prompt_embeddings", prompts.reshape(-1, prompts.shape[2]))
    flat = flat.astype("float64")
    units = flat / norms(flat)[:, None]
    means = units.reshape(prompts.shape).mean(axis=1)
    return means / norms(check_embeddings("averages of prompts", means))[:, None]


def zero_shot(
    image_embeddings: ArrayLike,
    labels: ArrayLike,
    classes: ArrayLike,
    ks: Sequence[int] | None = None,
) -> ZeroShotResult:
    """Zero-shot accuracy: predicts the class with the nearest embedding.

    Of equal cosine similarities the lower class number wins.

    Args:
        image_embeddings: (N, P), nonzero.
        labels: (N,) integers in [0, C).
        classes: (C, P), such as those of `class_embeddings`.
        ks: values of k, at most C; None for 1, and 5 if there are that many classes.

    Example:

    >>> from keras_moe.evaluation import zero_shot
    >>> images = [[1.0, 0.1], [0.2, 1.0], [0.9, 0.0]]
    >>> result = zero_shot(images, [0, 1, 1], [[1.0, 0.0], [0.0, 1.0]], ks=(1, 2))
    >>> result.accuracy.round(2).tolist(), result.per_class.tolist()
    ([0.67, 1.0], [1.0, 0.5])
    """
    images = check_embeddings("image_embeddings", image_embeddings)
    classes = check_embeddings("classes", classes, images.shape[1])
    labels = check_labels("labels", labels, len(images), len(classes))
    if ks is None:
        ks = [k for k in KS if k <= len(classes)]
    ks = check_ks(ks, len(classes))
    units, ranks = unit_vectors(classes), np.ones(len(images), "int64")
    for start in range(0, len(images), CHUNK_SIZE):
        part = slice(start, start + CHUNK_SIZE)
        similarities = unit_vectors(images[part]) @ units.T
        own = np.take_along_axis(similarities, labels[part, None], axis=1)[:, 0]
        ranks[part] += count_before(similarities, own, labels[part])
    hits = np.bincount(labels, weights=ranks == 1, minlength=len(classes))
    with np.errstate(invalid="ignore"):
        per_class = hits / np.bincount(labels, minlength=len(classes))
    accuracy = np.array([np.mean(ranks <= k) for k in ks])
    return ZeroShotResult(ks, accuracy, per_class, ranks)
