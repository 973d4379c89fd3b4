"""Mixtures of experts inside KerasHub's language models.

Axes: B batch, N tokens, E experts, D hidden, H mlp.
"""

import contextlib
import inspect
import types
from typing import Any

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_moe import compat
from keras_moe.freezing import copy_freezing
from keras_moe.layers import EncoderSpec, Experts, MoE
from keras_moe.layers import activations as named_activations
from keras_moe.layers.inner_call import inner_call
from keras_moe.layers.layer import build_once
from keras_moe.losses import AuxiliaryLoss
from keras_moe.models.decoder import check_causal
from keras_moe.models.overrides import updated_moe
from keras_moe.routers import TokenChoiceRouter

# An activation such as SiLU or GELU is x * sigmoid(x): at 32 it is 32 in every dtype,
# and a power of two divides without rounding.
_OPEN = 32.0
# For groups of tokens in training, where a model does not tell.
_USUAL_LENGTH = 1024


class _Shared:
    """What the experts of one model hand on: the padding mask and the last logits."""

    mask = logits = None


class ReplacedFeedForward(keras.layers.Layer):
    """A mixture instead of a feed-forward, with tokens for its only input."""

    def __init__(self, moe, between, scale=1.0, shared=(), router_logits=False):
        super().__init__(name="experts_in_place", dtype=moe.dtype_policy)
        self.moe, self.scale, self.router_logits = moe, scale, router_logits
        # An expert for all tokens, and its gate.
        self.shared = list(shared)
        self.between = between
        # Whether a later block's router reads the logits.
        self.hands_on = False

    def build(self, input_shape):
        build_once(self.moe, input_shape)

    def call(self, tokens, attention_mask=None, training=None):
        arguments = {"training": training}
        if training:
            # Nothing competes with padding at inference.
            arguments["mask"] = self.between.mask
        if self.moe.router.gating_residual:
            arguments["previous_logits"] = self.between.logits
        outputs, routing = inner_call(self.moe, tokens, **arguments)
        self.between.logits = routing.logits if self.hands_on else None
        if self.shared:
            expert, gate = self.shared
            outputs = outputs + expert(tokens) * ops.sigmoid(gate(tokens))
        if self.scale != 1:
            outputs = outputs * self.scale
        if not self.router_logits:
            return outputs
        return outputs, ops.reshape(routing.logits, (-1, self.moe.router.num_experts))

    def compute_output_spec(self, tokens, attention_mask=None, training=None):
        outputs = keras.KerasTensor(tokens.shape, self.compute_dtype)
        logits = keras.KerasTensor((None, self.moe.router.num_experts), "float32")
        return (outputs, logits) if self.router_logits else outputs


class _OpenGate(keras.layers.Layer):
    """A gate that lets through what it multiplies, times a constant."""

    def call(self, tokens):
        return ops.full((1, 1, 1), _OPEN, dtype=self.compute_dtype)


def is_language_model(model: Any) -> bool:
    """Whether a model is one of KerasHub's that generate text, or its backbone."""
    backbone = getattr(model, "backbone", model)
    return (
        isinstance(backbone, keras_hub.models.Backbone)
        and not type(backbone).__module__.startswith("keras_moe")
        and hasattr(backbone, "transformer_layers")
        and hasattr(backbone, "token_embedding")
    )


def decoder_layers(model: Any) -> list[keras.layers.Layer]:
    """The decoder layers of a KerasHub language model."""
    return list(getattr(model, "backbone", model).transformer_layers)


def example_inputs(model: Any) -> dict[str, np.ndarray]:
    """Random token ids for a language model of texts alone."""
    backbone = getattr(model, "backbone", model)
    if set(backbone.input) != {"token_ids", "padding_mask"}:
        raise ValueError(
            "Expected images=..., a dict of the model's inputs, unless these are "
            f"token_ids and padding_mask; received: {type(backbone).__name__} with "
            f"{sorted(backbone.input)}"
        )
    shape = (4, min(16, getattr(backbone, "max_sequence_length", None) or 16))
    generator = np.random.default_rng(0)
    ids = generator.integers(backbone.vocabulary_size, size=shape, dtype="int32")
    return {"token_ids": ids, "padding_mask": np.ones_like(ids)}


def copied_language_model(model: Any) -> Any:
    """A model with the same weights, which shares the preprocessor."""
    backbone = getattr(model, "backbone", model)
    new = type(backbone).from_config(backbone.get_config())
    for old_weight, new_weight in zip(backbone.weights, new.weights, strict=True):
        # Through an array: on JAX both variables would share one buffer.
        new_weight.assign(ops.convert_to_numpy(old_weight))
    copy_freezing(backbone, new)
    if backbone is model:
        return new
    return type(model)(backbone=new, preprocessor=model.preprocessor)


