"""Registry of backbones, tasks and presets; classes register themselves."""

import copy
import functools
import importlib.util
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import keras

from keras_moe._checks import check_argument_names, nearest, unfit
from keras_moe._files import shipped_files
from keras_moe._types import KerasModel

T = TypeVar("T", bound=type)

_BACKBONES: dict[str, type] = {}
_TASKS: dict[str, type] = {}
_PRESETS: dict[str, dict] = {}
# Optional entries of a preset with their defaults.
_OPTIONAL = {
    "source": "", "task": None, "task_config": {}, "class_names": None, "weights": None,
    "package": None, "results": (), "license": None, "attribution": "",
}  # fmt: skip
_ENTRIES = ["description", "backbone", "config", *_OPTIONAL, "variant"]


def register_backbone(cls: T) -> T:
    """Decorator that registers a backbone family under its class name.

    Args:
        cls: a `MoEBackbone`, registered with Keras as serialisable.

    Example:

    >>> import keras
    >>> from keras_moe import models
    >>> @models.register_backbone
    ... @keras.saving.register_keras_serializable("my_package")
    ... class MyViT(models.ViTBackbone):
    ...     pass
    >>> preset = {"description": "a ViT", "backbone": MyViT, "config": {"mlp_dim": 8}}
    >>> models.register_presets({"my_vit": preset})
    >>> type(models.abstract("my_vit")).__name__
    'MyViT'
    """
    return _register(cls, _BACKBONES)


def register_task(cls: T) -> T:
    """Decorator that registers a task for the backbones of its `backbone_cls`.

    `from_preset` finds the class by its `task_name`, such as `"image_classifier"`, and
    prefers the first if several share the name and backbone.

    Args:
        cls: a task, registered with Keras as serialisable.

    Example:

    >>> import keras
    >>> from keras_moe import models
    >>> @models.register_backbone
    ... @keras.saving.register_keras_serializable("my_package")
    ... class SmallViT(models.ViTBackbone):
    ...     pass
    >>> @models.register_task
    ... @keras.saving.register_keras_serializable("my_package")
    ... class SmallViTClassifier(models.ImageClassifier):
    ...     backbone_cls = SmallViT
    >>> SmallViTClassifier.task_name
    'image_classifier'
    """
    for name, kind in (("backbone_cls", type), ("task_name", str)):
        if not isinstance(getattr(cls, name, None), kind):
            expected = f"a task with {name}"
            raise unfit(expected, f"{cls.__name__}.{name}={getattr(cls, name, None)!r}")
    return _register(cls, _TASKS)


def register_presets(presets: Mapping[str, dict]) -> None:
    """Registers presets by name: architectures, with or without weights.

    Args:
        presets: dict from name to a dict. Required: `description`, `backbone` (a
            registered class or its name) and `config` (its arguments, flat). Optional:
            `task` (a registered class or its name), `task_config` (its arguments),
            `class_names`, and `source`, the paper or file of the sizes. With weights:
            `weights`, a folder or handle of `save_to_preset`, and `package`, if a
            package of this name brings the folder; `results`, a list of dicts of
            `metric`, `value`, `data` and `split`; their `license`; and `attribution`,
            the authors and licence of the training data.

    Example:

    >>> from keras_moe import models
    >>> models.register_presets({
    ...     "vmoe_digits_e4": {
    ...         "description": "V-MoE for 8 x 8 digits with 4 experts",
    ...         "backbone": "ViTBackbone",
    ...         "config": {
    ...             "image_shape": [16, 16, 1], "patch_size": 4, "hidden_dim": 64,
    ...             "num_layers": 4, "num_heads": 4, "mlp_dim": 128,
    ...             "moe_layers": "every_2", "num_experts": 4,
    ...         },
    ...     }
    ... })
    >>> models.from_preset("vmoe_digits_e4", num_classes=10).output_shape
    (None, 10)
    """
    for name, spec in presets.items():
        check_argument_names(spec, _ENTRIES, f"the preset {name!r}")
        if not spec.keys() >= {"description", "backbone", "config"}:
            expected = f"description, backbone and config of the preset {name!r}"
            raise unfit(expected, sorted(spec))
        spec = {**_OPTIONAL, **copy.deepcopy(dict(spec))}
        for part in ("backbone", "task"):
            if isinstance(spec[part], type):
                spec[part] = spec[part].__name__
        if _PRESETS.get(name, spec) != spec:
            raise ValueError(
                f"Expected a new name for a preset; received: {name!r}, which is "
                f"{_PRESETS[name]['description']!r}"
            )
        _PRESETS[name] = spec


def _register(cls, classes):
    name = keras.saving.get_registered_name(cls)
    if keras.saving.get_registered_object(name) is not cls:
        expected = "a class under @keras.saving.register_keras_serializable(...)"
        raise unfit(expected, repr(cls))
    known = classes.get(cls.__name__, cls)
    # Notebook cells may run again.
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise unfit(f"a new name for {cls!r}", f"{cls.__name__}, the name of {known!r}")
    classes[cls.__name__] = cls
    return cls


def check_loadable(model: KerasModel) -> None:
    """Raises ValueError if loading a saved model would not find all classes."""
    names = [keras.saving.get_registered_name(type(model))]
    names += _registered_names(model.get_config())
    for name in names:
        if keras.saving.get_registered_object(name) is None:
            raise ValueError(
                "Expected classes under @keras.saving.register_keras_serializable"
                "('my_package'), which loading finds again; received: a model with "
                f"{name}, which save_weights can save"
            )


