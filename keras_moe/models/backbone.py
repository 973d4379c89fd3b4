"""The base of all backbones: a config, its tower and a functional model.

Axes: B batch, N tokens, D hidden.
"""

import copy
import os
from typing import Any

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_moe.checks import check_dtype, check_image_shape
from keras_moe.layers import (
    MoEConfig,
    MoEEncoderBlock,
    MuMoEConfig,
    activations,
    moe_config,
)
from keras_moe.models import adaptation, overrides
from keras_moe.models.adaptation import saved_policy, settle_policies
from keras_moe.models.description import Part
from keras_moe.models.model import MoEModel
from keras_moe.models.overrides import complete_config
from keras_moe.models.tower import Tower
from keras_moe.ops.expert_types import ExpertTypes
from keras_moe.routers import SoftRouter
from keras_moe.routers.registry import router_class


class MoEBackbone(MoEModel, keras_hub.models.Backbone):
    """A config, the tower that follows from it, and a functional model.

    This is the base of `ViTBackbone` and `MixerBackbone`, and of one's own backbones: a
    subclass has a constructor with its arguments by name, which hands them to this
    one, and `tower`, which makes the layers of such arguments.

    `backbone.routing` holds the symbolic routing record of each MoE block, and
    `backbone.features` the symbolic features at every depth.

    Args:
        config: the subclass's arguments by name, with `image_shape`, `hidden_dim`,
            `num_layers`, `activation` and `moe`.
        dtype: dtype policy.
        **kwargs: arguments of `keras_hub.models.Backbone`.

    Input shape:
        (B, height, width, channels).

    Output shape:
        (B, N, D).

    Raises:
        ValueError: if an argument is unknown or out of range.

    Example:

    >>> from keras_moe.models import MoEBackbone, ViTBackbone
    >>> issubclass(ViTBackbone, MoEBackbone)
    True
    """

    # The kind of input, for descriptions.
    example = "image"
    # The task under which model hubs list the model.
    pipeline_tag = "image-feature-extraction"

    @classmethod
    def tower(cls, config: dict, dtype: Any = None) -> Tower:
        """The layers of a backbone, not built: nothing is allocated.

        Args:
            config: all arguments of the constructor, but `dtype`.
            dtype: dtype policy.
        """
        raise NotImplementedError

    def __init__(self, config: dict, dtype: Any = None, **kwargs):
        cls = type(self)
        overrides.check_constructor_arguments(cls, kwargs)
        config = cls._plain_config(config)
        check_dtype("dtype", dtype)

        # === Layers and functional model ===
        inputs, outputs, encoded = cls._functional(config, dtype)
        super().__init__(inputs=inputs, outputs=outputs, dtype=dtype, **kwargs)
        settle_policies(self)
        # Plain attributes: Keras would wrap the dicts of symbolic records.
        object.__setattr__(self, "_routing", encoded.routing)
        object.__setattr__(self, "_block_tokens", encoded.block_tokens)

        # === Config ===
        object.__setattr__(self, "_config", config)

    @classmethod
    def _plain_config(cls, config):
        """Plain values of the backbone's own: the caller's may change or be no JSON."""
        moe = moe_config(config["moe"])
        moe = moe and moe.for_layers(config["num_layers"])
        return {
            **copy.deepcopy({k: v for k, v in config.items() if k != "moe"}),
            **cls._checked_sizes(config),
            "activation": activations.plain(config["activation"]),
            "moe": moe and moe.to_dict(),
        }

    @classmethod
    def _checked_sizes(cls, config):
        """The sizes of the inputs, checked and as plain values."""
        return {"image_shape": check_image_shape(config["image_shape"])}

    @classmethod
    def _functional(cls, config, dtype):
        """The symbolic inputs, outputs and `TowerOutputs` of a config."""
        images = keras.Input(shape=config["image_shape"], name="images")
        encoded = cls.tower(config, dtype)(images)
        return images, encoded.tokens, encoded

    @property
    def moe(self) -> MoEConfig | MuMoEConfig | None:
        """Which blocks are mixtures of experts, and of what; None for a dense model."""
        return moe_config(self._config["moe"])

    @property
    def routing(self) -> dict:
        """The symbolic `Routing` of each MoE block, by the block's name.

        A token mixer with experts has a record of its own, with channels (B, D, E),
        such as "block_0/token_mixer".
        """
        return dict(self._routing)

    @property
    def features(self) -> dict:
        """Symbolic features by name, for `keras.Model(backbone.input, ...)`.

        `"tokens"` (B, N, D) is the output, `"pooled"` (B, D) its class token or the
        average, `"grid"` (B, rows, columns, D) its patches where they lie in the image,
        and `"block_0"`, ... (B, N, D) the tokens behind each block.
        """
        features = image_features(self.output, self.grid, self.class_token)
        return {**features, **self._block_tokens}

    @property
    def block_names(self) -> list[str]:
        """The names of the blocks, by which `routing` and `get_layer` have them."""
        return [f"block_{index}" for index in range(self._config["num_layers"])]

    @property
    def expert_types(self) -> ExpertTypes | None:
        """How many experts of each kind an MoE block has; None for a dense model."""
        for name in self._routing:
            return self.get_layer(name).feed_forward.router.expert_types
        return None

    @property
    def image_shape(self) -> tuple:
        """(height, width, channels), for backbones of images."""
        if "image_shape" not in self._config:
            raise AttributeError(f"{type(self).__name__} has no image_shape")
        return self._config["image_shape"]

    @property
    def grid(self) -> tuple[int, int]:
        """The number of patches down and across."""
        return self.get_layer("patch_embedding").grid(self.image_shape)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the constructor without `name`, `trainable` and `dtype`.

        They are those of `get_config`, which makes Keras import TensorFlow on every
        backend: its serialisation of the policy looks for TensorFlow's types.
        """
        return copy.deepcopy(self._config)

    @property
    def hidden_dim(self) -> int:
        """D."""
        return self._config["hidden_dim"]

    @property
    def class_token(self) -> bool:
        """Whether the first token is a class token."""
        return self._config.get("class_token", False)

    @classmethod
    def from_config(cls, config: dict) -> "MoEBackbone":
        """Makes a backbone from the result of `get_config`.

        Args:
            config: arguments of the constructor. Fields of `moe` may also be given
                beside the others, as in a preset's file.
        """
        return super().from_config(overrides.nested_config(cls, config))

    def get_config(self):
        return {
            "name": self.name,
            "trainable": self.trainable,
            "dtype": saved_policy(self),
            **copy.deepcopy(self._config),
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
        # change places on loading: the file says which is which.
        return np.array([name in self.routing for name in self.block_names])

    @classmethod
    def config_for_weights(cls, saved: dict, config: dict) -> dict:
        """A config that another config's weights still fit, as far as they can.

        Args:
            saved: config that the weights were saved with.
            config: config of the new model.

        Returns:
            The new config. A soft router keeps its number of slots at another image or
            patch size.

        Raises:
            ValueError: if no weights of `saved` could fit, where Keras's message would
                not say why.
        """
        return config_for_slots(cls, saved, config)

    @classmethod
    def unbuilt_blocks(cls, **config) -> list:
        """The blocks of a backbone, not built.

        Args:
            **config: arguments of the constructor. No weight is allocated.
        """
        config = overrides.complete_config(cls, config)
        return list(cls.tower(config, "float32").blocks)

    @classmethod
    def describe_parts(cls, **config) -> tuple[list[Part], int, int]:
        """The parts with their costs, the number of tokens N, and D.

        Args:
            **config: arguments of the constructor. No weight is allocated.
        """
        config = overrides.complete_config(cls, config)
        image_shape = check_image_shape(config["image_shape"])
        return cls.tower(config, "float32").parts(image_shape)

    @classmethod
    def sequence_lengths(cls, **config) -> tuple[int, ...]:
        """The numbers of tokens of an example's sequences, which attend to each other.

        Args:
            **config: arguments of the constructor. No weight is allocated.
        """
        return (cls.describe_parts(**config)[1],)

    def default_lora_layer_names(self) -> list[str]:
        """The names of the layers that `enable_lora` changes by default."""
        return ["query", "value"]

    def enable_lora(
        self, rank: int, target_layer_names: list[str] | None = None
    ) -> None:
        """Freezes the backbone, and adds trainable low-rank pairs to some layers.

        Call it before `compile`. `save_to_preset` and `save` merge the pairs into the
        weights that they save; `save_lora_weights` saves the pairs alone.

        Args:
            rank: rank of the pairs.
            target_layer_names: the last parts of the layers' paths, such as `"query"`
                and `"value"` (None takes these two), `"key"`, `"attention_output"`,
                `"hidden"` and `"output"` (of dense MLPs), or `"experts"`, where each
                expert has pairs of its own.

        Raises:
            ValueError: if no layer of a name can have such pairs.
        """
        names = target_layer_names or self.default_lora_layer_names()
        adaptation.add_pairs(self, rank, names)

    def save_lora_weights(self, filepath: str | os.PathLike) -> None:
        """Saves the low-rank pairs alone.

        Args:
            filepath: path of the file, which ends with `.lora.h5`.

        Raises:
            ValueError: if there are no pairs, or the name ends otherwise.
            OSError: with the path and the bytes, if the file cannot be written. An
                older one stays as it was.
        """
        adaptation.save_pairs(self, filepath)

    def load_lora_weights(self, filepath: str | os.PathLike) -> None:
        """Loads low-rank pairs, after adding them where that was not done.

        Args:
            filepath: path of a file that `save_lora_weights` has written.

        Raises:
            ValueError: if the file is damaged, or its pairs do not fit the backbone's.
        """
        adaptation.load_pairs(self, filepath)


def image_features(
    tokens: Any, grid: tuple[int, int], class_token: bool
) -> dict[str, Any]:
    """The tokens themselves, pooled to one vector, and as a grid."""
    patches = tokens[:, 1:] if class_token else tokens
    pooled = tokens[:, 0] if class_token else ops.mean(tokens, axis=1)
    grid = ops.reshape(patches, (-1, *grid, tokens.shape[-1]))
    return {"tokens": tokens, "pooled": pooled, "grid": grid}


_ZERO_COMPUTATION = ("zero_experts", "copy_experts", "constant_experts")
_SIZES = ("image_shape", "patch_size", "max_length")
# The number of slots follows from these, beside the size of an image or a text.
_FIELDS = (
    "num_experts",
    "num_selected_experts",
    "capacity_factor",
    "capacity_rounding",
    "router_options",
)


def config_for_slots(cls: type, saved: dict, config: dict) -> dict:
    """A backbone's config whose routers have the weights of another's."""
    before, now = moe_config(saved.get("moe")), moe_config(config.get("moe"))
    for name in _ZERO_COMPUTATION:
        expected = getattr(before, name, 0)
        if getattr(now, name, 0) != expected:
            raise ValueError(
                f"Expected {name}={expected!r}, as in the saved weights; received: "
                f"{name}={getattr(now, name, 0)!r}. Load with load_weights=False to "
                "start anew."
            )
    if before is None or before.moe_layers is None:
        return config
    if _is_soft(before) is None or _is_soft(now) is None:
        return config
    if _is_soft(before) != _is_soft(now):
        raise ValueError(
            f"Expected a router with the weights of router={before.router!r}; "
            f"received: router={now.router!r}, whose weights are others. Load with "
            "load_weights=False to start anew."
        )
    if not _is_soft(now):
        return config
    options = dict(now.router_options or before.router_options or {})
    now = now.replace(router_options=options or None)
    saved = complete_config(cls, saved)
    config = {**config, "moe": now.to_dict()}
    sizes = {name: saved[name] for name in _SIZES if name in saved}
    expected = _num_slots(cls, saved)
    received = _num_slots(cls, complete_config(cls, {**config, **sizes}))
    if received not in (expected, None):
        changed = [
            f"{name}={getattr(now, name)!r}"
            for name in _FIELDS
            if getattr(now, name) != getattr(before, name)
        ]
        raise ValueError(
            f"Expected arguments that keep the {expected} slots of each expert, which "
            f"are weights of a soft router; received: {', '.join(changed)}, which make "
            f"{received}. Load with load_weights=False to start anew."
        )
    complete = complete_config(cls, config)
    is_resized = any(_sizes(complete[name]) != _sizes(saved[name]) for name in sizes)
    if options.get("num_slots") is None and is_resized:
        options.pop("capacity_factor", None)
        options["num_slots"] = expected
    return {**config, "moe": now.replace(router_options=options or None).to_dict()}


def _is_soft(moe: Any) -> bool | None:
    """Whether a config's routers are soft; None where there are no slots to compare."""
    if not isinstance(moe, MoEConfig) or isinstance(moe.router, dict):
        return None
    return issubclass(router_class(moe.router)[0], SoftRouter)


def _num_slots(cls, config):
    """The slots of each expert of a soft router, or None without MoE blocks."""
    options = moe_config(config["moe"]).router_options or {}
    if options.get("num_slots") is not None:
        return options["num_slots"]
    blocks = cls.tower(config, "float32").blocks
    soft = next((b for b in blocks if isinstance(b, MoEEncoderBlock)), None)
    return soft and soft.feed_forward.router.slots_per_expert


def _sizes(size):
    return list(size) if isinstance(size, (list, tuple)) else size
