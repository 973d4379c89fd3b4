"""The bases of all backbones: a config, its tower and a functional model.

Axes: B batch, N tokens, D hidden.
"""

import dataclasses
import os
from typing import Any

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_moe.checks import check_dtype
from keras_moe.layers import EncoderConfig, MoEConfig, MuMoEConfig
from keras_moe.models import adaptation, overrides
from keras_moe.models.adaptation import saved_policy, settle_policies
from keras_moe.models.backbone_config import (
    set_docstring,
    set_signature,
)
from keras_moe.models.description import Part
from keras_moe.models.model import MoEModel
from keras_moe.models.soft_slots import config_for_slots
from keras_moe.models.tower import Tower, TowerOutputs
from keras_moe.ops.expert_types import ExpertTypes


class MoEBackbone(MoEModel, keras_hub.models.Backbone):
    """A config, the tower that follows from it, and a functional model.

    This is the base of `ImageBackbone`, `TextBackbone` and the backbones of pairs. A
    subclass has a `config_class`, a frozen dataclass that extends
    `keras_moe.layers.EncoderConfig`: its fields are the arguments of the constructor,
    with their defaults, checks and documentation. `tower` makes the layers of such a
    config, and `_functional` connects them.

    `backbone.routing` holds the symbolic routing record of each MoE block, and
    `backbone.features` the symbolic features at every depth.

    Args:
        dtype: dtype policy; routing is float32 under each.
        **kwargs: fields of `config_class`, and `name` and `trainable`.

    Example:

    >>> from keras_moe.models import MoEBackbone, ViTBackbone
    >>> issubclass(ViTBackbone, MoEBackbone)
    True
    >>> ViTBackbone.config_class().patch_size
    32
    """

    config_class: type = EncoderConfig
    # The kind of input, for descriptions.
    example: str
    # The task under which model hubs list the model.
    pipeline_tag = "feature-extraction"

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "config_class" not in cls.__dict__:
            return
        if "__init__" not in cls.__dict__:
            # A new function, since each class has its own signature.
            def __init__(self, *, dtype=None, **kwargs):
                super(cls, self).__init__(dtype=dtype, **kwargs)

            cls.__init__ = __init__
        set_signature(cls.__init__, cls.config_class)
        set_docstring(cls, cls.config_class)

    def __init__(self, *, dtype: Any = None, **kwargs):
        cls = type(self)
        names = [field.name for field in dataclasses.fields(cls.config_class)]
        own = {name: kwargs.pop(name) for name in names if name in kwargs}
        overrides.check_constructor_arguments(cls, kwargs)
        config = cls.config_class(**own)
        check_dtype("dtype", dtype)

        # === Layers and functional model ===
        inputs, outputs, encoded = cls._functional(config, dtype)
        super().__init__(inputs=inputs, outputs=outputs, dtype=dtype, **kwargs)
        settle_policies(self)
        # Plain attributes: Keras would wrap the dicts of symbolic records.
        object.__setattr__(self, "_routing", encoded.routing)
        object.__setattr__(self, "_block_tokens", encoded.block_tokens)

        # === Config ===
        object.__setattr__(self, "config", config)

    @classmethod
    def tower(cls, config: EncoderConfig, dtype: Any = None) -> Tower:
        """The layers of a backbone, not built: nothing is allocated.

        Args:
            config: arguments of the backbone, a `config_class`.
            dtype: dtype policy.
        """
        raise NotImplementedError

    @classmethod
    def _functional(cls, config, dtype) -> tuple[Any, Any, TowerOutputs]:
        """The symbolic inputs, outputs and `TowerOutputs` of a config."""
        raise NotImplementedError

    @classmethod
    def make_config(cls, config: dict) -> Any:
        """The `config_class` of a dict, in which fields of `moe` may stand flatly."""
        config = overrides.nested_config(cls, config)
        names = [field.name for field in dataclasses.fields(cls.config_class)]
        return cls.config_class(**{k: v for k, v in config.items() if k in names})

    @property
    def moe(self) -> MoEConfig | MuMoEConfig | None:
        """Which blocks are mixtures of experts, and of what; None for a dense model."""
        return self.config.moe

    @property
    def routing(self) -> dict:
        """The symbolic `Routing` of each MoE block, by the block's name.

        A token mixer with experts has its own record, with channels (B, D, E), such as
        "block_0/token_mixer".
        """
        return dict(self._routing)

    @property
    def features(self) -> dict:
        """Symbolic features by name, for `keras.Model(backbone.input, ...)`.

        The outputs by name, and `"block_0"`, ... (B, N, D), the tokens after each
        block.
        """
        return {**self.output, **self._block_tokens}

    @property
    def block_names(self) -> list[str]:
        """The names of the blocks, as `routing` and `get_layer` have them."""
        return [f"block_{index}" for index in range(self.config.num_layers)]

    @property
    def expert_types(self) -> ExpertTypes | None:
        """How many experts of each type an MoE block has; None for a dense model."""
        for name in self._routing:
            return self.get_layer(name).feed_forward.router.expert_types
        return None

    @property
    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments without `name`, `trainable` and `dtype`.

        Unlike `get_config`, it does not make Keras import TensorFlow, which its
        serialisation of the policy does on every backend.
        """
        return self.config.to_dict()

    @property
    def hidden_dim(self) -> int:
        """D."""
        return self.config.hidden_dim

    @classmethod
    def from_config(cls, config: dict) -> "MoEBackbone":
        """Makes a backbone from the result of `get_config`.

        Fields of `moe` may also stand among the others, as in a preset's file.
        """
        return super().from_config(overrides.nested_config(cls, config))

    def get_config(self):
        return {
            "name": self.name,
            "trainable": self.trainable,
            "dtype": saved_policy(self),
            **self.arguments,
        }

    def save_own_variables(self, store):
        store["moe_blocks"] = self._is_moe_block()

    def load_own_variables(self, store):
        if "moe_blocks" not in store.keys():  # noqa: SIM118
            return
        stored, expected = np.array(store["moe_blocks"]), self._is_moe_block()
        if not np.array_equal(stored, expected):
            raise ValueError(
                "Expected weights of a model with the same blocks: "
                f"num_layers={len(expected)}, "
                f"moe_layers={np.flatnonzero(expected).tolist()}; received: "
                f"num_layers={len(stored)}, "
                f"moe_layers={np.flatnonzero(stored).tolist()}"
            )

    def _is_moe_block(self):
        # Keras saves blocks by class and order, so that a dense and an MoE block could
        # swap their weights on loading: the file says which is which.
        return np.array([name in self.routing for name in self.block_names])

    @classmethod
    def config_for_weights(cls, saved: dict, config: dict) -> dict:
        """A config that another config's weights fit, or ValueError if none can.

        A soft router keeps its number of slots at another image or patch size.

        Args:
            saved: config that the weights were saved with.
            config: config of the new model.
        """
        return config_for_slots(cls, saved, config)

    @classmethod
    def unbuilt_blocks(cls, **config) -> list:
        """The blocks of a backbone with these arguments, not built."""
        return list(cls.tower(cls.make_config(config), "float32").blocks)

    @classmethod
    def describe_parts(cls, **config) -> tuple[list[Part], int, int]:
        """The parts of a backbone with their costs, the number of tokens N, and D."""
        raise NotImplementedError

    @classmethod
    def sequence_lengths(cls, **config) -> tuple[int, ...]:
        """The lengths of an example's sequences, whose tokens attend to each other."""
        return (cls.describe_parts(**config)[1],)

    def default_lora_layer_names(self) -> list[str]:
        """The names of the layers that `enable_lora` changes by default."""
        return ["query", "value"]

    def enable_lora(
        self, rank: int, target_layer_names: list[str] | None = None
    ) -> None:
        """Freezes the backbone, and adds trainable low-rank pairs to some layers.

        Call it before `compile`. `save_to_preset` and `save` merge the pairs into the
        weights that they save; `save_lora_weights` saves only the pairs.

        Args:
            rank: rank of the pairs.
            target_layer_names: the last parts of the layers' paths, such as `"query"`
                and `"value"` (None takes these two), `"key"`, `"attention_output"`,
                `"hidden"` and `"output"` (of dense MLPs), or `"experts"`, where each
                expert has its own pairs.
        """
        names = target_layer_names or self.default_lora_layer_names()
        adaptation.add_pairs(self, rank, names)

    def save_lora_weights(self, filepath: str | os.PathLike) -> None:
        """Saves only the low-rank pairs, to a file that ends in `.lora.h5`."""
        adaptation.save_pairs(self, filepath)

    def load_lora_weights(self, filepath: str | os.PathLike) -> None:
        """Loads low-rank pairs; adds them first if `enable_lora` was not called."""
        adaptation.load_pairs(self, filepath)


