"""The classes of ImageNet that its variants have.

Axes: S classes of a subset.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_moe.checks import check_one_of
from keras_moe.evaluation.feature_checks import check_labels

NUM_CLASSES = 1000
SUBSETS = ("imagenet_a", "imagenet_r")


class ClassSubset(NamedTuple):
    """Some of ImageNet's 1,000 classes, among which a model is to choose.

    Attributes:
        name: name of the subset, for errors.
        numbers: int (S,), the numbers of its classes among the 1,000.
        wordnet_ids: the S names of their folders, such as `"n01498041"`.
    """

    name: str
    numbers: np.ndarray
    wordnet_ids: tuple[str, ...]

    def places(
        self, class_names: Sequence[str] | None = None, num_classes: int = NUM_CLASSES
    ) -> np.ndarray:
        """The place in the subset of each class of data, -1 for other classes.

        Args:
            class_names: names of the data's classes, which are WordNet ids as those of
                TensorFlow Datasets and of the folders; None takes ImageNet's numbers.
            num_classes: number of the data's classes where they have no names.

        Raises:
            ValueError: if no class is one of the subset, or classes without names are
                not 1,000.
        """
        place = {name: s for s, name in enumerate(self.wordnet_ids)}
        keys = class_names or ()
        if class_names is None and num_classes == NUM_CLASSES:
            place = {number: s for s, number in enumerate(self.numbers.tolist())}
            keys = range(NUM_CLASSES)
        places = np.array([place.get(key, -1) for key in keys], int)
        if not np.any(places >= 0):
            raise ValueError(
                f"Expected data with classes of {self.name}, named by WordNet ids, or "
                f"with ImageNet's {NUM_CLASSES:,} classes; received: "
                f"{list(keys[:3]) or num_classes} as classes"
            )
        return places

    def labels(self, labels: Any, places: np.ndarray | None = None) -> np.ndarray:
        """Labels of data as labels in the subset.

        Args:
            labels: (N,) integers, numbers of the data's classes.
            places: result of `places` for the data; None takes ImageNet's numbers.

        Raises:
            ValueError: if a label is of no class of the subset.
        """
        places = self.places() if places is None else places
        labels = check_labels("labels", labels, None, len(places))
        found = places[labels]
        if np.any(found < 0):
            raise ValueError(
                f"Expected images of the {len(self.numbers)} classes of {self.name} "
                f"alone; received: an image of class {labels[found < 0][0]}"
            )
        return found


def read_class_subset(name: str) -> ClassSubset:
    """The classes of a variant of ImageNet that has fewer than 1,000.

    The accuracy on ImageNet-A and on ImageNet-R is that among their own 200 classes,
    of a model that knows all: other outputs are left out. ImageNet-V2 has all classes.

    Args:
        name: `"imagenet_a"` or `"imagenet_r"`.

    Returns:
        A `ClassSubset`.

    Raises:
        ValueError: if `name` is another.

    Reference:
        *Natural Adversarial Examples* and *The Many Faces of Robustness*, whose
        released evaluations have these classes.

    Example:

    >>> import numpy as np
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
