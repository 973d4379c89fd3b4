"""Image towers of timm in OpenCLIP, as its SigLIPs have them."""

from keras_moe.models.conversion.clip_image_names import CLIP_IMAGES
from keras_moe.models.conversion.clip_parts import LOGIT_NAMES, ignored
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.preprocessing import openclip_preprocessing
from keras_moe.models.conversion.published_tensors import PublishedTensors
from keras_moe.models.conversion.sizes import required
from keras_moe.models.conversion.timm_names import timm_plan
from keras_moe.models.conversion.weight_rules import Filled, Matrix, Vector, renamed

TRUNK = "visual.trunk."
_HEAD = "visual.head."
_PROJECTION = f"{_HEAD}proj."


class _Trunk(PublishedTensors):
    """The tensors of the tower, under timm's own names."""

    def __init__(self, file):
        names = [name for name in file if name.startswith(TRUNK)]
        super().__init__(file.path, {x.removeprefix(TRUNK): file[x] for x in names})


def openclip_timm_plan(file, config: dict, overrides: dict) -> ConversionPlan:
    """The plan for an image tower of timm."""
    vision = config.get("model_cfg", {}).get("vision_cfg", {})
    preprocess = config.get("preprocess_cfg", {})
    timm = {
        "pretrained_cfg": {
            "mean": preprocess.get("mean", list(CLIP_IMAGES.mean)),
            "std": preprocess.get("std", list(CLIP_IMAGES.std)),
        }
    }
    if vision.get("timm_model_name"):
        timm["architecture"] = vision["timm_model_name"]
    trunk = _Trunk(file)
    pool = vision.get("timm_pool") or ("map" if "attn_pool.q.weight" in trunk else None)
    if pool is not None:
        timm["global_pool"] = pool
    plan = timm_plan(trunk, timm, overrides)
    if plan is None:
        raise ValueError(
            "Expected an image tower of timm that is a plain ViT; received: "
            f"{len(trunk)} tensors such as {TRUNK + min(trunk)!r} in {file.path}"
        )
    plan.scheme = "CLIP (OpenCLIP)"
    plan.rules = {
        path: renamed(rule, TRUNK.__add__) for path, rule in plan.rules.items()
    }
    if f"{_PROJECTION}weight" in file:
        _add_projection(plan, file)
    elif unknown := sorted(name for name in file if name.startswith(_HEAD)):
        raise ValueError(
            "Expected a linear projection of images or none; received: "
            f"{unknown[0]!r} in {file.path}"
        )
    plan.ignored = ignored(file, text=("text.",), logits=LOGIT_NAMES)
    plan.preprocessing, notes = openclip_preprocessing(preprocess)
    plan.notes += notes
    return plan


def _add_projection(plan, file):
    """Adds OpenCLIP's projection behind the tower."""
    has_token = plan.arguments["class_token"]
    default = {"pooling": "class_token" if has_token else "average"}
    plan.task_arguments = plan.task_arguments or default
    plan.task_arguments["num_classes"] = required(file, f"{_PROJECTION}weight", 2)[0]
    plan.rules["predictions/kernel"] = Matrix(f"{_PROJECTION}weight")
    bias = f"{_PROJECTION}bias"
    plan.rules["predictions/bias"] = Vector(bias) if bias in file else Filled()
