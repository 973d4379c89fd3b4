"""KerasHub's ViT, CLIP and SigLIP, as models in memory."""

import keras
import keras_hub

from keras_moe.models.conversion.clip_parts import LOGIT_NAMES
from keras_moe.models.conversion.keras_hub_image_names import (
    image_tower_plan,
    vit_plan,
)
from keras_moe.models.conversion.keras_hub_model import KerasHubModel
from keras_moe.models.conversion.keras_hub_parts import Names
from keras_moe.models.conversion.keras_hub_text_names import text_tower_plan
from keras_moe.models.conversion.pair_plan import pair_plan
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
    """The weights of a KerasHub model, and the plan for them."""
    if isinstance(model, _PAIRS):
        return _both_towers(model) if tower is None else _one_tower(model, tower)
    own = "text" if isinstance(model, _TEXTS) else "image"
    if tower not in (None, own):
        raise ValueError(
            f"Expected a model of KerasHub with a {tower} tower; received: "
            f"{type(model).__name__} {model.name!r}"
        )
    encoder, around = model, None
    if isinstance(model, _hub.ViTImageClassifier):
        encoder, around = model.backbone, model
    file = KerasHubModel(model)
    plan = _plan(encoder, around, Names(file))
    return file, _completed(plan, model, encoder)


def _parts(model, tower):
    """The layers of a tower and the CLIP around it, or None."""
    is_text = tower == "text"
    parts = [model.text_encoder if is_text else model.vision_encoder]
    if not isinstance(model, _hub.CLIPBackbone):
        return parts, None
    return [
        *parts,
        model.text_projection if is_text else model.vision_projection,
    ], model


def _one_tower(model, tower):
    parts, around = _parts(model, tower)
    file = KerasHubModel(model, {"": parts})
    plan = _plan(parts[0], around, Names(file))
    other = "image" if tower == "text" else "text"
    plan.notes += (f"the {other} tower and the logits' scale are left out",)
    return file, _completed(plan, model, parts[0])


def _both_towers(model):
    """The weights of a pair, in which both towers have the same paths."""
    parts = {tower: _parts(model, tower) for tower in ("image", "text")}
    head = model.clip_head if parts["image"][1] else model.siglip_head
    layers = {f"{tower}/": layers for tower, (layers, _) in parts.items()}
    file = KerasHubModel(model, {**layers, "": [head]})
    plans = {}
    for tower, ((encoder, *_), around) in parts.items():
        names = Names(name for name in file if name.startswith(f"{tower}/"))
        plans[tower] = _completed(_plan(encoder, around, names), model, encoder)
    scalars = [next((x for x in file if x.endswith(end)), None) for end in LOGIT_NAMES]
    return file, pair_plan(file, **plans, log_scale=scalars[0], bias=scalars[1])


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
