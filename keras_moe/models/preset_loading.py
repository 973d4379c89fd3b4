"""`from_preset`, `save_to_preset` and `presets` for this library's classes.

KerasHub's loader does the work for folders, `hf://`, `kaggle://` and `gs://`; the
built-in presets are ours, since KerasHub has no registry for those of others.
"""

import contextlib
import dataclasses
import inspect
import os
from typing import Any

import keras
import keras_hub
from keras_hub.src.utils.preset_utils import check_file_exists, load_json

from keras_moe.checks import check_argument_names, check_bool, nearest
from keras_moe.models.builtin import builtin_presets, builtin_task_config
from keras_moe.models.image_preprocessor import ImagePreprocessor
from keras_moe.models.overrides import (
    apply_overrides,
    nested_config,
    override_names,
)
from keras_moe.models.preset_folder import (
    check_folder,
    is_staging,
    readable,
    staged,
)
from keras_moe.models.quantization import new_head_dtype
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
        """The built-in presets of this class: name -> {"metadata": {...}}."""
        return {
            name: {
                "metadata": {
                    "description": preset["description"],
                    "source": preset["source"],
                }
            }
            for name, preset in builtin_presets().items()
            if cls.__name__ in (preset["backbone"], preset["task"])
        }

    @classmethod
    def from_preset(cls, preset: str, load_weights: bool = True, **kwargs) -> Any:
        """Makes a model from a preset.

        Args:
            preset: the name of a built-in preset (an architecture without weights), a
                local folder, or an `hf://`, `kaggle://` or `gs://` handle; or weights
                that others have published, see `keras_moe.models.convert`.
            load_weights: load the preset's weights, if it has any.
            **kwargs: override any argument of the backbone or the task. Weights
                must fit, except that position embeddings and the patch kernel are
                resized to another `image_shape` or `patch_size`. The dtype policy is
                the saved one.

        Returns:
            The model. With `num_classes` a task gets a new head.

        Raises:
            ValueError: if the preset is unknown (the nearest names are listed), is
                of another class, is not whole, or an argument is unknown.
        """
        # Not above: that package imports this module.
        from keras_moe.models.conversion import convert_to, is_convertible

        check_bool("load_weights", load_weights)
        given = dict(kwargs)
        backbone_kwargs, kwargs = split_arguments(cls, kwargs)
        is_task = issubclass(cls, keras_hub.models.Task)
        backbone_cls = cls.backbone_cls if is_task else cls
        of_backbone = backbone_kwargs if is_task else kwargs
        spec = builtin_presets().get(preset)
        if spec:
            if cls.__name__ not in (spec["backbone"], spec["task"]):
                raise ValueError(
                    f"Expected a preset of {cls.__name__}; received: preset={preset!r} "
                    f"of {spec['backbone']}"
                )
            own = kwargs if not is_task else {}
            if "backbone" in kwargs:
                raise ValueError(
                    f"Expected no backbone=, since {preset!r} makes one; received: "
                    f"backbone={kwargs['backbone']!r}"
                )
            config = apply_overrides(
                backbone_cls, spec["config"], {**backbone_kwargs, **own}
            )
            backbone = backbone_cls.from_config(config)
            if not is_task:
                return backbone
            if "num_classes" not in kwargs:
                raise ValueError(
                    f"Expected num_classes, since {preset!r} carries no trained task; "
                    "received: num_classes=None"
                )
            kwargs.setdefault(
                "preprocessor",
                ImagePreprocessor(
                    backbone.get_config()["image_shape"],
                    class_names=spec.get("class_names"),
                ).adapted(num_classes=kwargs["num_classes"]),
            )
            task_config = builtin_task_config(spec, {**backbone_kwargs, **kwargs})
            return cls(backbone, **{**task_config, **kwargs})
        if is_convertible(preset):
            return convert_to(cls, preset, given, load_weights=load_weights)[0]
        preset = check_preset(preset)
        if backbone_kwargs and "backbone" in kwargs:
            raise ValueError(
                "Expected backbone= or arguments of one, not both; received: "
                f"{next(iter(backbone_kwargs))}="
            )
        with explained(preset):
            _complete_overrides(preset, backbone_cls, of_backbone, load_weights)
            if "dtype" not in {**backbone_kwargs, **kwargs}:
                # KerasHub's loader knows no mixed policy, and would make the others
                # the global one.
                saved = load_json(preset)["config"].get("dtype")
                if saved is not None:
                    policy = keras.dtype_policies.get(saved)
                    of_backbone["dtype"] = policy
            if not is_task:
                return super().from_preset(
                    preset, load_weights=load_weights, **backbone_kwargs, **kwargs
                )
            if kwargs.get("head") is not None and "num_classes" not in kwargs:
                raise ValueError(
                    "Expected num_classes beside a new head; received: "
                    f"head={kwargs['head']}"
                )
            if "num_classes" in kwargs and check_file_exists(preset, "task.json"):
                # A quantised head's layers are not those of a new one.
                saved = load_json(preset, "task.json").get("config", {})
                kwargs.setdefault("head_dtype", new_head_dtype(saved.get("head_dtype")))
                if saved.get("head") and saved.get("head_position") == "final":
                    # Of as many units as there are classes now; edits were of others.
                    head = saved["head"]
                    units = {"units": kwargs["num_classes"], "edited_outputs": ()}
                    head = {**head, "config": {**head["config"], **units}}
                    kwargs.setdefault("head", head)
            _adapt_preprocessor(preset, backbone_kwargs, kwargs)
            if backbone_kwargs.keys() - {"dtype", "image_shape"}:
                # KerasHub passes on no others.
                kwargs["backbone"] = cls.backbone_cls.from_preset(
                    preset, load_weights=load_weights, **backbone_kwargs
                )
                backbone_kwargs = {"dtype": backbone_kwargs.get("dtype")}
                if not check_file_exists(preset, "task.json"):
                    return cls(**kwargs)
            return super().from_preset(
                preset, load_weights=load_weights, **backbone_kwargs, **kwargs
            )

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


