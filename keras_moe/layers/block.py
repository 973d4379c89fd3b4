"""Encoder blocks of transformers and mixers, dense or MoE.

Axes: B batch, N tokens, D hidden, H mlp, E experts.
"""

import functools
import itertools
from typing import Any

import keras
from keras import ops

from keras_moe._checks import check_bool, check_dropout, check_positive, check_seed
from keras_moe._compat import get_keras_mask
from keras_moe._types import Config, Tensor
from keras_moe.layers import _layer
from keras_moe.layers.normalization import norm_layer

# Added to a block's seed for stochastic depth, so that dropout and depth draw
# different values. Large enough not to collide with the seeds of other sites.
_DEPTH_SEED = 1_000_003


@keras.saving.register_keras_serializable("keras_moe")
class LayerScale(_layer.Layer):
    """Multiplies each channel by a learned factor.

    Args:
        initial_value: initial value of all factors: 1e-5 in timm, 1.0 in DINOv2.
        **kwargs: arguments of `keras.layers.Layer`.

    Reference: *Going deeper with Image Transformers*, equation 4.

    Example:

    >>> import keras
    >>> from keras_moe.layers import LayerScale
    >>> scaled = LayerScale(0.5)(keras.ops.ones((1, 2)))
    >>> keras.ops.convert_to_numpy(scaled).tolist()
    [[0.5, 0.5]]
    """

    def __init__(self, initial_value: float = 1e-5, **kwargs):
        super().__init__(**kwargs)
        self.initial_value = check_positive("layer_scale_initial_value", initial_value)
        self.supports_masking = True

    def build(self, input_shape):
        self.scale = self.add_weight(
            name="scale",
            shape=(input_shape[-1],),
            initializer=keras.initializers.Constant(self.initial_value),
        )

    def call(self, x: Tensor) -> Tensor:
        return x * self.scale

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        return {"scale": (shape[-1],)}


