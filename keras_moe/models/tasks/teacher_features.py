"""Encoders with the features of the teachers that they were distilled from.

Axes: B batch, N tokens, D hidden, T a teacher's features.
"""

from typing import Any

import keras
import keras_hub
from keras import ops

from keras_moe._checks import check_argument_names, check_integer, unfit
from keras_moe._types import Config, Tensor
from keras_moe.layers import AttentionPooling, LayerNorm
from keras_moe.layers._layer import Layer, inner_call, projection
from keras_moe.models.backbones.config import check_no_ensemble
from keras_moe.models.backbones.vit import ViTBackbone
from keras_moe.models.loading._sources import ModelSource, TaskConfig
from keras_moe.models.loading.blueprint import Part
from keras_moe.models.preprocessing.images import ImagePreprocessor
from keras_moe.models.preprocessing.patches import budget
from keras_moe.models.registry import register_task
from keras_moe.models.tasks.base import MoETask, check_task
from keras_moe.ops._initializers import initial_values
from keras_moe.ops.cost import Cost, under

_SETTINGS = ("dim", "num_heads", "mlp_dim")


class _TeacherHead(Layer):
    """From tokens (B, N, D) to a teacher's tokens (B, N, T) and summary (B, T)."""

    def __init__(
        self,
        dim: int,
        num_heads: int | None = None,
        mlp_dim: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.dim = check_integer("dim", dim)
        self.num_heads, self.mlp_dim = num_heads, mlp_dim
        if num_heads is None and mlp_dim is not None:
            raise unfit("mlp_dim with num_heads only", mlp_dim=mlp_dim, num_heads=None)
        self.norm = LayerNorm(1e-5, dtype=self.dtype_policy, name="norm")
        self.pooler = None
        if num_heads is not None:
            self.pooler = AttentionPooling(
                num_heads,
                check_integer("mlp_dim", mlp_dim),
                layer_norm_epsilon=1e-5,
                dtype=self.dtype_policy,
                name="pooler",
            )

    def build(self, input_shape):
        shape = (*input_shape[:-1], self.dim)
        small = keras.initializers.RandomNormal(stddev=1e-6)
        starts = {"kernel": "glorot_uniform", "bias": small}
        dense = keras.layers.Dense
        self.hidden = projection(self, dense, "hidden", self.dim, **starts)
        self.output_dense = projection(
            self, dense, "output", self.dim, use_bias=False, **starts
        )
        self.hidden.build(input_shape)
        self.norm.build(shape)
        self.output_dense.build(shape)
        if self.pooler is not None:
            self.pooler.build(shape)

    def call(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Any, Any]:
        x = inner_call(self.norm, inner_call(self.hidden, tokens))
        x = inner_call(self.output_dense, ops.gelu(x, approximate=False))
        return x, x[:, 0] if self.pooler is None else self.pooler(x, mask=mask)

    def compute_mask(self, tokens, previous_mask=None):
        return None, None

    def compute_output_spec(self, tokens, mask=None):
        batch, length, _ = tokens.shape
        shapes = (batch, length, self.dim), (batch, self.dim)
        return tuple(keras.KerasTensor(x, self.compute_dtype) for x in shapes)

    def weight_shapes(self, shape: tuple) -> dict[str, tuple]:
        num_tokens, dim = shape
        shapes = {
            "hidden/kernel": (dim, self.dim),
            "hidden/bias": (self.dim,),
            **under("norm", self.norm.weight_shapes((num_tokens, self.dim))),
            "output/kernel": (self.dim, self.dim),
        }
        if self.pooler is not None:
            own = self.pooler.weight_shapes((num_tokens, self.dim))
            shapes.update(under("pooler", own))
        return shapes

    def cost(self, shape: tuple) -> Cost:
        num_tokens, dim = shape
        flops = 2 * num_tokens * self.dim * (dim + self.dim)
        if self.pooler is not None:
            flops += self.pooler.cost((num_tokens, self.dim)).flops
        return Cost.all_active(self.weight_shapes(shape), flops)


def _heads(teachers: dict[str, Config], dtype: Any) -> dict[str, _TeacherHead]:
    return {
        name: _TeacherHead(**settings, dtype=dtype, name=f"teacher_{name}")
        for name, settings in teachers.items()
    }


@register_task
@keras.saving.register_keras_serializable("keras_moe")
class TeacherFeatures(MoETask, keras_hub.models.Task):
    """An encoder with the features of each teacher that it was distilled from.

    A head is `output(gelu(norm(hidden(tokens))))` for each teacher. Its summary is the
    class token, or attention pooling of all tokens.

    Args:
        backbone: `ViTBackbone` with a class token.
        teachers: dict from names to dicts with `"dim"`, T, and for attention pooling
            `"num_heads"` and `"mlp_dim"`.
        **kwargs: `name` and `trainable`, and `preprocessor`.

    Output shape: dict of `"<teacher>"`, summaries (B, T), and `"<teacher>_grid"`,
    patches (B, rows, columns, T), or for images of any shape `"<teacher>_patches"`
    (B, L, T). `features` has these and the backbone's own.

    Reference: *SigLino*.

    Example:

    >>> from keras_moe import models
    >>> backbone = models.ViTBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, hidden_dim=8, num_layers=1,
    ...     num_heads=2, mlp_dim=16,
    ... )
    >>> model = models.TeacherFeatures(backbone, {"dinov3": {"dim": 6}})
    >>> outputs = model.predict(np.zeros((1, 8, 8, 3)), verbose=0)
    >>> {name: value.shape for name, value in outputs.items()}
    {'dinov3': (1, 6), 'dinov3_grid': (1, 2, 2, 6)}
    """

    task_name = "teacher_features"
    backbone_cls = ViTBackbone
    backbone: ViTBackbone
    has_metrics = False

    def __init__(
        self,
        backbone: ViTBackbone,
        teachers: dict[str, Config],
        preprocessor: object = None,
        **kwargs,
    ):
        check_task(self, TeacherFeatures, backbone, kwargs)
        if not isinstance(teachers, dict) or not teachers:
            raise unfit("teachers by name, with their sizes", teachers=teachers)
        taken = {*backbone.features}
        for name, settings in teachers.items():
            is_name = isinstance(name, str) and "/" not in name
            if not is_name or not isinstance(settings, dict) or "dim" not in settings:
                raise unfit("names with dicts of at least dim", teachers=teachers)
            check_argument_names(settings, list(_SETTINGS), "a teacher")
            own = {name, f"{name}_grid", f"{name}_patches"}
            if own & taken:
                expected = f"names that are no features, such as {sorted(taken)}"
                raise unfit(expected, name=name)
            taken |= own
        check_no_ensemble(backbone.moe)
        if not backbone.class_token:
            raise unfit("a backbone with a class token", class_token=False)

        # === Layers ===
        if isinstance(preprocessor, ImagePreprocessor):
            preprocessor.check_model(backbone)
        self.backbone, self.preprocessor = backbone, preprocessor
        config = backbone.config
        with initial_values(config.seed, type(self).__name__):
            heads = _heads(teachers, backbone.dtype_policy)
            self.heads = list(heads.values())

            # === Functional model ===
            encoded = backbone(backbone.input)
            mask = backbone.token_mask(backbone.input)
            features = {name: head(encoded, mask=mask) for name, head in heads.items()}
        outputs: dict[str, Tensor] = {}
        for name, (tokens, summary) in features.items():
            outputs[name] = summary
            for kind, patches in backbone.patches_of(tokens).items():
                outputs[f"{name}_{kind}"] = patches
        features = {**backbone.features, **outputs}
        super().__init__(
            backbone.input, outputs, features, dict(backbone.routing), **kwargs
        )

        # === Config ===
        self.teachers = {name: dict(x) for name, x in teachers.items()}

    @classmethod
    def config_from(
        cls, source: ModelSource, overrides: dict, backbone_config: dict
    ) -> TaskConfig:
        config = {**source.task_config(), **overrides}
        images = config.get("preprocessor")
        if isinstance(images, ImagePreprocessor) and "preprocessor" not in overrides:
            shape = backbone_config["image_shape"]
            config["preprocessor"] = images.adapted(shape, **budget(backbone_config))
        return TaskConfig(config)

    def get_config(self):
        return {**super().get_config(), "teachers": dict(self.teachers)}

    @staticmethod
    def describe_parts(
        backbone_config: dict, num_tokens: int, dim: int, **config: Any
    ) -> list[Part]:
        return [
            Part(head.name, "teacher", *head.cost((num_tokens, dim)))
            for head in _heads(config["teachers"], "float32").values()
        ]
