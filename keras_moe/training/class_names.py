"""The names of the classes that a model is trained on."""

import dataclasses
from typing import Any

from keras_moe import data
from keras_moe.models import ImagePreprocessor
from keras_moe.training.recipes import Recipe


def recipe_class_names(
    recipe: Recipe, data_dir: str | None = None
) -> tuple[str, ...] | None:
    """The names of a recipe's classes: those of its hierarchy, or of its data.

    Args:
        recipe: the settings.
        data_dir: of TensorFlow Datasets.

    Returns:
        The names in the order of the labels, or None if nobody knows them.

    Example:

    >>> from keras_moe.training.class_names import recipe_class_names
    >>> from keras_moe.training import load_recipe
    >>> recipe_class_names(load_recipe("vmoe_digits"))[:3]
    ('0', '1', '2')
    """
    if recipe.hierarchy is not None:
        return tuple(data.LabelHierarchy.load(recipe.hierarchy).classes)
    return data.class_names(recipe.data, data_dir)


def set_class_names(model: Any, names: tuple[str, ...] | None) -> None:
    """Gives a model's `ImagePreprocessor` the names of the classes it is trained on.

    Names that it has from its preset are those of other data and are dropped where
    `names` is None. A model without an `ImagePreprocessor` stays as it is.

    Args:
        model: an image classifier.
        names: of the classes in order, or None if they are not known.
    """
    preprocessor = getattr(model, "preprocessor", None)
    if isinstance(preprocessor, ImagePreprocessor):
        model.preprocessor = dataclasses.replace(preprocessor, class_names=names)
