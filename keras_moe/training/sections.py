"""Recipe sections: settings that share a heading in a file."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from keras_moe._checks import check_argument_names, check_bool, check_dtype


class Section:
    """Base class of a recipe's sections: frozen dataclasses with JSON values."""

    title: ClassVar[str] = "settings"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for kind, article in ((str, "a string"), (dict, "a dict")):
                if field.type is kind and not isinstance(value, kind):
                    raise ValueError(
                        f"Expected {field.name} to be {article}; "
                        f"received: {field.name}={value!r}"
                    )
            # Copied and normalised, as if it came from a file.
            object.__setattr__(self, field.name, json_copy(field.name, value))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "Section":
        """Builds a section from the settings of a file."""
        names = [field.name for field in dataclasses.fields(cls)]
        check_argument_names(settings, names, f"the section {cls.title!r} of a recipe")
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings as JSON data for `from_settings`."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> "Section":
        """Returns a copy with changed settings."""
        return type(self).from_settings({**self.to_dict(), **changes})


def json_copy(name: str, value: Any) -> Any:
    """Returns a copy of a value after a round trip through JSON."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Expected {name} to be JSON; received: {name}={value!r}"
        ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The model that a recipe trains.

    In files and in `to_dict`, overrides are on the same level as the preset:
    `{"preset": "vmoe_b16", "num_experts": 8}`.

    Args:
        preset: a name for `keras_moe.models.from_preset`.
        dtype: dtype policy. `"mixed_float16"` scales the loss.
        load_weights: whether training starts from the preset's weights, if it has any.
        overrides: arguments that override the preset's, such as `{"num_experts": 8}`.
            Classes come from the data and the seed from the recipe.

    Example:

    >>> from keras_moe.training import ModelConfig
    >>> config = ModelConfig.from_settings({"preset": "vmoe_b16", "num_experts": 8})
    >>> config.replace(router="soft").overrides
    {'num_experts': 8, 'router': 'soft'}
    """

    title = "model"

    preset: str
    dtype: str = "float32"
    load_weights: bool = True
    overrides: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        check_bool("load_weights", self.load_weights)
        check_dtype("dtype", self.dtype)
        # These follow from the data and the recipe.
        for name in ("num_classes", "seed"):
            if name in self.overrides:
                raise ValueError(
                    f"Expected no {name} of the model, which the recipe or its data "
                    f"determine; received: {name}={self.overrides[name]!r}"
                )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "ModelConfig":
        """Builds the section from a file's settings; unknown names are overrides."""
        own = {
            name: settings[name]
            for name in ("preset", "dtype", "load_weights")
            if name in settings
        }
        overrides = {name: x for name, x in settings.items() if name not in own}
        return super().from_settings({**own, "overrides": overrides})

    def replace(self, **changes: Any) -> "ModelConfig":
        """Returns a changed copy; a new `preset` loads its weights by default."""
        if changes.get("preset", self.preset) != self.preset:
            changes = {"load_weights": True, **changes}
        return super().replace(**changes)

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings as JSON data for `from_settings`."""
        settings = super().to_dict()
        overrides = settings.pop("overrides")
        return {**settings, **overrides}
