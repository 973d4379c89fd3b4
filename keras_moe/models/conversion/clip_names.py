"""The towers of CLIP and SigLIP, in OpenCLIP and in transformers."""

from keras_moe.models.conversion.clip_image_names import (
    openclip_image_plan,
    transformers_image_plan,
    transformers_image_root,
)
from keras_moe.models.conversion.clip_parts import LOGIT_NAMES
from keras_moe.models.conversion.openclip_text_names import (
    openclip_text_plan,
    openclip_text_root,
)
from keras_moe.models.conversion.openclip_timm_names import (
    TRUNK,
    openclip_timm_plan,
)
from keras_moe.models.conversion.pair_plan import pair_plan
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.transformers_text_names import (
    transformers_text_plan,
    transformers_text_root,
)


def clip_plan(
    file, config: dict, overrides: dict, tower: str | None = None
) -> ConversionPlan | None:
    """The plan for both towers or for one, or None if the names are others."""
    plans = _plans(file)
    if not plans:
        return None
    if tower is not None and tower not in plans:
        raise ValueError(
            f"Expected weights with the {tower} tower of a CLIP or SigLIP; received: "
            f"the {' and '.join(plans)} tower alone in {file.path}"
        )
    if tower is not None or len(plans) == 1:
        (tower,) = (tower,) if tower else plans
        plan = plans[tower](file, config, overrides)
        return plan if len(plans) > 1 else _with_missing_tower(plan, tower, config)
    towers = {
        name: function(file, config, {**overrides, **(overrides.get(name) or {})})
        for name, function in plans.items()
    }
    bias = LOGIT_NAMES[1]
    return pair_plan(
        file,
        **towers,
        log_scale=LOGIT_NAMES[0],
        bias=bias if bias in file else None,
    )


def _with_missing_tower(plan, tower, config):
    """The plan, with a note if the config is one of pairs."""
    other = {"image": "text", "text": "image"}[tower]
    model = config.get("model_cfg", config)
    parts = {
        "image": ("vision_config", "vision_cfg"),
        "text": ("text_config", "text_cfg"),
    }
    if any(part in model for part in parts[other]):
        note = f"the {other} tower is missing, and the model is its {tower} tower alone"
        plan.notes += (note,)
    return plan


def _plans(file):
    """The functions that plan the towers of a file, by the towers' names."""
    plans = {}
    if any(name.startswith(TRUNK) for name in file):
        plans["image"] = openclip_timm_plan
    elif any(name.startswith("visual.") for name in file):
        plans["image"] = openclip_image_plan
    elif transformers_image_root(file) is not None:
        plans["image"] = transformers_image_plan
    if openclip_text_root(file) is not None:
        plans["text"] = openclip_text_plan
    elif transformers_text_root(file) is not None:
        plans["text"] = transformers_text_plan
    return plans
