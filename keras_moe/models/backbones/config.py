"""Backbone arguments as dataclasses. Axes: N tokens, D hidden, V vocabulary."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, cast

from keras_moe import _checks
from keras_moe._types import DType
from keras_moe.layers import Attention, TowerConfig, TowerSpec
from keras_moe.layers.attention import check_key_value_heads
from keras_moe.layers.normalization import NORMS

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
        num_heads: number of attention heads.
        attention_dropout: dropout rate on attention weights.
        head_dim: size of a head; None for D / num_heads, which must be whole.
        num_key_value_heads: heads of keys and values; None for `num_heads`.
        key_bias: whether keys have a bias where queries do; DINOv3's have none.
        attention_sinks: whether heads may attend to nothing; see `Attention`.
        query_key_norm: whether to normalise queries and keys per head, as in Soft MoE;
            or the name of a norm, such as `"plain_rms"` in SigLino.
        query_key_norm_bias: whether that norm has an offset, as in timm's `qk_norm`.
        **kwargs: arguments of `keras_moe.layers.TowerConfig`.

    Example:

    >>> from keras_moe.models import TransformerConfig
    >>> TransformerConfig(hidden_dim=8, num_heads=2).to_dict()["num_heads"]
    2
    """

    num_heads: int = 12
    attention_dropout: float = 0.0
    head_dim: int | None = None
    num_key_value_heads: int | None = None
    key_bias: bool = True
    attention_sinks: bool = False
    query_key_norm: bool | str = False
    query_key_norm_bias: bool = False

    def __post_init__(self):
        super().__post_init__()
        if _checks.check_integer("head_dim", self.head_dim, optional=True) is None:
            _checks.head_size(self.num_heads, self.hidden_dim)
        check_key_value_heads(self.num_key_value_heads, self.num_heads)
        for name in ("query_key_norm_bias", "key_bias", "attention_sinks"):
            _checks.check_bool(name, getattr(self, name))
        _checks.check_one_of(
            "query_key_norm", self.query_key_norm, (False, True, *NORMS)
        )

    def attention(self, spec: TowerSpec, index: int, **arguments: Any) -> Attention:
        """Creates the attention layer of a block, unbuilt."""
        norm = "layer" if self.query_key_norm is True else self.query_key_norm or None
        arguments.setdefault("query_key_norm", norm)
        return Attention(
            self.num_heads,
            self.head_dim or _checks.head_size(self.num_heads, self.hidden_dim),
            self.num_key_value_heads,
            key_bias=self.key_bias,
            sinks=self.attention_sinks,
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
        self._set(image_shape=_checks.check_image_shape(self.image_shape))

    @property
    def example_shape(self) -> tuple[int, ...]:
        """The shape of an image as the tower reads it, the largest if they vary."""
        return self.image_shape


def check_no_ensemble(moe: object) -> None:
    """Raises ValueError for a mixture whose members nothing would average."""
    members = getattr(moe, "ensemble_size", 1)
    if members > 1:
        raise _checks.unfit(
            "ensembles only in classifiers of images of one shape",
            ensemble_size=members,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabularyConfig(TowerConfig, ModelArguments):
    """Arguments of whatever reads token ids."""

    vocabulary_size: int = 49408
    max_length: int = 77

    def __post_init__(self):
        super().__post_init__()
        check_no_ensemble(self.moe)
        for name in ("vocabulary_size", "max_length"):
            self._set(**{name: _checks.check_integer(name, getattr(self, name))})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenIdsConfig(VocabularyConfig):
    """Arguments of a text encoder."""

    mask_padding: bool = True

    def __post_init__(self):
        super().__post_init__()
        _checks.check_bool("mask_padding", self.mask_padding)