class ImageBackbone(MoEBackbone):
    """The base of backbones of images: `ViTBackbone`, `MixerBackbone` and your own.

    A subclass has a `config_class`, which extends `ImageConfig`, and `tower`, for which
    `image_tower` does most of the work.

    Args:
        dtype: dtype policy; routing is float32 under each.
        **kwargs: fields of `config_class`, and `name` and `trainable`.

    Input shape:
        (B, height, width, channels), in [-1, 1].

    Output shape:
        (B, N, D).

    Example:

    >>> import keras
    >>> from keras_moe import layers, models
    >>> @keras.saving.register_keras_serializable("my_package")
    ... class PatchMLP(models.ImageBackbone):
    ...     config_class = models.ImageConfig
    ...
    ...     @classmethod
    ...     def tower(cls, config, dtype=None):
    ...         def mixer(spec, index):
    ...             return layers.TokenMLP(8, dtype=dtype, name="token_mlp")
    ...
    ...         return models.image_tower(config, dtype, mixer)
    >>> backbone = PatchMLP(
    ...     image_shape=(8, 8, 3), patch_size=4, hidden_dim=8, num_layers=2, mlp_dim=16
    ... )
    >>> backbone.output_shape
    (None, 4, 8)
    """

    example = "image"
    pipeline_tag = "image-feature-extraction"

    @classmethod
    def _functional(cls, config, dtype):
        images = keras.Input(shape=config.image_shape, name="images")
        encoded = cls.tower(config, dtype)(images)
        return images, encoded.tokens, encoded

    @property
    def image_shape(self) -> tuple:
        """(height, width, channels)."""
        return self.config.image_shape

    @property
    def grid(self) -> tuple[int, int]:
        """The number of patches down and across."""
        return self.get_layer("patch_embedding").grid(self.image_shape)

    @property
    def class_token(self) -> bool:
        """Whether the first token is a class token."""
        return getattr(self.config, "class_token", False)

    @property
    def features(self) -> dict:
        """Symbolic features by name, for `keras.Model(backbone.input, ...)`.

        `"tokens"` (B, N, D) is the output, `"pooled"` (B, D) its class token or the
        average, `"grid"` (B, rows, columns, D) its patches as they lie in the image,
        and `"block_0"`, ... (B, N, D) the tokens after each block.
        """
        tokens, has_class_token = self.output, self.class_token
        patches = tokens[:, 1:] if has_class_token else tokens
        return {
            "tokens": tokens,
            "pooled": tokens[:, 0] if has_class_token else ops.mean(tokens, axis=1),
            "grid": ops.reshape(patches, (-1, *self.grid, self.hidden_dim)),
            **self._block_tokens,
        }

    @classmethod
    def describe_parts(cls, **config) -> tuple[list[Part], int, int]:
        """The parts of a backbone with their costs, the number of tokens N, and D."""
        config = cls.make_config(config)
        return cls.tower(config, "float32").parts(config.image_shape)
