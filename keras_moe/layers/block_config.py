"""The base of configs that say which blocks of an encoder are mixtures of experts."""

import dataclasses
from typing import Any, Self

from keras_moe.checks import check_argument_names
from keras_moe.layers.moe_layers import check_num_layers, resolve_moe_layers


class BlockConfig:
    """The base of `MoEConfig` and `MuMoEConfig`: frozen dataclasses with
    `moe_layers`.
    """

    moe_layers: Any
    # The number of modalities that routers tell apart, by `modality_ids`.
    modality_count = None

    @classmethod
    def field_names(cls) -> list[str]:
        """The names of the config's fields."""
        return [field.name for field in dataclasses.fields(cls)]

    def replace(self, **changes: Any) -> Self:
        """A config with other values for some fields."""
        check_argument_names(changes, self.field_names(), type(self).__name__)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict:
        """The fields as plain values, from which `from_dict` makes an equal config."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, config: dict) -> Self:
        """A config of `to_dict`'s result; fields that are left out have their
        defaults.
        """
        check_argument_names(config, cls.field_names(), cls.__name__)
        return cls(**config)

    def for_layers(self, num_layers: int) -> Self:
        """The config with the indices of an encoder's blocks, if it has indices."""
        if self.moe_layers is None or isinstance(self.moe_layers, str):
            return self
        indices = resolve_moe_layers(self.moe_layers, check_num_layers(num_layers))
        return self.replace(moe_layers=list(indices))
