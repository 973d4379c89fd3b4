"""What all backbones share: patches, blocks from one plan, features, descriptions.

Axes: B batch, N tokens, D hidden.
"""

import copy
import inspect

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_moe import losses
from keras_moe.checks import (
    check_argument_names,
    check_bool,
    check_dropout,
    check_image_shape,
    check_integer,
    check_seed,
)
from keras_moe.compat import TorchParameters
from keras_moe.layers import (
    ClassToken,
    EncoderBlock,
    LayerNorm,
    MoEEncoderBlock,
    PatchEmbedding,
    PositionEmbedding,
    activations,
    resolve_moe_layers,
)
from keras_moe.layers.block_plan import check_num_layers
from keras_moe.layers.feed_forwards import feed_forward_layers, plain_options
from keras_moe.models.copying import CopyMixin
from keras_moe.models.description import Part
from keras_moe.models.exporting import ExportMixin
from keras_moe.models.input_checks import InputChecksMixin
from keras_moe.models.lora import LoraMixin
from keras_moe.models.preset_loading import PresetMixin
from keras_moe.models.quantization import QuantizedBackboneMixin, settle_policies
from keras_moe.ops.expert_kinds import ExpertKinds
from keras_moe.routers import ROUTERS, SoftRouter

# A feed-forward layer's arguments, as the backbones' constructors call them.
_FEED_FORWARD = set(inspect.signature(feed_forward_layers).parameters)
# What a soft router's number of slots follows from, beside the image's size.
_OF_SLOTS = (
    "num_experts",
    "num_selected_experts",
    "capacity_factor",
    "capacity_rounding",
    "capacity_multiple_of",
    "router_options",
)
_SWITCHES = (
    "class_token",
    "embedding_norm",
    "query_key_norm",
    "query_key_norm_bias",
    "final_norm",
    "rematerialize",
)


