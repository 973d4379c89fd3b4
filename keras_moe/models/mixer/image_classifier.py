"""Image classification on an MLP-Mixer backbone.

Axes: B batch, D hidden.
"""

import keras

from keras_moe.models.image_classifier import ImageClassifier
from keras_moe.models.mixer.backbone import MixerBackbone
from keras_moe.models.registry import register_task


@register_task
@keras.saving.register_keras_serializable("keras_moe")
class MixerImageClassifier(ImageClassifier):
    """A `MixerBackbone` with average pooling and a classification head.

    Args:
        backbone: a `MixerBackbone`.
        num_classes: number of classes.
        preprocessor, multi_label, representation_dim, head_bias, output_activation,
            dropout, head_dtype, pooled_norm, head, head_position: arguments of
            `ImageClassifier`.
        pooling: `"average"`, also for None, or `"first"`.
        pooling_query_key_norm: None, since nothing here attends.
        **kwargs: arguments of `keras_hub.models.ImageClassifier`.

    Input shape:
        (B, height, width, channels), in [-1, 1].

    Output shape:
        (B, num_classes).

    Raises:
        ValueError: if an argument is out of range or arguments do not fit together.

    Reference:
        *MLP-Mixer: An all-MLP Architecture for Vision*.

    Example:

    >>> import numpy as np
    >>> from keras_moe.models import MixerBackbone, MixerImageClassifier
    >>> backbone = MixerBackbone(
    ...     image_shape=(8, 8, 3), patch_size=4, hidden_dim=8, num_layers=2,
    ...     token_mlp_dim=4, mlp_dim=16,
    ... )
    >>> classifier = MixerImageClassifier(backbone, num_classes=3)
    >>> tuple(classifier(np.zeros((4, 8, 8, 3), "float32")).shape)
    (4, 3)
    """

    backbone_cls = MixerBackbone
