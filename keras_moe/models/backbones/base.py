"""Base classes of all backbones. Axes: B batch, N tokens, D hidden."""

import dataclasses
import os
from typing import Any, Self

import keras
import numpy as np
from keras import ops

from keras_moe._checks import check_bool, check_concrete, check_dtype
from keras_moe._compat import order_layers
from keras_moe._types import Config, DType, Tensor
from keras_moe.layers import MoEConfig, MuMoEConfig, TowerConfig
from keras_moe.layers.pooling import masked_mean
from keras_moe.layers.tower_config import initialization_rules, warn_of_unused
from keras_moe.models.backbones.config import takes
from keras_moe.models.backbones.tower import Tower, TowerOutputs
from keras_moe.models.base._model import Backbone, MoEModel
from keras_moe.models.loading import _overrides
from keras_moe.models.loading.blueprint import Part
from keras_moe.models.preprocessing.patches import budget
from keras_moe.models.saving import _lora
from keras_moe.models.saving._lora import saved_policy, settle_policies, training_config
from keras_moe.ops._initializers import initial_values
from keras_moe.ops.expert_types import ExpertTypes


class MoEBackbone(MoEModel, Backbone):
    """Base class of `ImageBackbone`, `TextBackbone` and image-text backbones.

    A subclass sets `config_class`, a frozen dataclass that extends
    `keras_moe.layers.TowerConfig`; its fields become the constructor's arguments.
    `tower` creates the layers for a config and `_functional` connects them.

    Args:
        dtype: dtype policy; routing is always float32.
        **kwargs: fields of `config_class`, and `name` and `trainable`.

    Example:

    >>> from keras_moe.models import MoEBackbone, ViTBackbone
    >>> issubclass(ViTBackbone, MoEBackbone)
    True
    >>> ViTBackbone.config_class().patch_size
    32
    """

    config_class: type = TowerConfig
    config: Any
    _routing: dict[str, Any]
    _block_tokens: dict[str, Any]
    # Kind of input, for descriptions.
    example: str
    # Task tag on model hubs.
    pipeline_tag = "feature-extraction"
    output_name = "tokens"

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "config_class" in cls.__dict__ and "__init__" not in cls.__dict__:
            # A new function per class, because each has its own signature.
            def __init__(self, **kwargs):
                super(cls, self).__init__(**kwargs)

            cls.__init__ = takes(cls.config_class)(__init__)  # pyright: ignore

    def __init__(self, *, dtype: DType | None = None, **kwargs):
        cls = type(self)
        for base in (MoEBackbone, ImageBackbone):
            check_concrete(cls, base, "ViTBackbone")
        names = [field.name for field in dataclasses.fields(cls.config_class)]
        own = {name: kwargs.pop(name) for name in names if name in kwargs}
        _overrides.check_constructor_arguments(cls, kwargs)
        # Keras would set it before it knows the layers.
        trainable = check_bool("trainable", kwargs.pop("trainable", True))
        config = cls.config_class(**own)
        check_dtype("dtype", dtype)

        # === Layers and functional model ===
        rules = initialization_rules(config)
        with initial_values(config.seed, cls.__name__, rules) as used:
            inputs, outputs, encoded = cls._functional(config, dtype)
        warn_of_unused(config, used)
        super().__init__(inputs=inputs, outputs=outputs, dtype=dtype, **kwargs)
        order_layers(self)
        settle_policies(self)
        if not trainable:
            self.trainable = False
        # Bypass Keras's attribute tracking, which would wrap these dicts.
        object.__setattr__(self, "_routing", encoded.routing)
        object.__setattr__(self, "_block_tokens", encoded.block_tokens)

        # === Config ===
        object.__setattr__(self, "config", config)

    @classmethod
    def tower(cls, config: TowerConfig, dtype: DType | None = None) -> Tower:
        """Creates the unbuilt layers of a backbone from a `config_class`."""
        raise NotImplementedError

    @classmethod
    def _functional(cls, config, dtype) -> tuple[Any, Any, TowerOutputs]:
        """Returns symbolic inputs, outputs and `TowerOutputs` of a config."""
        raise NotImplementedError

    @classmethod
    def make_config(cls, config: dict) -> Any:
        """Creates a `config_class` from a dict, with nested or flat `moe` fields."""
        config = _overrides.nested_config(cls, config)
        names = [field.name for field in dataclasses.fields(cls.config_class)]
        return cls.config_class(**{k: v for k, v in config.items() if k in names})

    @property
    def backbone(self) -> Self:
        """The model itself, so that `model.backbone` works for tasks and backbones."""
        return self

    def __dir__(self):
        # Keras saves whatever it finds among the attributes, and would go in a circle.
        return [name for name in super().__dir__() if name != "backbone"]

    @property
    def moe(self) -> MoEConfig | MuMoEConfig | None:
        """The MoE configuration; None for a dense model."""
        return self.config.moe

    @property
    def max_patches(self) -> int | None:
        """Most patches of an image, if images have any shape."""
        return budget(self.config).get("max_patches")

    @property
    def ensemble_size(self) -> int:
        """M, the members of an ensemble; 1 for any other model."""
        return getattr(self.moe, "ensemble_size", 1)

    @property
    def routing(self) -> dict:
        """The symbolic `Routing` of each MoE block and expert token mixer, by name."""
        return dict(self._routing)

    @property
    def features(self) -> dict:
        """Symbolic outputs, and tokens after each block (B, N, D) as `"block_0"`..."""
        return {**self.output, **self._block_tokens}

    @property
    def block_names(self) -> list[str]:
        """Block names, as used by `routing` and `get_layer`."""
        return [f"block_{index}" for index in range(self.config.num_layers)]

    @property
    def expert_types(self) -> ExpertTypes | None:
        """The number of experts of each type per MoE block; None if dense."""
        for name in self._routing:
            return self.get_layer(name).feed_forward.router.expert_types
        return None

    @property
    def hidden_dim(self) -> int:
        """Token size D."""
        return self.config.hidden_dim

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Inverts `get_config`; `moe` fields may also be at the top level."""
        return super().from_config(_overrides.nested_config(cls, config))

    def get_config(self):
        return {
            "name": self.name,
            "trainable": self.trainable,
            "dtype": saved_policy(self),
            **self.config.to_dict(),
            **training_config(self),
        }

    def save_own_variables(self, store):
        store["moe_blocks"] = self._is_moe_block()

    def load_own_variables(self, store):
        if "moe_blocks" not in store.keys():  # noqa: SIM118
            return
        stored, expected = np.array(store["moe_blocks"]), self._is_moe_block()
        if not np.array_equal(stored, expected):
            raise ValueError(
                f"Expected weights of num_layers={len(expected)}, moe_layers="
                f"{np.flatnonzero(expected).tolist()}; received: num_layers="
                f"{len(stored)}, moe_layers={np.flatnonzero(stored).tolist()}"
            )

    def _is_moe_block(self):
        # Keras saves blocks by class and order, so a dense and an MoE block could swap
        # weights on loading. Record which is which in the file.
        return np.array([name in self.routing for name in self.block_names])

    @classmethod
    def describe_parts(cls, config: Any) -> tuple[list[Part], int, int]:
        """Returns the parts with costs, the number of tokens N, and D."""
        raise NotImplementedError

    @classmethod
    def sequence_lengths(cls, config: Any) -> tuple[int, ...]:
        """Lengths of the sequences in an example that attend separately."""
        return (cls.describe_parts(config)[1],)

    def enable_lora(
        self, rank: int, target_layer_names: list[str] | None = None
    ) -> None:
        """Freezes the backbone and adds trainable low-rank adapters, before `compile`.

        `save` keeps the adapters; `save_to_preset` and `save_weights` merge them into
        the saved weights, and `save_lora_weights` saves only the adapters.

        Args:
            rank: rank of the adapters.
            target_layer_names: last path components of the layers to adapt: `"query"`
                and `"value"` (the default), `"key"`, `"attention_output"`, `"hidden"`
                and `"output"` (dense MLPs) or `"experts"` (an adapter per expert).
        """
        _lora.add_adapters(self, rank, target_layer_names or ["query", "value"])

    def save_lora_weights(self, filepath: str | os.PathLike) -> None:
        """Saves only the LoRA adapters, to a `.lora.h5` file."""
        _lora.save_adapters(self, filepath)

    def load_lora_weights(self, filepath: str | os.PathLike) -> None:
        """Loads LoRA adapters, calling `enable_lora` first if needed."""
        _lora.load_adapters(self, filepath)


class ReadsTexts:
    """Properties of backbones that read token ids."""

    config: Any

    @property
    def _text_config(self):
        return self.config

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids V."""
        return self._text_config.vocabulary_size

    @property
    def max_length(self) -> int:
        """Maximum text length N."""
        return self._text_config.max_length