class VisionBackbone(
    InputChecksMixin,
    CopyMixin,
    PresetMixin,
    LoraMixin,
    QuantizedBackboneMixin,
    ExportMixin,
    TorchParameters,
    keras_hub.models.Backbone,
):
    """Patches, blocks of a token mixer and a feed-forward layer, and a last norm.

    The base of `ViTBackbone` and `MixerBackbone`, which say what the token mixers are.
    A subclass's constructor hands its own arguments to `_assemble`.

    `backbone.routing` holds the symbolic routing record of each MoE block, and
    `backbone.features` the symbolic features at every depth.
    """

    @staticmethod
    def _token_mixer(index, num_tokens, seeds, dtype, **config):
        """The token mixer of a block, not built, from the constructor's arguments."""
        raise NotImplementedError

    def _assemble(self, config, dtype, kwargs):
        """Builds the functional model of a constructor's `locals()`."""
        config = {
            name: value
            for name, value in config.items()
            if name not in ("self", "__class__", "dtype", "kwargs")
        }
        cls = type(self)
        check_argument_names(kwargs, ["name", "trainable"], cls.__name__, config)
        # Plain values of our own: the caller's may change, or not be JSON.
        config["image_shape"] = check_image_shape(config["image_shape"])
        config["activation"] = activations.serialize(
            activations.get(config["activation"])
        )
        moe_layers, num_layers = config["moe_layers"], config["num_layers"]
        if moe_layers is not None and not isinstance(moe_layers, str):
            check_num_layers(num_layers)
            config["moe_layers"] = list(resolve_moe_layers(moe_layers, num_layers))
        if not isinstance(config["auxiliary_losses"], (str, dict)):
            config["auxiliary_losses"] = losses.serialize(
                losses.get(config["auxiliary_losses"])
            )
        if config["expert_activation"] is not None:
            config["expert_activation"] = activations.serialize(
                activations.get(config["expert_activation"])
            )
        config["router_options"] = plain_options(config["router_options"])
        config = copy.deepcopy(config)

        # === Layers ===
        layers = cls._layers(dtype=dtype, **config)
        blocks = layers.pop("blocks")
        final_norm = layers.pop("final_norm", None)

        # === Functional model ===
        inputs = keras.Input(shape=config["image_shape"], name="images")
        x = inputs
        for layer in layers.values():
            x = layer(x)
        routing, block_tokens, logits = {}, {}, None
        for block in blocks:
            if isinstance(block, MoEEncoderBlock):
                has_residual = block.feed_forward.router.gating_residual
                x, routing[block.name], *of_mixer = block(
                    x, **({"previous_logits": logits} if has_residual else {})
                )
                for record in of_mixer:
                    routing[f"{block.name}/token_mixer"] = record
                logits = routing[block.name].logits
            else:
                x = block(x)
            block_tokens[block.name] = x
        outputs = x if final_norm is None else final_norm(x)
        super().__init__(inputs=inputs, outputs=outputs, dtype=dtype, **kwargs)
        settle_policies(self)
        # Plain attributes: Keras would wrap the dicts of symbolic records.
        object.__setattr__(self, "_routing", routing)
        object.__setattr__(self, "_block_tokens", block_tokens)

        # === Config ===
        object.__setattr__(self, "_config", config)

    @classmethod
    def _layers(cls, dtype, **config):
        """The backbone's layers in order, not built: nothing is allocated."""
        image_shape = check_image_shape(config["image_shape"])
        # Before the seeds of layers are made of it.
        seed = check_seed("seed", config["seed"])
        check_num_layers(config["num_layers"])
        hidden_dim = check_integer("hidden_dim", config["hidden_dim"])
        for name in _SWITCHES:
            if name in config:
                check_bool(name, config[name])
        dropout, epsilon = config["dropout_rate"], config["layer_norm_epsilon"]
        depth_rate = check_dropout("stochastic_depth", config["stochastic_depth"])
        # 0 in the first block, the rate in the last.
        depth_step = depth_rate / max(config["num_layers"] - 1, 1)

        def seeds(index, site):
            # Every site that draws has a seed of its own; the head's is `seed + 1`.
            return None if seed is None else seed + 4 * index + site

        patch_embedding = PatchEmbedding(
            hidden_dim,
            config["patch_size"],
            interpolation=config.get("position_interpolation", "bilinear"),
            dtype=dtype,
            name="patch_embedding",
        )
        grid = patch_embedding.grid(image_shape)
        layers = {"patch_embedding": patch_embedding}
        has_class_token = config.get("class_token", False)
        if has_class_token:
            layers["class_token"] = ClassToken(dtype=dtype, name="class_token")
        if config.get("position_embedding") is not None:
            layers["position_embedding"] = PositionEmbedding(
                grid,
                config["position_embedding"],
                interpolation=config["position_interpolation"],
                dtype=dtype,
                name="position_embedding",
            )
        if config.get("embedding_norm", False):
            layers["embedding_norm"] = LayerNorm(
                epsilon, dtype=dtype, name="embedding_norm"
            )
        layers["embedding_dropout"] = keras.layers.Dropout(
            dropout, seed=seeds(0, 0), dtype=dtype, name="embedding_dropout"
        )
        num_tokens = grid[0] * grid[1] + int(has_class_token)
        feed_forwards = feed_forward_layers(
            num_tokens=num_tokens,
            seeds=lambda index, site: seeds(index + 1, site),
            dtype=dtype,
            **{name: value for name, value in config.items() if name in _FEED_FORWARD},
        )
        layers["blocks"] = []
        for index, feed_forward in enumerate(feed_forwards):
            is_dense = not hasattr(feed_forward, "router")
            layers["blocks"].append(
                (EncoderBlock if is_dense else MoEEncoderBlock)(
                    cls._token_mixer(
                        index,
                        num_tokens,
                        lambda site, index=index: seeds(index + 1, site),
                        dtype,
                        **config,
                    ),
                    feed_forward,
                    dropout=dropout,
                    layer_norm_epsilon=epsilon,
                    seed=seeds(index + 1, 0),
                    rematerialize=config.get("rematerialize", False),
                    stochastic_depth=index * depth_step,
                    dtype=dtype,
                    name=f"block_{index}",
                )
            )
        if config.get("final_norm", True):
            layers["final_norm"] = LayerNorm(epsilon, dtype=dtype, name="final_norm")
        return layers

    @property
    def routing(self) -> dict:
        """The symbolic `Routing` of each MoE block, by the block's name.

        A token mixer with experts has a record of channels (B, D, E) besides, such as
        "block_0/token_mixer".
        """
        return dict(self._routing)

    @property
    def features(self) -> dict:
        """Symbolic features by name, for `keras.Model(backbone.input, ...)`.

        `"tokens"` (B, N, D) is the output, `"pooled"` (B, D) its class token or the
        average, `"grid"` (B, rows, columns, D) its patches where they lie in the image,
        and `"block_0"`, ... (B, N, D) the tokens behind each block.
        """
        rows, columns = self.grid
        tokens = self.output
        patches = tokens[:, 1:] if self.class_token else tokens
        pooled = tokens[:, 0] if self.class_token else ops.mean(tokens, axis=1)
        grid = ops.reshape(patches, (-1, rows, columns, self.hidden_dim))
        return {"tokens": tokens, "pooled": pooled, "grid": grid, **self._block_tokens}

    @property
    def expert_kinds(self) -> ExpertKinds | None:
        """How many experts of each kind an MoE block has; None for a dense model."""
        for name in self._routing:
            return self.get_layer(name).feed_forward.router.kinds
        return None

    @property
    def image_shape(self) -> tuple:
        """(height, width, channels)."""
        return self._config["image_shape"]

    @property
    def grid(self) -> tuple[int, int]:
        """The number of patches down and across."""
        return self.get_layer("patch_embedding").grid(self.image_shape)

    @property
    def hidden_dim(self) -> int:
        """D."""
        return self._config["hidden_dim"]

    @property
    def class_token(self) -> bool:
        """Whether the first token is a class token."""
        return self._config.get("class_token", False)

    @classmethod
    def from_config(cls, config: dict) -> "VisionBackbone":
        """A backbone of `get_config`'s arguments, also of an earlier version's.

        Args:
            config: of `get_config`.
        """
        config = dict(config)
        if config.get("moe_layers") == []:
            config["moe_layers"] = None
        options = config.get("router_options") or {}
        if (
            "evaluation" not in config
            and str(config.get("router")).endswith("expert_choice")
            and options.get("eval_capacity_factor") is not None
        ):
            # Before there was `evaluation`, each image was a group here.
            config["router_options"] = {"batch_invariant": True, **options}
        return super().from_config(config)

    def get_config(self):
        return {**super().get_config(), **copy.deepcopy(self._config)}

    def save_own_variables(self, store):
        # Keras saves blocks by class and order, so a dense and an MoE block could
        # change places on loading: the file says which is which.
        store["moe_blocks"] = self._moe_blocks()

    def load_own_variables(self, store):
        if "moe_blocks" not in store.keys():  # noqa: SIM118
            return
        stored = np.array(store["moe_blocks"])
        if not np.array_equal(stored, self._moe_blocks()):
            raise ValueError(
                "Expected weights of a model with the same blocks: "
                f"num_layers={len(self._moe_blocks())}, "
                f"moe_layers={np.flatnonzero(self._moe_blocks()).tolist()}; received: "
                f"num_layers={len(stored)}, "
                f"moe_layers={np.flatnonzero(stored).tolist()}"
            )

    def _moe_blocks(self):
        num_layers = self._config["num_layers"]
        return np.array([f"block_{i}" in self._routing for i in range(num_layers)])

    @classmethod
    def overrides_for_weights(cls, saved: dict, overrides: dict) -> dict:
        """Overrides of a saved config, completed so that its weights still fit.

        Args:
            saved: the config that the weights were saved with.
            overrides: arguments that replace some of its.

        Returns:
            The overrides. A soft router keeps its number of slots at another image or
            patch size.

        Raises:
            ValueError: if no weights of `saved` could fit, as far as Keras's message
                would not say why.
        """
        for name in ("zero_experts", "copy_experts", "constant_experts"):
            if overrides.get(name, saved.get(name)) != saved.get(name):
                raise ValueError(
                    f"Expected {name}={saved.get(name)!r}, as in the saved weights; "
                    f"received: {name}={overrides[name]!r}. Load with "
                    "load_weights=False to start anew."
                )
        router = saved.get("router")
        cls_now, _ = ROUTERS.get(overrides.get("router", router), (None, None))
        cls_then, _ = ROUTERS.get(router, (None, None))
        if saved.get("moe_layers") is None or cls_then is None or cls_now is None:
            return overrides
        if SoftRouter in (cls_now, cls_then) and cls_now is not cls_then:
            raise ValueError(
                f"Expected a router with the weights of router={router!r}; received: "
                f"router={overrides['router']!r}, whose weights are others. Load with "
                "load_weights=False to start anew."
            )
        if cls_now is not SoftRouter:
            return overrides
        options = overrides.get("router_options") or saved.get("router_options") or {}
        sizes = {name: saved[name] for name in ("image_shape", "patch_size")}
        expected = cls._soft_slots(saved)
        found = cls._soft_slots(
            {**saved, **overrides, "router_options": options, **sizes}
        )
        if found not in (expected, None):
            changed = [
                f"{name}={overrides[name]!r}"
                for name in _OF_SLOTS
                if overrides.get(name) not in (None, saved.get(name))
            ]
            raise ValueError(
                f"Expected arguments that keep the {expected} slots of each expert, "
                "which are weights of a soft router; received: "
                f"{', '.join(changed)}, which make {found}. Load with "
                "load_weights=False to start anew."
            )
        if options.get("num_slots") is None and sizes.keys() & overrides.keys():
            options = {**options, "num_slots": expected}
            options.pop("capacity_factor", None)
        elif "router_options" not in overrides:
            return overrides
        return {**overrides, "router_options": options or None}

    @classmethod
    def _soft_slots(cls, config):
        """The slots of each expert of a soft router, or None without MoE blocks."""
        given = (config.get("router_options") or {}).get("num_slots")
        if given is not None:
            return given
        blocks = cls.unbuilt_blocks(**config)
        soft = next((b for b in blocks if isinstance(b, MoEEncoderBlock)), None)
        return soft and soft.feed_forward.router.slots_per_expert

    @classmethod
    def _complete(cls, config):
        """The arguments in `config` that layers follow from, and the defaults."""
        parameters = inspect.signature(cls.__init__).parameters
        defaults = {
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.default is not parameter.empty
        }
        not_of_layers = ("dtype", "name", "trainable")
        complete = {**defaults, **config}
        return {k: v for k, v in complete.items() if k not in not_of_layers}

    @classmethod
    def unbuilt_blocks(cls, **config) -> list:
        """The blocks of a backbone, not built.

        Args:
            **config: the arguments of the constructor. No weight is allocated.
        """
        return cls._layers(dtype="float32", **cls._complete(config))["blocks"]

    @classmethod
    def describe_parts(cls, **config) -> tuple[list[Part], int, int]:
        """The parts with their costs, the number of tokens N, and D.

        Args:
            **config: the arguments of the constructor. No weight is allocated.
        """
        config = cls._complete(config)
        layers = cls._layers(dtype="float32", **config)
        patch_embedding = layers["patch_embedding"]
        dim = patch_embedding.hidden_dim
        image_shape = tuple(config["image_shape"])
        rows, columns = patch_embedding.grid(image_shape)
        num_patches, channels = rows * columns, image_shape[-1]
        num_tokens = num_patches + ("class_token" in layers)
        embedding = patch_embedding.parameters(channels)
        if "class_token" in layers:
            embedding += dim
        if (
            "position_embedding" in layers
            and layers["position_embedding"].kind == "learned"
        ):
            embedding += num_tokens * dim
        if "embedding_norm" in layers:
            embedding += 2 * dim
        flops = patch_embedding.flops(num_patches, channels)
        parts = [Part("embedding", "patches", embedding, embedding, flops)]
        for block in layers["blocks"]:
            kind = "dense"
            if isinstance(block, MoEEncoderBlock):
                router = block.feed_forward.router
                kind = f"MoE {router.kinds}, {router.summary}"
            parts.append(
                Part(
                    block.name,
                    kind,
                    block.parameters(num_tokens, dim),
                    block.active_parameters(num_tokens, dim),
                    block.flops(num_tokens, dim),
                )
            )
        if "final_norm" in layers:
            parts.append(Part("final_norm", "norm", 2 * dim, 2 * dim, 0))
        return parts, num_tokens, dim