@keras.saving.register_keras_serializable("keras_moe")
class Block(_layer.Layer):
    """Pre-norm block: token mixer and feed-forward layer, each with a residual.

    Args:
        token_mixer: layer that mixes tokens (B, N, D): `Attention` or `TokenMLP`.
        feed_forward: layer applied to each token, such as `MLP`.
        dropout: dropout rate on the token mixer's output.
        layer_norm_epsilon: epsilon of both normalisations.
        seed: seed of dropout and stochastic depth.
        rematerialize: whether the backward pass recomputes the block: less memory for
            about a third more time. Supports auxiliary losses.
        stochastic_depth: probability of dropping a residual branch for an example.
        layer_scale_initial_value: initial value of a `LayerScale` on both branches, or
            None.
        norm: `"layer"` or `"rms"` normalisation.
        use_bias: whether layer norms have offsets.
        feed_forward_norm: whether the feed-forward layer's input is normalised. In
            muMoE's GPT-2 the gate reads it as it is, and the experts have a norm.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        tokens: (B, N, D).
        mask: boolean (B, N), False for padding; only with attention.
        modality_ids: integers (B, N); ignored by a dense block.
        boundaries: positions that cut examples into runs; attention is within a run.
        mixer_arguments: dict of further arguments of the token mixer. With a `"cache"`
            the mixer's new cache is the block's last output.
        training: whether dropout and stochastic depth apply.

    Reference: *An Image is Worth 16x16 Words*, equations 2 and 3; *MLP-Mixer*, equation
    1; *Deep Networks with Stochastic Depth*.

    Example:

    >>> from keras_moe.layers import MLP, Block, Attention
    >>> block = Block(Attention(num_heads=2, key_dim=4), MLP(mlp_dim=16))
    >>> tuple(block(np.ones((1, 4, 8), "float32")).shape)
    (1, 4, 8)
    """

    # A vector (D,) that is added to the feed-forward layer's input, for
    # `keras_moe.analysis.steer_expert`; not part of the config.
    steering = None

    def __init__(
        self,
        token_mixer: keras.layers.Layer | Config,
        feed_forward: keras.layers.Layer | Config,
        dropout: float = 0.0,
        layer_norm_epsilon: float = 1e-6,
        seed: int | None = None,
        rematerialize: bool = False,
        stochastic_depth: float = 0.0,
        layer_scale_initial_value: float | None = None,
        norm: str = "layer",
        use_bias: bool = True,
        feed_forward_norm: bool = True,
        **kwargs,
    ):
        # Tokens are cast in `call`; an MoE block's `previous_logits` stay float32.
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        self.token_mixer = _layer.layer_argument(token_mixer, "token_mixer")
        # Mixers of experts also return a routing record.
        self.mixes_by_experts = hasattr(self.token_mixer, "router")
        self.feed_forward = _layer.layer_argument(feed_forward, "feed_forward")
        self.dropout = check_dropout("dropout", dropout)
        self.layer_norm_epsilon = layer_norm_epsilon
        self.seed = check_seed("seed", seed)
        self.rematerialize = check_bool("rematerialize", rematerialize)
        self.stochastic_depth = check_dropout("stochastic_depth", stochastic_depth)
        self.norm, self.use_bias = norm, check_bool("use_bias", use_bias)
        make_norm = functools.partial(
            norm_layer, norm, layer_norm_epsilon, use_bias, dtype=self.dtype_policy
        )
        self.mixer_norm = make_norm(name="mixer_norm")
        self.feed_forward_norm = None
        if check_bool("feed_forward_norm", feed_forward_norm):
            self.feed_forward_norm = make_norm(name="feed_forward_norm")
        self.dropout_layer = keras.layers.Dropout(
            dropout, seed=seed, dtype=self.dtype_policy, name="dropout"
        )
        # One layer serves both branches: every call draws new values.
        self.depth_layer = keras.layers.Dropout(
            stochastic_depth,
            noise_shape=(None, 1, 1),
            seed=None if seed is None else seed + _DEPTH_SEED,
            dtype=self.dtype_policy,
            name="stochastic_depth",
        )
        self.layer_scale_initial_value = layer_scale_initial_value
        self.mixer_scale = self.feed_forward_scale = None
        if layer_scale_initial_value is not None:
            self.mixer_scale, self.feed_forward_scale = (
                LayerScale(
                    layer_scale_initial_value, dtype=self.dtype_policy, name=name
                )
                for name in ("mixer_scale", "feed_forward_scale")
            )

    def build(self, input_shape):
        for part in self.parts(input_shape):
            _layer.build_once(part, input_shape)

    def _mix(self, tokens, training, mask, boundaries, arguments):
        """Mixes the tokens; also returns the mixer's record or cache, if any."""
        x, records = _layer.inner_call(self.mixer_norm, tokens), ()
        if boundaries:
            x = self._mix_runs(x, training, mask, boundaries)
        else:
            arguments = {**_present(mask=mask), **(arguments or {})}
            x = _layer.inner_call(self.token_mixer, x, training=training, **arguments)
            x, *records = x if isinstance(x, tuple) else (x,)
        x = _layer.dropped_out(self.dropout_layer, x, training)
        tokens = self._residual(tokens, x, self.mixer_scale, training)
        return tokens, tuple(records)

    def _residual(self, tokens, branch, scale, training):
        # The branch's policy may be another.
        branch = ops.cast(branch, tokens.dtype)
        if scale is not None:
            branch = _layer.inner_call(scale, branch)
        return tokens + _layer.dropped_out(self.depth_layer, branch, training)

    def _mix_runs(self, tokens, training, mask, boundaries):
        ends = (0, *boundaries, tokens.shape[1] or float("inf"))
        if any(start >= end for start, end in itertools.pairwise(ends)):
            raise ValueError(
                "Expected boundaries to increase, between 0 and the number of tokens "
                f"{tokens.shape[1]}; received: boundaries={boundaries}"
            )
        lengths = {end - start for start, end in itertools.pairwise(ends)}
        if len(lengths) == 1 and tokens.shape[1]:
            # Runs of one length, as of an ensemble's members, are a batch of their own.
            (length,), dim = lengths, tokens.shape[2]
            arguments = {"training": training}
            if mask is not None:
                arguments["mask"] = ops.reshape(mask, (-1, length))
            runs = ops.reshape(tokens, (-1, length, dim))
            runs = _layer.inner_call(self.token_mixer, runs, **arguments)
            return ops.reshape(runs, (-1, tokens.shape[1], dim))
        # Slices: TensorFlow cannot split an axis of unknown size, as in exported texts.
        mixed = []
        for start, end in zip((0, *boundaries), (*boundaries, None)):
            arguments = {} if mask is None else {"mask": mask[:, start:end]}
            arguments["training"] = training
            run = tokens[:, start:end]
            mixed.append(_layer.inner_call(self.token_mixer, run, **arguments))
        return ops.concatenate(mixed, axis=1)

    def call(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        modality_ids: Tensor | None = None,
        boundaries: tuple[int, ...] = (),
        mixer_arguments: dict | None = None,
        training: bool | None = None,
    ) -> Any:
        outputs = self._run((tokens,), mask, {}, boundaries, mixer_arguments, training)
        return outputs if "cache" in (mixer_arguments or {}) else outputs[0]

    def _run(self, inputs, mask, arguments, boundaries, mixer_arguments, training):
        """The tokens and the routing records, for tokens and maybe previous logits."""

        def run(tokens, previous_logits=None):
            tokens, mixer_records = self._mix(
                tokens, training, mask, boundaries, mixer_arguments
            )
            x = tokens
            if self.feed_forward_norm is not None:
                x = _layer.inner_call(self.feed_forward_norm, x)
            if self.steering is not None:
                x = x + ops.cast(self.steering, x.dtype)
            residual = _present(previous_logits=previous_logits)
            x = _layer.inner_call(
                self.feed_forward, x, training=training, **arguments, **residual
            )
            x, *records = x if isinstance(x, tuple) else (x,)
            tokens = self._residual(tokens, x, self.feed_forward_scale, training)
            return tokens, *records, *mixer_records

        tokens, *previous_logits = inputs
        inputs = ops.cast(tokens, self.compute_dtype), *previous_logits
        if self.rematerialize and training:
            return _layer.rematerialized(self, run, *inputs)
        return run(*inputs)

    def parts(self, shape: tuple) -> dict[Any, tuple]:
        parts = (
            self.mixer_norm,
            self.token_mixer,
            self.mixer_scale,
            self.feed_forward_norm,
            self.feed_forward,
            self.feed_forward_scale,
        )
        return {part: shape for part in parts if part is not None}

    def get_config(self):
        has_norm = self.feed_forward_norm is not None
        # The layer has the name of the argument, and its own config.
        return {**super().get_config(), "feed_forward_norm": has_norm}


