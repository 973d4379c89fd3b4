"""KerasHub's ViT, CLIP and SigLIP, as models in memory."""

import keras
import keras_hub

from keras_moe.models.conversion.keras_hub_image_names import (
    image_tower_plan,
    vit_plan,
)
from keras_moe.models.conversion.keras_hub_model import KerasHubModel
from keras_moe.models.conversion.keras_hub_parts import Names
from keras_moe.models.conversion.keras_hub_text_names import text_tower_plan
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.preprocessing import keras_hub_preprocessing
from keras_moe.models.conversion.published_tensors import PublishedTensors

_hub = keras_hub.models
_TEXTS = (_hub.CLIPTextEncoder, _hub.SigLIPTextEncoder)
_PAIRS = (_hub.CLIPBackbone, _hub.SigLIPBackbone)
CLASSES = (
    _hub.ViTBackbone,
    _hub.ViTImageClassifier,
    _hub.CLIPVisionEncoder,
    _hub.SigLIPVisionEncoder,
    *_TEXTS,
    *_PAIRS,
)


def keras_hub_plan(
    model, tower: str | None = None
) -> tuple[PublishedTensors, ConversionPlan]:
    """The weights of a KerasHub model, and the plan for them.

    Args:
        model: one of `CLASSES`.
        tower: `"image"`, `"text"`, or None for the source's own.

    Raises:
        ValueError: if the model has parts that this library's has not, or lacks the
            tower.
    """
    own = "text" if isinstance(model, _TEXTS) else "image"
    tower = tower or own
    if tower != own and not isinstance(model, _PAIRS):
        raise ValueError(
            f"Expected a model of KerasHub with a {tower} tower; received: "
            f"{type(model).__name__} {model.name!r}"
        )
    if isinstance(model, _PAIRS):
        return _of_pair(model, tower)
    encoder, around = model, None
    if isinstance(model, _hub.ViTImageClassifier):
        encoder, around = model.backbone, model
    file = KerasHubModel(model)
    plan = _plan(encoder, around, Names(file))
    return file, _completed(plan, model, encoder)


def _of_pair(model, tower):
    """The weights of one tower, which may have the paths of the other's."""
    encoder = model.text_encoder if tower == "text" else model.vision_encoder
    layers, around, other = [encoder], None, "image" if tower == "text" else "text"
    if isinstance(model, _hub.CLIPBackbone):
        around = model
        is_text = tower == "text"
        layers.append(model.text_projection if is_text else model.vision_projection)
    file = KerasHubModel(model, layers)
    plan = _plan(encoder, around, Names(file))
    plan.notes += (f"the {other} tower and the logits' scale are left out",)
    return file, _completed(plan, model, encoder)


def _plan(encoder, around, names):
    if isinstance(encoder, _TEXTS):
        return text_tower_plan(encoder, around, names)
    if isinstance(encoder, _hub.ViTBackbone):
        return vit_plan(encoder, around, names)
    return image_tower_plan(encoder, around, names)


def _completed(plan, model, encoder):
    """The plan with the preparation of images and the dtype policy."""
    if "image_shape" in plan.arguments:
        plan.preprocessing, notes = keras_hub_preprocessing(
            getattr(model, "preprocessor", None), plan.arguments["image_shape"][2]
        )
        plan.notes += notes
    policy = encoder.dtype_policy
    if type(policy) is keras.DTypePolicy:
        plan.arguments["dtype"] = policy.name
    return plan
