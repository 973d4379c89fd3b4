"""Embeddings of texts. Axes: B batch, N tokens, D hidden, V vocabulary."""

import keras
import numpy as np
from keras import ops

from keras_moe._checks import check_bool, check_integer, unfit
from keras_moe._freezing import KeepsFrozen
from keras_moe._types import Tensor
from keras_moe.layers._layer import Layer, OwnValues
from keras_moe.ops.cost import Cost


@keras.saving.register_keras_serializable("keras_moe")
class TokenEmbedding(OwnValues, KeepsFrozen, keras.layers.Embedding):
    """Token embeddings with CLIP's initialisation.

    Ids are not checked here; `keras_moe.models.TextBackbone` checks them.

    Args:
        vocabulary_size: number V of token ids.
        hidden_dim: width D of tokens.
        **kwargs: arguments of `keras.layers.Embedding`.

    Input shape: (B, N), integers from 0 to V - 1.

    Reference: *Learning Transferable Visual Models From Natural Language Supervision*,
    section 2.4.

    Example:

    >>> from keras_moe.layers import TokenEmbedding
    >>> layer = TokenEmbedding(vocabulary_size=10, hidden_dim=8)
    >>> tuple(layer(np.array([[3, 1, 4]])).shape)
    (1, 3, 8)
    """

    def __init__(self, vocabulary_size: int, hidden_dim: int, **kwargs):
        kwargs.setdefault(
            "embeddings_initializer", keras.initializers.RandomNormal(stddev=0.02)
        )
        super().__init__(
            check_integer("vocabulary_size", vocabulary_size),
            check_integer("hidden_dim", hidden_dim),
            **kwargs,
        )

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        return {"embeddings": (self.input_dim, self.output_dim)}

    def cost(self, shape: tuple) -> Cost:
        return Cost.all_active(self.weight_shapes(shape))

    def quantize(self, mode=None, type_check=True, config=None):
        # Keras refuses subclasses, because they may override the lookup.
        super().quantize(mode, type_check=False, config=config)

    def get_config(self):
        config = super().get_config()
        config["vocabulary_size"] = config.pop("input_dim")
        config["hidden_dim"] = config.pop("output_dim")
        return config


@keras.saving.register_keras_serializable("keras_moe")
class ReversibleTokenEmbedding(
    OwnValues, KeepsFrozen, keras.layers.ReversibleEmbedding
):
    """Token embeddings that also turn tokens into logits, with `reverse=True`.

    Args:
        vocabulary_size: number V of token ids.
        hidden_dim: width D of tokens.
        tied: whether the logits' matrix is that of the embeddings.
        **kwargs: arguments of `keras.layers.Layer`.

    Input shape: (B, N), integers from 0 to V - 1; in reverse (B, N, D).

    Output shape: (B, N, D); in reverse (B, N, V).

    Reference: *Using the Output Embedding to Improve Language Models*.

    Example:

    >>> from keras_moe.layers import ReversibleTokenEmbedding
    >>> layer = ReversibleTokenEmbedding(vocabulary_size=10, hidden_dim=8)
    >>> tokens = layer(np.array([[3, 1, 4]]))
    >>> tuple(layer(tokens, reverse=True).shape)
    (1, 3, 10)
    """

    def __init__(
        self, vocabulary_size: int, hidden_dim: int, tied: bool = True, **kwargs
    ):
        super().__init__(
            check_integer("vocabulary_size", vocabulary_size),
            check_integer("hidden_dim", hidden_dim),
            tie_weights=check_bool("tied", tied),
            embeddings_initializer=keras.initializers.RandomNormal(stddev=0.02),  # pyright: ignore[reportArgumentType]
            **kwargs,
        )
        self.supports_masking = True

    def logit_kernel(self) -> Tensor:
        """The matrix (D, V) from tokens to logits."""
        if self.tie_weights:
            return ops.transpose(ops.convert_to_tensor(self.embeddings))
        return ops.convert_to_tensor(self.reverse_embeddings)

    def load_own_variables(self, store):
        names = ["embeddings"] + ["reverse_embeddings"] * (not self.tie_weights)
        expected = {
            str(i): tuple(getattr(self, name).shape) for i, name in enumerate(names)
        }
        received = {name: tuple(store[name].shape) for name in store.keys()}  # noqa: SIM118
        if self.quantization_mode is None and received != expected:
            raise ValueError(
                f"Expected token embeddings of vocabulary_size={self.input_dim}, tied="
                f"{self.tie_weights}; received: {[*received.values()]}"
            )
        super().load_own_variables(store)

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        shapes = {"embeddings": (self.input_dim, self.output_dim)}
        if not self.tie_weights:
            shapes["reverse_embeddings"] = (self.output_dim, self.input_dim)
        return shapes

    def cost(self, shape: tuple) -> Cost:
        return Cost.all_active(self.weight_shapes(shape))

    def get_config(self):
        config = keras.layers.Layer.get_config(self)
        return {
            **config,
            **self.frozen_config(),
            "vocabulary_size": self.input_dim,
            "hidden_dim": self.output_dim,
            "tied": self.tie_weights,
        }


@keras.saving.register_keras_serializable("keras_moe")
class TextPositions(Layer):
    """Adds a learned position embedding to each token of a text.

    Weights for longer texts can be loaded; only the first positions are used.

    Args:
        max_length: largest number of tokens.
        **kwargs: arguments of `keras.layers.Layer`.

    Call arguments:
        tokens: (B, N, D).
        positions: integers (B, N); None for 0 to N - 1.

    Reference: *Learning Transferable Visual Models From Natural Language Supervision*,
    section 2.4.

    Example:

    >>> from keras_moe.layers import TextPositions
    >>> layer = TextPositions(max_length=5)
    >>> tuple(layer(np.zeros((1, 3, 8), "float32")).shape)
    (1, 3, 8)
    """

    def __init__(self, max_length: int, **kwargs):
        super().__init__(**kwargs)
        self.max_length = check_integer("max_length", max_length)
        self.supports_masking = True

    def build(self, input_shape):
        self.embedding = self.add_weight(
            name="embedding",
            shape=(1, self.max_length, input_shape[-1]),
            # As in CLIP.
            initializer=keras.initializers.RandomNormal(stddev=0.01),
        )

    def call(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        self._check_length(tokens.shape)
        embedding = ops.convert_to_tensor(self.embedding)
        if positions is not None:
            rows = ops.take(embedding[0], positions, axis=0)
            return tokens + ops.cast(rows, tokens.dtype)
        num_tokens = tokens.shape[1]
        if num_tokens is None:
            num_tokens = ops.shape(tokens)[1]
        return tokens + ops.cast(embedding[:, :num_tokens], tokens.dtype)

    def compute_output_shape(self, input_shape):
        self._check_length(input_shape)
        return input_shape

    def _check_length(self, shape):
        if shape[1] is not None and shape[1] > self.max_length:
            expected = f"texts of at most max_length={self.max_length} tokens"
            raise unfit(expected, shape=tuple(shape))

    def load_own_variables(self, store):
        stored = tuple(store["0"].shape)
        expected = tuple(self.embedding.shape)
        fits = len(stored) == 3 and (stored[0], stored[2]) == (1, expected[2])
        if not fits or stored[1] < expected[1]:
            raise ValueError(
                f"Expected positions of shape {expected} for '{self.path}', or of more "
                f"tokens; received: {stored}"
            )
        self.embedding.assign(np.array(store["0"][:, : self.max_length]))

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        return {"embedding": (1, self.max_length, shape[-1])}
