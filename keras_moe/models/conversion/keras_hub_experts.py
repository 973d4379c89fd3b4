"""Mixtures of experts inside KerasHub's language models.

Axes: B batch, N tokens, E experts, D hidden, H mlp.
"""

import contextlib
import inspect
import types
from typing import Any

import keras
import keras_hub
from keras import ops

from keras_moe import _compat
from keras_moe._checks import unfit
from keras_moe.layers import Experts, MoE
from keras_moe.layers._layer import build_once, inner_call
from keras_moe.losses import AuxiliaryLoss
from keras_moe.routers import TokenChoiceRouter


class ReplacedFeedForward(keras.layers.Layer):
    """A mixture instead of a KerasHub block, which returns the router's logits, too."""

    def __init__(self, moe, between, shared):
        super().__init__(name="experts_in_place", dtype=moe.dtype_policy)
        self.moe, self.between = moe, between
        # An expert for all tokens, and its gate.
        self.shared = list(shared)

    def build(self, input_shape):
        build_once(self.moe, input_shape)

    def call(self, tokens, attention_mask=None, training=None):
        arguments = {"training": training}
        if training:
            # Nothing competes with padding at inference.
            arguments["mask"] = self.between.mask
        outputs, routing = inner_call(self.moe, tokens, **arguments)
        if self.shared:
            expert, gate = self.shared
            outputs = outputs + expert(tokens) * ops.sigmoid(gate(tokens))
        return outputs, ops.reshape(routing.logits, (-1, self.moe.router.num_experts))

    def compute_output_spec(self, tokens, attention_mask=None, training=None):
        outputs = keras.KerasTensor(tokens.shape, self.compute_dtype)
        logits = keras.KerasTensor((None, self.moe.router.num_experts), "float32")
        return outputs, logits


def _put(decoder, name, experts, dim):
    """Builds a layer under the paths of a decoder layer, in place of an inner one."""
    with contextlib.ExitStack() as stack:
        for part in decoder.path.split("/"):
            stack.enter_context(keras.name_scope(part))
        experts.build((None, None, dim))
    _compat.replace_layer(decoder, name, experts)


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
            "Expected save_weights for a model with replaced experts, which its config "
            "does not have; received: get_config, as for a .keras file or a preset"
        )

    backbone = getattr(model, "backbone", model)
    backbone.get_config = types.MethodType(get_config, backbone)
    _compat.forget_programs(model)


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
    backbone, decoders = getattr(model, "backbone", model), []
    if (
        isinstance(backbone, keras_hub.models.Backbone)
        and not type(backbone).__module__.startswith("keras_moe")
        and hasattr(backbone, "token_embedding")
    ):
        decoders = getattr(backbone, "transformer_layers", [])
    blocks = [_compat.expert_block(decoder) for decoder in decoders]
    if not any(name for name, _ in blocks):
        raise ValueError(
            "Expected a KerasHub language model with one of "
            f"{list(_compat.EXPERT_BLOCKS)}; received: {type(model).__name__} with "
            f"{sorted({type(decoder).__name__ for decoder in decoders})}"
        )
    if getattr(getattr(model, "optimizer", None), "built", False):
        expected = "a model that was not trained since it was compiled"
        raise unfit(expected, f"{type(model).__name__} with a built optimizer")
    # The padding mask, which only decoder layers are given.
    between = types.SimpleNamespace(mask=None)
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
    experts = ReplacedFeedForward(moe, between, block.shared)
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
