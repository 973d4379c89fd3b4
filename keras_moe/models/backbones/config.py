"""Backbone arguments as dataclasses. Axes: N tokens, D hidden, V vocabulary."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, cast

from keras_moe._checks import check_bool, check_image_shape, check_integer, head_size
from keras_moe._types import DType
from keras_moe.layers import Attention, TowerConfig, TowerSpec

P = ParamSpec("P")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Arguments of every backbone, for type checkers: its config does not hold them."""

    if TYPE_CHECKING:
        dtype: DType | None = None
        name: str | None = None
        trainable: bool = True


def takes(
    config_class: Callable[P, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Decorator: a constructor has the arguments of a config, which tools can read."""

    def decorate(init: Any) -> Any:
        fields = dataclasses.fields(cast(type, config_class))
        arguments = [(field.name, field.default, field.type) for field in fields]
        arguments.append(("dtype", None, DType))
        parameters = [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        ]
        for name, default, annotation in arguments:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(
                inspect.Parameter(name, kind, default=default, annotation=annotation)
            )
        parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
        init.__signature__ = inspect.Signature(parameters)
        return init

    return decorate


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(TowerConfig, ModelArguments):
    """Arguments of a transformer encoder.

    Args:
        num_heads: number of attention heads; must divide D.
        attention_dropout: dropout rate on attention weights.
        query_key_norm: whether to normalise queries and keys per head, as in Soft MoE.
        query_key_norm_bias: whether that norm has an offset, as in timm's `qk_norm`.
        **kwargs: arguments of `keras_moe.layers.TowerConfig`.

    Example:

    >>> from keras_moe.models import TransformerConfig
    >>> TransformerConfig(hidden_dim=8, num_heads=2).to_dict()["num_heads"]
    2
    """

    num_heads: int = 12
    attention_dropout: float = 0.0
    query_key_norm: bool = False
    query_key_norm_bias: bool = False

    def __post_init__(self):
        super().__post_init__()
        head_size(self.num_heads, self.hidden_dim)
        for name in ("query_key_norm", "query_key_norm_bias"):
            check_bool(name, getattr(self, name))

    def attention(self, spec: TowerSpec, index: int, **arguments: Any) -> Attention:
        """Creates the attention layer of a block, unbuilt."""
        arguments.setdefault("query_key_norm", "layer" if self.query_key_norm else None)
        return Attention(
            self.num_heads,
            head_size(self.num_heads, self.hidden_dim),
            query_key_norm_bias=self.query_key_norm_bias,
            layer_norm_epsilon=self.layer_norm_epsilon,
            dropout=self.attention_dropout,
            # With the block's seed both dropouts would drop the same positions.
            seed=spec.seed_of(index, 1),
            use_bias=self.use_bias,
            dtype=spec.dtype,
            **arguments,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(TowerConfig, ModelArguments):
    """Arguments of an image encoder.

    Args:
        image_shape: (height, width, channels).
        patch_size: an int or (height, width); must divide the image size.
        **kwargs: arguments of `keras_moe.layers.TowerConfig`.

    Example:

    >>> from keras_moe.models import ImageConfig
    >>> ImageConfig(image_shape=[8, 8, 3], patch_size=4).image_shape
    (8, 8, 3)
    """

    image_shape: tuple = (224, 224, 3)
    patch_size: Any = 32

    def __post_init__(self):
        super().__post_init__()
        self._set(image_shape=check_image_shape(self.image_shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabularyConfig(TowerConfig, ModelArguments):
    """Arguments of whatever reads token ids."""

    vocabulary_size: int = 49408
    max_length: int = 77

    def __post_init__(self):
        super().__post_init__()
        for name in ("vocabulary_size", "max_length"):
            self._set(**{name: check_integer(name, getattr(self, name))})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenIdsConfig(VocabularyConfig):
    """Arguments of a text encoder."""

    mask_padding: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_bool("mask_padding", self.mask_padding)
