"""What is frozen in a layer or model, as a part of its config.

A config's `"frozen"` lists paths of layers and weights in it, such as `"block_0"`,
which is frozen with all that is in it; `"!block_0/mlp"` is trained all the same.
"""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from keras_moe._checks import nearest, unfit
from keras_moe._compat import flatten_layers, own_variables, set_trainable
from keras_moe._types import Config

FROZEN = "frozen"


def named_parts(layer: Any) -> dict[str, Any]:
    """Returns the layers directly in a layer and its own trained weights, by name."""
    parts = {}
    for part in (
        *flatten_layers(layer, include_self=False, recursive=False),
        *own_variables(layer, trainable=True),
    ):
        name = part.name
        while name in parts:
            name += "+"
        parts[name] = part
    return parts


def inner_layers(
    layer: Any, prefix: str = ""
) -> Iterator[tuple[str, keras.layers.Layer]]:
    """Yields all layers in a layer with their paths, but not those of inner models."""
    for name, part in named_parts(layer).items():
        if isinstance(part, keras.layers.Layer) and not _keeps_own(part):
            yield f"{prefix}{name}", part
            yield from inner_layers(part, f"{prefix}{name}/")


def frozen_paths(layer: Any, inner_models: bool = False) -> list[str]:
    """Returns what in a layer differs from what its own `trainable` says."""
    return list(_differences(layer, layer.trainable, inner_models, set()))


def _differences(layer, trainable, inner_models, seen, prefix=""):
    for name, part in named_parts(layer).items():
        is_known = trainable and not inner_models and _keeps_own(part)
        if is_known or id(part) in seen:
            continue
        seen.add(id(part))
        is_layer = isinstance(part, keras.layers.Layer)
        if is_layer and part.built and not part.weights:
            continue
        if part.trainable != trainable:
            yield f"{'!' if part.trainable else ''}{prefix}{name}"
        if is_layer:
            path = f"{prefix}{name}/"
            yield from _differences(part, part.trainable, inner_models, seen, path)


def _keeps_own(part):
    return getattr(part, "keeps_own_freezing", False)


def freeze(layer: Any, paths: Iterable[str], strict: bool = True) -> list[str]:
    """Freezes what `frozen_paths` returned; unknown paths are errors, or returned."""
    if isinstance(paths, str) or not all(isinstance(path, str) for path in paths):
        expected = f"{FROZEN} to be a list of paths, such as ['block_0']"
        raise unfit(expected, **{FROZEN: paths})
    missing = []
    # A layer before its parts, which may differ.
    for path in sorted(paths, key=lambda path: path.removeprefix("!")):
        part = layer
        for name in path.removeprefix("!").split("/"):
            parts = named_parts(part) if isinstance(part, keras.layers.Layer) else {}
            if name not in parts and strict:
                raise ValueError(
                    f"Expected {FROZEN} paths of layers or weights of "
                    f"{type(layer).__name__}, or {FROZEN}=[] to train all; received: "
                    f"{path!r} ({nearest(name, list(parts))})"
                )
            part = parts.get(name)
        if part is None:
            missing.append(path)
        else:
            part.trainable = path.startswith("!")
    return missing


def copy_freezing(
    source: Any, target: Any, renamed: dict[str, tuple[str, ...]] | None = None
) -> None:
    """Freezes in a layer what is frozen in another, whose parts may be `renamed`."""
    if not source.trainable:
        target.trainable = False
    paths = {path: {path} for path in frozen_paths(source, inner_models=True)}
    for old, new in (renamed or {}).items():
        for path, names in paths.items():
            if path.endswith(f"/{old}"):
                names |= {path.removesuffix(old) + name for name in new}
    names = sorted(set().union(*paths.values()))
    missing = set(freeze(target, names, strict=renamed is None))
    if lost := [path for path, names in paths.items() if names <= missing]:
        warnings.warn(
            f"Frozen in the source, but trained in {target.name}, which has other "
            f"layers there: {lost}",
            stacklevel=4,
        )


class KeepsFrozen:
    """Layers with parts that `trainable=False` freezes; a config knows which are."""

    # Parts may be made as late as in `build`.
    _frozen_when_built: tuple[str, ...] = ()

    def __setattr__(self, name, value):
        if name == "trainable":
            set_trainable(self, value)
            return
        is_part = isinstance(value, keras.layers.Layer)
        if is_part and not getattr(self, "trainable", True):
            value.trainable = False
        super().__setattr__(name, value)
        if name == "built" and value and self._frozen_when_built:
            freeze(self, self._frozen_when_built)
            self._frozen_when_built = ()

    @classmethod
    def from_config(cls, config: Config) -> Any:
        config = dict(config)
        frozen = config.pop(FROZEN, ())
        layer = super().from_config(config)  # pyright: ignore[reportAttributeAccessIssue]
        if layer.built:
            freeze(layer, frozen)
        else:
            layer._frozen_when_built = tuple(frozen)
        return layer

    def get_config(self):
        config = super().get_config()  # pyright: ignore[reportAttributeAccessIssue]
        return {**config, **self.frozen_config()}

    def frozen_config(self) -> dict[str, list[str]]:
        """Returns the part of the config that says what is frozen, if anything is."""
        frozen = list(self._frozen_when_built) or frozen_paths(self)
        return {FROZEN: frozen} if frozen else {}
