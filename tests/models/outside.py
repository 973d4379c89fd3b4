"""A family and a router as a user writes them, outside the package."""

import dataclasses

import keras
from keras import ops

from keras_moe import models, routers
from keras_moe.ops import Cost


@keras.saving.register_keras_serializable("outside")
class NeighbourMixing(keras.layers.Layer):
    """Each token meets the one before it."""

    def build(self, shape):
        self.dense = keras.layers.Dense(shape[-1], dtype=self.dtype_policy, name="mix")
        self.dense.build((None, None, 2 * shape[-1]))

    def call(self, tokens, training=None):
        before = ops.roll(tokens, 1, axis=1)
        return self.dense(ops.concatenate([tokens, before], axis=-1))

    def weight_shapes(self, shape):
        dim = shape[-1]
        return {"mix/kernel": (2 * dim, dim), "mix/bias": (dim,)}

    def cost(self, shape):
        flops = 4 * shape[0] * shape[1] ** 2
        return Cost.all_active(self.weight_shapes(shape), flops)


SIZES = {"image_shape": [16, 8, 3], "patch_size": 4, "hidden_dim": 8, "mlp_dim": 16}
PRESET = {"description": "Neighbours", "config": {**SIZES, "moe_layers": [1]}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeighbourConfig(models.ImageConfig):
    patch_size: int = 16
    hidden_dim: int = 64
    num_layers: int = 2
    mlp_dim: int = 128


@models.register_backbone
@keras.saving.register_keras_serializable("outside")
class NeighbourBackbone(models.ImageBackbone):
    config_class = NeighbourConfig

    @classmethod
    def tower(cls, config, dtype=None):
        return models.image_tower(
            config, dtype, lambda spec, index: NeighbourMixing(dtype=dtype, name="mix")
        )


@models.register_task
@keras.saving.register_keras_serializable("outside")
class NeighbourClassifier(models.ImageClassifier):
    backbone_cls = NeighbourBackbone


models.register_presets({"neighbours_tiny": {"backbone": NeighbourBackbone, **PRESET}})


@routers.register_router("sharp_token_choice", num_selected_experts=1)
@keras.saving.register_keras_serializable("outside")
class SharpRouter(routers.TokenChoiceRouter):
    """Token choice of logits that are twice as large."""

    def scale_logits(self, logits):
        return 2.0 * logits