@keras.saving.register_keras_serializable("keras_moe")
class MoEBlock(Block):
    """`Block` with a mixture of experts as its feed-forward layer.

    Args:
        token_mixer: `Attention`, `TokenMLP` or `TokenMuMoE`.
        feed_forward: `MoE` or `MuMoEBlock`.
        **kwargs: arguments of `Block`.

    Call arguments:
        tokens: (B, N, D).
        previous_logits: float32 (B, N, E), `Routing.logits` of the previous MoE block.
        mask: boolean (B, N), False for padding, neither attended to nor routed.
        modality_ids: integers (B, N), the tokens' modalities.
        boundaries: as in `Block`; all tokens are still routed together.
        mixer_arguments: as in `Block`.
        training: whether dropout and stochastic depth apply.

    Output shape: `(tokens, Routing)`, tokens (B, N, D). With `TokenMuMoE` there is a
    third output, the mixer's record over channels.

    Example:

    >>> from keras_moe.layers import Experts, MoE, MoEBlock, Attention
    >>> from keras_moe.routers import TokenChoiceRouter
    >>> moe = MoE(TokenChoiceRouter(num_experts=2), Experts(2, mlp_dim=16))
    >>> block = MoEBlock(Attention(num_heads=2, key_dim=4), moe)
    >>> tokens, routing = block(np.ones((1, 4, 8), "float32"))
    >>> tuple(routing.dispatched.shape)
    (1, 4, 2)
    """

    def call(
        self,
        tokens: Tensor,
        previous_logits: Tensor | None = None,
        mask: Tensor | None = None,
        modality_ids: Tensor | None = None,
        boundaries: tuple[int, ...] = (),
        mixer_arguments: dict | None = None,
        training: bool | None = None,
    ) -> tuple:
        if mask is None:
            # Keras passes masks only to calls with a single tensor.
            mask = get_keras_mask(tokens)
        inputs = (tokens,) if previous_logits is None else (tokens, previous_logits)
        arguments = _present(mask=mask, modality_ids=modality_ids)
        return self._run(inputs, mask, arguments, boundaries, mixer_arguments, training)

    def compute_output_spec(
        self,
        tokens,
        previous_logits=None,
        mask=None,
        modality_ids=None,
        boundaries=(),
        mixer_arguments=None,
        training=None,
    ):
        tokens = keras.KerasTensor(tokens.shape, self.compute_dtype)
        _, *records = self.feed_forward.compute_output_spec(
            tokens,
            **_present(
                previous_logits=previous_logits, mask=mask, modality_ids=modality_ids
            ),
        )
        if self.mixes_by_experts:
            records.append(self.token_mixer.compute_output_spec(tokens)[1])
        return tokens, *records


def _present(**arguments):
    """Drops arguments that are None: not every layer accepts all of them."""
    return {name: value for name, value in arguments.items() if value is not None}