def check_dense(model: Any) -> None:
    """Raises ValueError unless all feed-forwards are known, dense and plain."""
    for layer in decoder_layers(model):
        kind, name = type(layer).__name__, layer.name
        if _experts_of(layer) is not None or compat.expert_block(layer)[0]:
            raise ValueError(
                "Expected a dense model; received: one with mixtures of experts in "
                f"{name!r} (KerasHub's own become ours by models.replace_moe)"
            )
        if kind not in compat.FEED_FORWARDS:
            raise ValueError(
                "Expected decoder layers whose feed-forward is known, one of "
                f"{sorted(compat.FEED_FORWARDS)}; received: {kind} in "
                f"{type(model).__name__}"
            )
        for inner in compat.flatten_layers(layer):
            has_lora = getattr(inner, "lora_enabled", False)
            if has_lora or inner.quantization_mode:
                raise ValueError(
                    "Expected a model of plain weights; received: "
                    f"{inner.path!r} with lora_enabled={has_lora}, "
                    f"quantization_mode={inner.quantization_mode!r}"
                )


def _experts_of(decoder):
    """The mixture that stands in a decoder layer, or None."""
    for layer in compat.flatten_layers(decoder):
        if isinstance(layer, ReplacedFeedForward):
            return layer
    return None


def replace_feed_forwards(model: Any, overrides: dict) -> dict[str, tuple]:
    """Puts mixtures of experts into a dense model, in place.

    `overrides` are flat arguments, as of a backbone. Returns the new layer and the
    weights of the dense one for each changed decoder layer, by its name.
    """
    decoders = decoder_layers(model)
    names = compat.FEED_FORWARDS[type(decoders[0]).__name__]
    dense = [_dense_weights(decoder) for decoder in decoders]
    spec = _encoder_spec(model, decoders[0], names, dense[0], dict(overrides))
    between, changed, previous = _Shared(), {}, None
    for decoder, weights, moe in zip(decoders, dense, spec.moe.feed_forwards(spec)):
        if not hasattr(moe, "router"):
            continue
        is_gated = names.gate is not None
        scale = 1 / _OPEN if is_gated else 1.0
        experts = ReplacedFeedForward(moe, between, scale)
        experts.trainable = getattr(decoder, names.hidden).trainable
        if moe.router.gating_residual and previous is not None:
            previous.hands_on = True
        previous = experts
        _put(decoder, names.hidden, experts, weights["hidden_kernel"].shape[0])
        if is_gated:
            gate = _OpenGate(dtype=decoder.dtype_policy, name="open_gate")
            compat.replace_layer(decoder, names.gate, gate)
        identity = keras.layers.Identity(dtype=decoder.dtype_policy, name="identity")
        compat.replace_layer(decoder, names.output, identity)
        _hand_on_mask(decoder, between)
        changed[decoder.name] = (moe, weights)
    _settle(model)
    return changed


def _dense_weights(decoder):
    """Kernels and biases of a decoder layer's feed-forward, as arrays."""
    names = compat.FEED_FORWARDS[type(decoder).__name__]
    weights = {}
    for part in ("hidden", "output", "gate"):
        name = getattr(names, part)
        if name is None:
            continue
        layer = getattr(decoder, name)
        for weight in ("kernel", "bias"):
            value = getattr(layer, weight)
            if value is not None:
                weights[f"{part}_{weight}"] = value
    return {
        name: ops.convert_to_numpy(ops.cast(value, "float32"))
        for name, value in weights.items()
    }


def _encoder_spec(model, decoder, names, weights, overrides):
    """The arguments by which a model's mixtures are made, like a backbone's of ours."""
    activation = names.activation or decoder.activation
    is_gated = names.gate is not None
    value = named_activations.get(activation)(ops.convert_to_tensor([_OPEN]))
    if is_gated and float(value[0]) != _OPEN:
        raise ValueError(
            "Expected a gated feed-forward with an activation that keeps large numbers "
            f"such as silu or gelu; received: activation={activation!r}"
        )
    if is_gated and overrides["router"] == "mumoe":
        raise ValueError(
            "Expected a feed-forward without a gate for router='mumoe', whose layers "
            f"have none; received: {type(decoder).__name__}"
        )
    seed = overrides.pop("seed", None)
    if overrides["router"] != "mumoe":
        overrides["gated_experts"] = is_gated
        overrides["expert_use_bias"] = "hidden_bias" in weights
    moe = updated_moe(None, overrides)
    if overrides["router"] != "mumoe":
        check_causal(moe)
        if moe.gating_residual == "every_block":
            raise ValueError(
                "Expected gating_residual=True or False, since the first block of a "
                "KerasHub model has no logits before it; received: "
                "gating_residual='every_block'"
            )
    backbone = getattr(model, "backbone", model)
    lengths = (
        getattr(getattr(model, "preprocessor", None), "sequence_length", None),
        getattr(backbone, "max_sequence_length", None),
    )
    dim, mlp_dim = weights["hidden_kernel"].shape
    return EncoderSpec(
        hidden_dim=dim,
        num_layers=len(decoder_layers(model)),
        mlp_dim=mlp_dim,
        activation=activation,
        moe=moe,
        seed=seed,
        num_tokens=next((x for x in lengths if x), _USUAL_LENGTH),
        dtype=decoder.dtype_policy,
    )


