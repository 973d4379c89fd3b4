"""From token ids to tokens.

Axes: B batch, N tokens, D hidden, V vocabulary.
"""

import keras

from keras_moe.checks import check_initializer, check_integer
from keras_moe.ops.cost import Cost


@keras.saving.register_keras_serializable("keras_moe")
class TokenEmbedding(keras.layers.Embedding):
    """A learned vector for each token of a vocabulary.

    An id that is out of the vocabulary is an error or has some other vector, as the
    backend likes it: `keras_moe.models.TextBackbone` checks ids before.

    Args:
        vocabulary_size: V.
        hidden_dim: D.
        embeddings_initializer: initializer of the vectors; None is normal with a
            standard deviation of 0.02, as in CLIP.
        **kwargs: arguments of `keras.layers.Embedding`.

    Input shape:
        (B, N), integers from 0 to V - 1.

    Output shape:
        (B, N, D).

    Raises:
        ValueError: if a size is not a positive integer.

    Reference:
        *Learning Transferable Visual Models From Natural Language Supervision*,
        section 2.4.

    Example:

    >>> import numpy as np
    >>> from keras_moe.layers import TokenEmbedding
    >>> layer = TokenEmbedding(vocabulary_size=10, hidden_dim=8)
    >>> tuple(layer(np.array([[3, 1, 4]])).shape)
    (1, 3, 8)
    """

    def __init__(
        self,
        vocabulary_size: int,
        hidden_dim: int,
        embeddings_initializer: str | dict | keras.Initializer | None = None,
        **kwargs,
    ):
        if embeddings_initializer is None:
            embeddings_initializer = keras.initializers.RandomNormal(stddev=0.02)
        super().__init__(
            check_integer("vocabulary_size", vocabulary_size),
            check_integer("hidden_dim", hidden_dim),
            check_initializer("embeddings_initializer", embeddings_initializer),
            **kwargs,
        )

    @property
    def vocabulary_size(self) -> int:
        """V."""
        return self.input_dim

    @property
    def hidden_dim(self) -> int:
        """D."""
        return self.output_dim

    def weight_shapes(self, shape: tuple[int]) -> dict[str, tuple]:
        """The shapes of the trained weights by path.

        Args:
            shape: (num_tokens,).
        """
        return {"embeddings": (self.vocabulary_size, self.hidden_dim)}

    def cost(self, shape: tuple[int]) -> Cost:
        """The cost for one text: a lookup multiplies nothing.

        Args:
            shape: (num_tokens,).
        """
        return Cost.all_active(self.weight_shapes(shape))

    def quantize(self, mode=None, type_check=True, config=None):
        # Keras refuses subclasses, which may have a lookup of their own.
        super().quantize(mode, type_check=False, config=config)

    def get_config(self):
        config = super().get_config()
        for keras_name, name in (
            ("input_dim", "vocabulary_size"),
            ("output_dim", "hidden_dim"),
        ):
            config[name] = config.pop(keras_name)
        return config
