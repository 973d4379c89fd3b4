"""The settings of a run, as its checkpoints keep them."""

import hashlib
from collections.abc import Mapping
from typing import Any

import keras

from keras_moe.training.flat_recipes import is_flat
from keras_moe.training.recipes import Recipe

# These say nothing about how a model is trained.
_WORDS = ("description", "reference", "notes")
_UNREADABLE = "unreadable_images"
# The digest of a vocabulary that a run trains anew, also when it is resumed.
TOKENIZER = "tokenizer_sha256"
_LOAD_WEIGHTS = "model.load_weights"


def run_settings(
    recipe: Recipe,
    data_dir: str | None = None,
    own_data: bool = False,
    model: keras.Model | None = None,
) -> dict[str, Any]:
    """A recipe's settings by dotted name, and what else a run depends on.

    With `unreadable="exclude"` these are the images that a search left out: an error
    of reading may have passed since, or come, and batches depend on it.

    Args:
        recipe: the recipe of the run.
        data_dir: folder of TensorFlow Datasets.
        own_data: whether the run has other data than the recipe's.
        model: the run's model, with what the objective took from the data.

    Example:

    >>> from keras_moe.training import load_recipe
    >>> from keras_moe.training.run_settings import run_settings
    >>> run_settings(load_recipe("vmoe_digits"))["schedule.epochs"]
    25
    """
    settings = recipe.settings()
    for name in _WORDS:
        del settings[name]
    left_out = None
    if not own_data and recipe.data.unreadable is not None:
        left_out = recipe.objective.left_out(recipe.data, data_dir)
    if left_out is not None:
        settings[_UNREADABLE] = {
            split: {
                "left_out": len(indices),
                "sha256": hashlib.sha256(indices.astype("<i8").tobytes()).hexdigest(),
            }
            for split, indices in zip(("train", "test"), left_out)
        }
    if not own_data and model is not None:
        settings |= recipe.objective.taken_from_data(model)
    return settings


def saved_settings(
    settings: Mapping[str, Any], current: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of a checkpoint by dotted name, also of an earlier version.

    Args:
        settings: settings as a checkpoint has them.
        current: settings of the run that is resumed. Only where these are a recipe's
            are those of the checkpoint read as a recipe.

    Raises:
        ValueError: if settings of an earlier version are no recipe of this one.

    Example:

    >>> from keras_moe.training.run_settings import saved_settings
    >>> flat = {"name": "mine", "preset": "vmoe_b16", "batch_size": 8, "epochs": 2,
    ...         "learning_rate": 1e-3}
    >>> saved_settings(flat, {"model.preset": "vmoe_b16"})["data.batch_size"]
    8
    """
    settings = dict(settings)
    # An earlier version did not say, and a resumed run has the checkpoint's weights.
    unsaid = {k: current[k] for k in (TOKENIZER, _LOAD_WEIGHTS) if k in current}
    if not is_flat(settings) or "model.preset" not in current:
        return {**unsaid, **settings}
    others = {name: settings.pop(name) for name in [_UNREADABLE] if name in settings}
    settings = run_settings(Recipe.from_dict(settings), own_data=True)
    return {**settings, **others, **unsaid}
