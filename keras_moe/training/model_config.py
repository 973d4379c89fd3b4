"""The section `model` of a recipe: which preset, and what overrides it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_moe.checks import check_bool, check_dtype
from keras_moe.training.section import Section

# Settings that follow from the data or from the recipe itself.
_OTHERS = ("num_classes", "seed")
_OWN = ("preset", "dtype", "load_weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The model that a recipe trains.

    In a file, and in `to_dict`, the overrides stand beside the preset:
    `{"preset": "vmoe_b16", "num_experts": 8}`.

    Args:
        preset: name that `keras_moe.models.from_preset` takes.
        dtype: the dtype policy. With `"mixed_float16"` losses are scaled.
        load_weights: whether training starts from the preset's weights, if it has
            any; False starts from initial ones.
        overrides: arguments that override the preset's, such as
            `{"num_experts": 8}`. The number of classes follows from the data, the seed
            is the recipe's.

    Raises:
        ValueError: if a setting is out of range, or is not JSON.

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
        for name in _OTHERS:
            if name in self.overrides:
                raise ValueError(
                    f"Expected no {name} of the model, which the recipe or its data "
                    f"determine; received: {name}={self.overrides[name]!r}"
                )
        check_dtype("dtype", self.dtype)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "ModelConfig":
        """A model from the settings of a file.

        Args:
            settings: the preset, the dtype, `load_weights`, and any arguments that
                override the preset's.

        Raises:
            ValueError: if there is no preset, or a setting is out of range.
        """
        own = {name: settings[name] for name in _OWN if name in settings}
        overrides = {name: x for name, x in settings.items() if name not in own}
        return super().from_settings({**own, "overrides": overrides})

    def replace(self, **changes: Any) -> "ModelConfig":
        """A model with other settings; another preset with its weights, if it has any.

        Args:
            **changes: any setting. With another `preset` the weights are loaded unless
                `load_weights=False` is among them.

        Raises:
            ValueError: if a setting is unknown or out of range.
        """
        if changes.get("preset", self.preset) != self.preset:
            changes = {"load_weights": True, **changes}
        return super().replace(**changes)

    def to_dict(self) -> dict[str, Any]:
        """All settings, JSON-serialisable, as `from_settings` takes them."""
        settings = super().to_dict()
        overrides = settings.pop("overrides")
        return {**settings, **overrides}
