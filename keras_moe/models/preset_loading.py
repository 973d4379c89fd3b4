"""`from_preset`, `save_to_preset` and `presets` for this library's classes.

KerasHub's loader does the work for folders, `hf://`, `kaggle://` and `gs://`; the
built-in presets are ours, since KerasHub has no registry for those of others.
"""

import os
from typing import Any

import keras

from keras_moe.models import registry
from keras_moe.models.blueprint import build
from keras_moe.models.preset_folder import is_staging, staged
from keras_moe.models.weights_file import checked_weights, save_weights


class _ClassProperty:
    def __init__(self, function):
        self.function = function

    def __get__(self, _, owner):
        return self.function(owner)


class TaskWeightsMixin:
    """Keeps the optimizer out of a task's preset.

    KerasHub would store the optimizer's state beside the head's weights: three times
    the size, and a warning when it is loaded.
    """

    def save_task_weights(self, filepath: str) -> None:
        """Saves the weights of the head alone."""
        save_weights(self, filepath, objects_to_skip=self._not_the_head())

    def load_task_weights(self, filepath: str) -> None:
        """Loads the weights of the head alone."""
        with checked_weights(filepath):
            keras.saving.load_weights(
                self, filepath, objects_to_skip=self._not_the_head()
            )

    def _not_the_head(self):
        skipped = list(self.backbone._flatten_layers())
        # There is none with compile=False.
        optimizer = getattr(self, "optimizer", None)
        return skipped if optimizer is None else [*skipped, optimizer]


class PresetMixin:
    """Adds built-in presets, overrides of any argument, and saving in one piece."""

    @_ClassProperty
    def presets(cls):
        """The presets of this class that are known by name."""
        return {
            name: {"metadata": {k: spec[k] for k in ("description", "source")}}
            for name, spec in registry.presets().items()
            if cls.__name__ in (spec["backbone"], spec["task"])
        }

    @classmethod
    def from_preset(cls, preset: Any, load_weights: bool = True, **kwargs) -> Any:
        """Makes a model from a preset.

        Args:
            preset: name of a preset (an architecture without weights), local folder,
                or `hf://`, `kaggle://` or `gs://` handle; or weights that others have
                published, see `keras_moe.models.convert`.
            load_weights: whether to load the preset's weights, if it has any.
            **kwargs: any argument of the backbone or the task. Weights must fit,
                except that position embeddings and the patch kernel are resized to
                another `image_shape` or `patch_size`. The dtype policy is the saved
                one.

        Returns:
            The model. With `num_classes` a task gets a new head.

        Raises:
            ValueError: if the preset is unknown (the nearest names are listed), is
                of another class, is not whole, or an argument is unknown.
        """
        return build(preset, kwargs, cls=cls, load_weights=load_weights)

    def save_weights(
        self,
        filepath: str | os.PathLike,
        overwrite: bool = True,
        max_shard_size: float | None = None,
    ) -> None:
        """Saves all weights, see `keras.Model.save_weights`, whole or not at all.

        Args:
            filepath: name that ends with `.weights.h5`, or for shards `.weights.json`.
            overwrite: whether to replace a file without asking.
            max_shard_size: largest size of one file in GB.

        Raises:
            OSError: with the path and the bytes, if a file cannot be written, as on a
                full disk. Those that were there stay as they were.
        """
        save_weights(self, filepath, overwrite, max_shard_size)

    def load_weights(
        self, filepath: str | os.PathLike, skip_mismatch: bool = False, **kwargs
    ) -> None:
        """Loads weights, see `keras.Model.load_weights`.

        Args:
            filepath: what `save_weights` has written, or a file of a preset, which is
                compared with the checksum in the preset's `metadata.json`.
            skip_mismatch: whether to leave out weights that do not fit.
            **kwargs: see `keras.Model.load_weights`.

        Raises:
            ValueError: naming the file, if it is damaged, or does not fit.
        """
        with checked_weights(filepath):
            super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)

    def save_to_preset(
        self, preset_dir: str | os.PathLike, max_shard_size: float | None = 10
    ) -> None:
        """Saves config and weights to a preset folder, whole or not at all.

        Args:
            preset_dir: a new folder, or one with an older preset, which is replaced
                only when all files of the new one are written.
            max_shard_size: largest size of one weights file in GB.

        The SHA-256 of the weights is in `metadata.json`, and loading compares it.

        Raises:
            ValueError: if `preset_dir` holds something else than a preset.
            FolderInUse: an OSError that names the process that has been saving to
                `preset_dir` for ten minutes.
            OSError: with the path and the bytes, if a file cannot be written, as on a
                full disk. The older preset stays as it was.
        """
        if is_staging():
            # A task that is being saved writes its backbone to the same folder.
            super().save_to_preset(preset_dir, max_shard_size=max_shard_size)
            return
        with staged(preset_dir) as folder:
            super().save_to_preset(folder, max_shard_size=max_shard_size)