def _registered_names(config):
    """Yields the names of the classes in a config; Keras's own have none."""
    if isinstance(config, dict):
        if config.get("registered_name") and config.get("module") != "builtins":
            yield config["registered_name"]
        config = list(config.values())
    if isinstance(config, (list, tuple)):
        for value in config:
            yield from _registered_names(value)


def presets() -> dict[str, dict]:
    """Returns a copy of all presets by name, as in `register_presets`."""
    return copy.deepcopy(_PRESETS)


def metadata_of(cls: type) -> dict[str, dict]:
    """Returns what KerasHub says of a class's presets, by name."""
    return {
        name: {"metadata": {"description": summary(x), "source": x["source"]}}
        for name, x in _PRESETS.items()
        if cls.__name__ in (x["backbone"], x["task"])
    }


def summary(spec: dict) -> str:
    """Returns a preset's description, results and licence in one line."""
    if spec["weights"] is None:
        return spec["description"]
    figures = [_figure(**result) for result in spec["results"]]
    licence = f"; {spec['license']}" if spec["license"] else ""
    return f"{spec['description']}; trained: {', '.join(figures) or 'yes'}{licence}"


def _figure(metric, value, data, split):
    metric = re.sub(r"_r(\d+)$", r" R@\1", metric).replace("_", " ")
    # Perplexities are no shares.
    figure = f"{value:.1%}" if value <= 1 else f"{value:.1f}"
    return f"{metric} {figure} on {data} {split}"


def preset(name: object) -> dict | None:
    """Returns a copy of a preset, or None."""
    return copy.deepcopy(_PRESETS.get(name)) if isinstance(name, str) else None


def has_weights(name: object) -> bool:
    """Whether `name` is a registered preset with weights."""
    return (preset(name) or {}).get("weights") is not None


def is_architecture(name: object) -> bool:
    """Whether `name` is a registered preset without weights."""
    return preset(name) is not None and not has_weights(name)


def backbone_class(name: str) -> type:
    """Returns a registered backbone by class name."""
    return _by_name(name, _BACKBONES, "backbone")


def named_task_class(name: str) -> type:
    """Returns a registered task by class name."""
    return _by_name(name, _TASKS, "task")


def _by_name(name, classes, kind):
    if name not in classes:
        expected = f"the class of a registered {kind}"
        raise unfit(expected, f"{name!r} ({nearest(str(name), sorted(classes))})")
    return classes[name]


def backbone_names() -> list[str]:
    return sorted(_BACKBONES)


def task_names() -> list[str]:
    """Returns the task names that `from_preset` accepts."""
    return sorted({cls.task_name for cls in _TASKS.values()})


def first_task(name: str) -> type:
    """Returns the first registered task with a `task_name`."""
    return next(cls for cls in _TASKS.values() if cls.task_name == name)


def is_registered(cls: type) -> bool:
    """Whether a class is, or extends, a registered backbone."""
    return any(base in _BACKBONES.values() for base in cls.__mro__)


def is_task(cls: type) -> bool:
    """Whether a class is a task that can be registered."""
    return isinstance(getattr(cls, "task_name", None), str)


def task_class(
    backbone_cls: type, matches: Callable[[type], bool] = lambda cls: True
) -> type | None:
    """Returns the first matching task for a backbone or a class that it extends."""
    for base in backbone_cls.__mro__:
        for cls in _TASKS.values():
            if cls.backbone_cls is base and matches(cls):
                return cls
    return None


@functools.cache
def builtin_presets() -> dict[str, dict]:
    """Returns the shipped presets, as in `register_presets`; not a copy."""
    presets = {}
    for name, path in shipped_files("presets").items():
        preset = json.loads(path.read_text(encoding="utf-8"))
        config = _with_sizes(preset["config"], preset["variant"])
        presets[name] = {**preset, "config": config}
        if "weights" in preset:
            folder = path.parent
            if "package" in preset:
                folder = _package_folder(preset["package"])
            # Even if the folder is missing: a trained preset is never silently random.
            presets[name]["weights"] = str(folder / preset["weights"])
    return presets


def _package_folder(name):
    """The folder of a package of weights, installed or in a clone."""
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    return Path(__file__).resolve().parents[2] / "packages" / name / module


def _with_sizes(config, variant):
    """Fills in the sizes of a variant, or of one per tower."""
    if isinstance(variant, dict):
        towers = {name: _with_sizes(config[name], variant[name]) for name in variant}
        return {**config, **towers}
    return {**VARIANTS[variant].config(), **config}


class Variant(NamedTuple):
    """A published encoder size.

    Attributes:
        hidden_dim: width D of tokens.
        num_layers: number of blocks.
        num_heads: number of attention heads; None for a Mixer.
        mlp_dim: hidden width H of an MLP.
        source: table or file that the row comes from.
        token_mlp_dim: H of a Mixer's token MLPs.
    """

    hidden_dim: int
    num_layers: int
    num_heads: int | None
    mlp_dim: int
    source: str
    token_mlp_dim: int | None = None

    def config(self) -> dict:
        """Returns the sizes as backbone arguments."""
        return {
            name: value
            for name, value in self._asdict().items()
            if name != "source" and value is not None
        }


_SIZES = Path(__file__).with_name("variants.toml").read_text(encoding="utf-8")
VARIANTS = {
    # A Mixer has no heads.
    name: Variant(**{"num_heads": None, **sizes})
    for name, sizes in tomllib.loads(_SIZES).items()
}