class ImageBackbone(MoEBackbone):
    """Base class of image backbones: `ViTBackbone`, `MixerBackbone` and custom ones.

    A subclass sets `config_class`, which extends `ImageConfig`, and defines `tower`,
    usually through `image_tower`.

    Args:
        dtype: dtype policy; routing is always float32.
        **kwargs: fields of `config_class`, and `name` and `trainable`.

    Input shape: (B, height, width, channels), in [-1, 1]. Output shape: (B, N, D).

    Example:

    >>> import keras
    >>> from keras_moe import layers, models
    >>> @keras.saving.register_keras_serializable("my_package")
    ... class PatchMLP(models.ImageBackbone):
    ...     config_class = models.ImageConfig
    ...
    ...     @classmethod
    ...     def tower(cls, config, dtype=None):
    ...         return models.image_tower(
    ...             config, dtype, lambda spec, index: layers.TokenMLP(8, dtype=dtype)
    ...         )
    >>> PatchMLP(image_shape=(32, 32, 3), patch_size=16, num_layers=1).output_shape
    (None, 4, 768)
    """

    example = "image"
    pipeline_tag = "image-feature-extraction"

    @classmethod
    def _functional(cls, config, dtype):
        images: Any = keras.Input(shape=config.image_shape, name="images")
        encoded = cls.tower(config, dtype)(images)
        return images, encoded.tokens, encoded

    @property
    def image_shape(self) -> tuple:
        """(height, width, channels)."""
        return self.config.image_shape

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches (rows, columns)."""
        return self.get_layer("patch_embedding").grid(self.image_shape)

    @property
    def class_token(self) -> bool:
        """Whether the first token is a class token."""
        return getattr(self.config, "class_token", False)

    @property
    def features(self) -> dict:
        """Symbolic features by name, for `keras.Model(backbone.input, ...)`.

        In addition to those of `MoEBackbone`: `"tokens"` (B, N, D), `"pooled"` (B, D),
        the class token or average, `"grid"` (B, rows, columns, D), the patches, and
        `"registers"` (B, count, D) if there are some. Images of any shape have
        `"patches"` (B, L, D) instead of a grid. An ensemble's are the means over its
        members.
        """
        tokens, first, members = self.output, self.first_patch, self.ensemble_size
        if members > 1:
            shape = (-1, members, tokens.shape[1] // members, self.hidden_dim)
            tokens = ops.mean(ops.reshape(tokens, shape), axis=1)
        patches, mask = tokens[:, first:], self.token_mask(self.input)
        if self.class_token:
            pooled = tokens[:, 0]
        elif mask is None:
            pooled = ops.mean(patches, axis=1)
        else:
            pooled = masked_mean(patches, mask[:, first:], tokens.dtype)
        features = {"tokens": tokens, "pooled": pooled, **self.patches_of(tokens)}
        if first > self.class_token:
            features["registers"] = tokens[:, int(self.class_token) : first]
        return {**features, **self._block_tokens}

    def token_mask(self, inputs: object) -> Tensor | None:
        """Which tokens (B, N) of symbolic inputs are no padding; None for all."""
        return None

    @property
    def first_patch(self) -> int:
        """How many tokens come before the patches, such as the class token."""
        return int(self.class_token) + getattr(self.config, "register_tokens", 0)

    def patches_of(self, tokens: Tensor) -> dict[str, Tensor]:
        """The patches of symbolic tokens (B, N, T), by the name that features have."""
        patches = tokens[:, self.first_patch :]
        return {"grid": ops.reshape(patches, (-1, *self.grid, tokens.shape[-1]))}

    @classmethod
    def describe_parts(cls, config: Any) -> tuple[list[Part], int, int]:
        return cls.tower(config, "float32").parts(config.example_shape)
