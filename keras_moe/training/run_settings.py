"""The settings of a run, as its checkpoints keep them."""

import hashlib
from typing import Any

import keras

from keras_moe.training.recipes import Recipe

# These say nothing about how a model is trained.
_WORDS = ("description", "reference", "notes")
_UNREADABLE = "unreadable_images"
# The digest of a vocabulary that a run trains anew, also when it is resumed.
TOKENIZER = "tokenizer_sha256"


def run_settings(
    recipe: Recipe,
    data_dir: str | None = None,
    own_data: bool = False,
    model: keras.Model | None = None,
) -> dict[str, Any]:
    """A recipe's settings by dotted name, and what else a run depends on.

    With `unreadable="exclude"` these are the images that a search left out: an error
    of reading may have passed since, or come, and batches depend on it.
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