def _complete_overrides(preset, backbone_cls, overrides, load_weights):
    """Completes overrides, so that they are checked and weights still fit, in place."""
    saved = nested_config(backbone_cls, load_json(preset)["config"])
    fields = {k: v for k, v in overrides.items() if k in override_names(backbone_cls)}
    config = apply_overrides(backbone_cls, saved, fields)
    if load_weights:
        fitting = backbone_cls.config_for_weights(saved, config)
        if fitting.get("moe") != config.get("moe"):
            overrides["router_options"] = fitting["moe"]["router_options"]


def _adapt_preprocessor(preset, backbone_kwargs, kwargs):
    """Adds the saved preprocessor, made for the overrides, to a task's arguments.

    A folder that says nothing of one gets that of built-in presets; a saved null stays.
    """
    task = {}
    if check_file_exists(preset, "task.json"):
        task = load_json(preset, "task.json")["config"]
    backbone = kwargs.get("backbone")
    shape = backbone_kwargs.get("image_shape") or getattr(backbone, "image_shape", None)
    if "preprocessor" not in task:
        if shape is None:
            shape = load_json(preset)["config"]["image_shape"]
        kwargs.setdefault("preprocessor", ImagePreprocessor(shape))
        return
    saved = task["preprocessor"]
    if not isinstance(saved, dict) or saved.get("class_name") != "ImagePreprocessor":
        return
    preprocessor = keras.saving.deserialize_keras_object(saved).adapted(shape)
    if "num_classes" in kwargs:
        # A new head's classes are others, even where there are as many.
        preprocessor = dataclasses.replace(preprocessor, class_names=None)
    kwargs.setdefault("preprocessor", preprocessor)


def check_preset(preset: str) -> str:
    """The handle, or the folder to read from.

    Raises:
        ValueError: if `preset` is neither, or the folder is not whole.
    """
    if not isinstance(preset, (str, os.PathLike)):
        raise ValueError(f"Expected the name of a preset; received: {preset!r}")
    if "://" in str(preset):
        return str(preset)
    folder = readable(preset)
    if not folder.is_dir():
        raise ValueError(
            "Expected a built-in preset, a folder or a handle such as hf://user/name; "
            f"received: preset={str(preset)!r} "
            f"({nearest(str(preset), list(builtin_presets()))})"
        )
    check_folder(folder)
    return str(folder)


@contextlib.contextmanager
def explained(preset: str):
    """Says which preset an error comes from: Keras's own do not."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        if str(preset) in str(error):
            raise
        raise ValueError(
            "Expected a preset whose files fit together and fit the arguments; "
            f"received: preset={str(preset)!r}, which failed with "
            f"{type(error).__name__}: {error}"
        ) from error


def argument_names(cls: type) -> list[str]:
    """The names of a constructor's own arguments."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.name != "self"
    ]


def split_arguments(cls: type, kwargs: dict, is_made: bool = True) -> tuple[dict, dict]:
    """Splits overrides into those of the backbone and those of the class itself.

    Args:
        cls: a task or a backbone class.
        kwargs: the overrides.
        is_made: whether a model is made of them, which has a name, for example.

    Returns:
        `(backbone_kwargs, own_kwargs)`; of a backbone all are its own.

    Raises:
        ValueError: if an argument belongs to neither.
    """
    own = argument_names(cls)
    if not issubclass(cls, keras_hub.models.Task):
        own = override_names(cls)
    if is_made:
        own += ["name", "trainable", "compile"]
    else:
        own = [name for name in own if name not in ("backbone", "preprocessor")]
    backbone = []
    if issubclass(cls, keras_hub.models.Task):
        backbone = override_names(cls.backbone_cls)
    check_argument_names(kwargs, [*own, *backbone], cls.__name__)
    return (
        {name: value for name, value in kwargs.items() if name not in own},
        {name: value for name, value in kwargs.items() if name in own},
    )
