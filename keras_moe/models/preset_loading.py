"""`from_preset`, `save_to_preset` and `presets` for this library's classes.

KerasHub's loader does the work for folders, `hf://`, `kaggle://` and `gs://`; the
built-in presets are ours, since KerasHub has no registry for those of others.
"""

import contextlib
import inspect
import os
from typing import Any

import keras
import keras_hub
from keras_hub.src.utils.preset_utils import check_file_exists, load_json

from keras_moe.models.builtin import builtin_presets
from keras_moe.models.preset_folder import (
    check_folder,
    is_staging,
    readable,
    staged,
)
from keras_moe.models.quantization import new_head_dtype
from keras_moe.ops.checks import check_argument_names, check_bool, nearest


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
        keras.saving.save_weights(self, filepath, objects_to_skip=self._not_the_head())

    def load_task_weights(self, filepath: str) -> None:
        """Loads the weights of the head alone."""
        keras.saving.load_weights(self, filepath, objects_to_skip=self._not_the_head())

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
        if "router" in of_backbone:
            # The saved options are another router's.
            of_backbone.setdefault("router_options", None)
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
            backbone = backbone_cls(**{**spec["config"], **backbone_kwargs, **own})
            if not is_task:
                return backbone
            if "num_classes" not in kwargs:
                raise ValueError(
                    f"Expected num_classes, since {preset!r} carries no trained task; "
                    "received: num_classes=None"
                )
            return cls(backbone, **{**spec["task_config"], **kwargs})
        if is_convertible(preset):
            return convert_to(cls, preset, given, load_weights=load_weights)[0]
        preset = check_preset(preset)
        if backbone_kwargs and "backbone" in kwargs:
            raise ValueError(
                "Expected backbone= or arguments of one, not both; received: "
                f"{next(iter(backbone_kwargs))}="
            )
        with explained(preset):
            if load_weights:
                saved = load_json(preset)["config"]
                of_backbone.update(
                    backbone_cls.overrides_for_weights(saved, of_backbone)
                )
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

    def save_to_preset(
        self, preset_dir: str | os.PathLike, max_shard_size: float | None = 10
    ) -> None:
        """Saves config and weights to a preset folder, whole or not at all.

        Args:
            preset_dir: a new folder, or one with an older preset, which is replaced
                only when all files of the new one are written.
            max_shard_size: largest size of one weights file in GB.

        Raises:
            ValueError: if `preset_dir` holds something else than a preset.
        """
        if is_staging():
            # A task that is being saved writes its backbone to the same folder.
            super().save_to_preset(preset_dir, max_shard_size=max_shard_size)
            return
        with staged(preset_dir) as folder:
            super().save_to_preset(folder, max_shard_size=max_shard_size)


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
    except (KeyError, OSError, TypeError, ValueError) as error:
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


def split_arguments(cls: type, kwargs: dict) -> tuple[dict, dict]:
    """Splits overrides into those of the backbone and those of the class itself.

    Args:
        cls: a task or a backbone class.
        kwargs: the overrides.

    Returns:
        `(backbone_kwargs, own_kwargs)`; of a backbone all are its own.

    Raises:
        ValueError: if an argument belongs to neither.
    """
    common = ["name", "trainable", "compile"]
    own = [*argument_names(cls), *common]
    backbone = []
    if issubclass(cls, keras_hub.models.Task):
        backbone = argument_names(cls.backbone_cls)
    check_argument_names(kwargs, [*own, *backbone], cls.__name__)
    return (
        {name: value for name, value in kwargs.items() if name not in own},
        {name: value for name, value in kwargs.items() if name in own},
    )