def _put(decoder, name, experts, dim):
    """Builds a layer under the paths of a decoder layer, in place of an inner one."""
    with contextlib.ExitStack() as stack:
        for part in decoder.path.split("/"):
            stack.enter_context(keras.name_scope(part))
        experts.build((None, None, dim))
    compat.replace_layer(decoder, name, experts)


def _hand_on_mask(decoder, between):
    """Lets the experts in a decoder layer know its padding, which only it is given."""
    original = type(decoder).call
    signature = inspect.signature(original)

    def call(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        between.mask = given.get("decoder_padding_mask", given.get("padding_mask"))
        try:
            return original(self, *args, **kwargs)
        finally:
            between.mask = None

    decoder.call = types.MethodType(call, decoder)


def _settle(model):
    """Compiles anew, and refuses to save a config, which is that of the old layers."""

    def get_config(self):
        raise ValueError(
            "Expected save_weights and load_weights for a KerasHub model with experts "
            "of this library, which its config does not have; received: get_config, "
            "as for a .keras file or a preset"
        )

    backbone = getattr(model, "backbone", model)
    backbone.get_config = types.MethodType(get_config, backbone)
    compat.forget_programs(model)


def replace_moe(model: Any) -> Any:
    """Puts our experts in place of those of KerasHub's Mixtral, Qwen-MoE or Qwen3-MoE.

    KerasHub computes every expert for every token. Ours compute what the router chose,
    with the same weights and gates, the shared expert of Qwen-MoE and the loss that
    balances the experts in training. Mixtral's noise on the router's input is left out.

    The model itself changes, so that it never is in memory twice. `save_weights` and
    `load_weights` work between models that were changed; `.keras` files and presets,
    whose config would be KerasHub's, are refused.

    Args:
        model: a KerasHub language model or backbone, which has not been trained since
            it was compiled.

    Returns: The same model.

    Raises:
        ValueError: without MoE blocks of a known kind, or with a built optimizer.

    Example:

    >>> import keras_hub
    >>> import numpy as np
    >>> from keras_moe import models
    >>> mixtral = keras_hub.models.MixtralBackbone(
    ...     vocabulary_size=20, num_layers=1, hidden_dim=8, intermediate_dim=16,
    ...     num_query_heads=2, num_key_value_heads=1, num_experts=4, top_k=2,
    ... )
    >>> ids = np.array([[1, 7, 19, 0]])
    >>> inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    >>> before = mixtral.predict(inputs, verbose=0)
    >>> after = models.replace_moe(mixtral).predict(inputs, verbose=0)
    >>> np.allclose(before, after, atol=1e-5)
    True
    """
    decoders = decoder_layers(model) if is_language_model(model) else []
    blocks = [compat.expert_block(decoder) for decoder in decoders]
    if not any(name for name, _ in blocks):
        raise ValueError(
            "Expected a KerasHub language model with one of "
            f"{list(compat.EXPERT_BLOCKS)}; received: {type(model).__name__} with "
            f"{sorted({type(decoder).__name__ for decoder in decoders})}"
        )
    if getattr(getattr(model, "optimizer", None), "built", False):
        raise ValueError(
            "Expected a model that was not trained since it was compiled, whose "
            "optimizer has no state of the old layers: compile it again; received: "
            f"{type(model).__name__} with a built optimizer"
        )
    between = _Shared()
    for decoder, (name, block) in zip(decoders, blocks):
        if name is not None:
            _replace_block(decoder, name, block, between)
    _settle(model)
    return model


def _replace_block(decoder, name, block, between):
    dim, num_experts = block.router.shape
    moe = MoE(
        TokenChoiceRouter(
            num_experts,
            block.top_k,
            dropless=True,
            noise_std=0.0,
            normalize_gates="before" if block.normalizes else None,
        ),
        Experts(
            num_experts,
            block.output.shape[1],
            activation=block.activation,
            gated=True,
            use_bias=False,
            dtype=decoder.dtype_policy,
            name="experts",
        ),
        auxiliary_losses=[AuxiliaryLoss("load_balance", block.balance, choices="all")],
        dtype=decoder.dtype_policy,
        name="moe",
    )
    experts = ReplacedFeedForward(moe, between, shared=block.shared, router_logits=True)
    trainable = getattr(decoder, name).trainable
    values = {"output_kernel": block.output}
    if block.hidden is None:
        values["gate_kernel"], values["hidden_kernel"] = ops.split(
            ops.convert_to_tensor(block.gate), 2, axis=-1
        )
    else:
        values |= {"gate_kernel": block.gate, "hidden_kernel": block.hidden}
    _put(decoder, name, experts, dim)
    # Copied: on JAX both models would otherwise share, and donate, one buffer.
    for weight, value in values.items():
        getattr(moe.experts, weight).assign(ops.convert_to_numpy(value))
    moe.router.kernel.assign(ops.convert_to_numpy(block.router))
    experts.trainable = trainable
    _hand_on_mask(decoder, between)
