"""Image classification on a ViT, V-MoE or Soft MoE backbone.

Axes: B batch, D hidden.
"""

import keras

from keras_moe.models.image_classifier import ImageClassifier
from keras_moe.models.registry import register_task
from keras_moe.models.vit.backbone import ViTBackbone


@register_task
@keras.saving.register_keras_serializable("keras_moe")
class ViTImageClassifier(ImageClassifier):
    """A `ViTBackbone` (ViT or V-MoE) with pooling and a classification head.

    Args:
        backbone: a `ViTBackbone`.
        num_classes: number of classes.
        preprocessor, pooling, multi_label, representation_dim, head_bias,
            output_activation, dropout, head_dtype, pooled_norm, head, head_position,
            pooling_query_key_norm: arguments of `ImageClassifier`.
        **kwargs: arguments of `keras_hub.models.ImageClassifier`.

    Input shape:
        (B, height, width, channels), in [-1, 1].

    Output shape:
        (B, num_classes).

    Raises:
        ValueError: if an argument is out of range or arguments do not fit together.

    Reference:
        *An Image is Worth 16x16 Words*; *Scaling Vision Transformers* (MAP head).

    Example:

    >>> import numpy as np
    >>> from keras_moe.models import ViTBackbone, ViTImageClassifier
    >>> backbone = ViTBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, hidden_dim=8, num_layers=2,
    ...     num_heads=2, mlp_dim=16, moe={"moe_layers": "every_2", "num_experts": 4},
    ... )
    >>> classifier = ViTImageClassifier(backbone, num_classes=3)
    >>> images, labels = np.zeros((4, 8, 8, 3), "float32"), np.array([0, 1, 2, 0])
    >>> history = classifier.fit(images, labels, verbose=0)
    >>> classifier.predict(images, verbose=0).shape
    (4, 3)
    """

    backbone_cls = ViTBackbone
