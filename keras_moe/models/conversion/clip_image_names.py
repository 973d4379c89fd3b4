"""The names of CLIP's and SigLIP's image towers, in OpenCLIP and in transformers.

CLIP's projection becomes a head without bias: the model's outputs are the image
embeddings, before they are normalised.
"""

import re
from typing import Any

from keras_moe.models.conversion.clip_parts import (
    LOGIT_NAMES,
    OPENAI_NUMBERS,
    OPENCLIP_BLOCK,
    OPENCLIP_CONFIG,
    TRANSFORMERS_BLOCK,
    activation_of,
    ignored,
)
from keras_moe.models.conversion.image_range import Normalization, normalization
from keras_moe.models.conversion.plan import ConversionPlan
from keras_moe.models.conversion.preprocessing import (
    openclip_preprocessing,
    transformers_preprocessing,
)
from keras_moe.models.conversion.sizes import (
    agree,
    numbered,
    required,
    square_grid,
    usual_heads,
)
from keras_moe.models.conversion.timm_names import patches
from keras_moe.models.conversion.torch_blocks import (
    attention_rules,
    block_rules,
)
from keras_moe.models.conversion.weight_rules import (
    Direct,
    Filled,
    Matrix,
    Positions,
    Squeezed,
    linear,
    norm,
)

CLIP_IMAGES = Normalization(
    (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
)
# OpenCLIP's arguments of an image tower that do not matter here, or that follow from
# the tensors; and those of which only the default is supported.
_OPENCLIP_FREE = (
    "layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size",
    "ls_init_value", "patch_dropout", "attn_pooler_queries", "attn_pooler_heads",
    "n_queries", "output_tokens", "timm_model_pretrained", "timm_pool", "timm_proj",
    "timm_proj_bias", "timm_drop", "timm_drop_path", "timm_use_rope",
)  # fmt: skip
_OPENCLIP_DEFAULTS = {
    "pool_type": ("tok",),
    "pos_embed_type": ("learnable",),
    "act_kwargs": (None, {}),
    "norm_kwargs": (None, {}),
    "timm_model_name": (None, ""),
    **dict.fromkeys(
        (
            "attentional_pool", "final_ln_after_pool", "global_average_pool",
            "input_patchnorm", "no_ln_pre", "qk_norm", "scaled_cosine_attn",
            "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc",
        ),
        (None, False),
    ),
    "block_type": (None, "default"),
}  # fmt: skip
_OPENCLIP_TEXT = (
    "positional_embedding",
    "text_projection",
    "attn_mask",
    "token_embedding.",
    "ln_final.",
    "transformer.",
    # Later versions have `text.` instead.
    "text.",
    *OPENAI_NUMBERS,
)
_TRANSFORMERS_TEXT = ("text_model.", "text_projection.")


def _tower(file, kernel, positions, class_token, blocks, mlp, overrides, heads=None):
    """The backbone's arguments that all towers have."""
    hidden_dim, channels, height, width = required(file, kernel, 4)
    rows, _ = required(file, positions, 2)
    grid = square_grid(rows, class_token, f"{positions!r} in {file.path}")
    heads = heads or overrides.get("num_heads") or usual_heads(hidden_dim, file.path)
    return {
        "image_shape": (grid * height, grid * width, channels),
        "patch_size": height if height == width else (height, width),
        "hidden_dim": hidden_dim,
        "num_layers": len(blocks),
        "num_heads": heads,
        "mlp_dim": required(file, mlp, 2)[0],
        "class_token": class_token,
        "position_interpolation": "bicubic",
    }


def _check_openclip(vision, file):
    """Refuses towers that `ViTBackbone` does not compute."""
    for name, value in vision.items():
        allowed = _OPENCLIP_DEFAULTS.get(name, ())
        if name not in _OPENCLIP_FREE and value not in allowed:
            raise ValueError(
                "Expected an image tower of OpenCLIP with its defaults in the config "
                f"of {file.path}; received: vision_cfg.{name}={value!r}"
            )


def openclip_image_plan(file, config: dict, overrides: dict) -> ConversionPlan:
    """The plan for an image tower of OpenCLIP's own kind."""
    visual, blocks_at = "visual.", "visual.transformer.resblocks."
    blocks = numbered(file, r"visual\.transformer\.resblocks\.(\d+)\.")
    model = config.get("model_cfg", {})
    activation = None
    if model:
        activation = "quick_gelu" if model.get("quick_gelu") else "gelu"
    vision = model.get("vision_cfg", {})
    _check_openclip(vision, file)
    width = required(file, f"{visual}conv1.weight", 4)[0]
    agree(file, vision, OPENCLIP_CONFIG, width=width, layers=len(blocks))
    if f"{visual}proj" in file:
        embed_dim = required(file, f"{visual}proj", 2)[1]
        agree(file, model, OPENCLIP_CONFIG, embed_dim=embed_dim)
    heads = None
    if "width" in vision:
        heads, rest = divmod(width, vision.get("head_width", 64))
        if rest:
            raise ValueError(
                f"Expected a head_width that divides width={width} in the config of "
                f"{file.path}; received: head_width={vision.get('head_width', 64)}"
            )
    arguments = {
        **_tower(
            file,
            f"{visual}conv1.weight",
            f"{visual}positional_embedding",
            True,
            blocks,
            f"{blocks_at}0.mlp.c_fc.weight",
            overrides,
            heads,
        ),
        "embedding_norm": True,
        "layer_norm_epsilon": 1e-5,
        "activation": activation_of(activation, file, overrides),
    }
    preprocessing = config.get("preprocess_cfg", {})
    images = normalization(
        arguments["image_shape"][2],
        preprocessing.get("mean"),
        preprocessing.get("std"),
        config.get("preprocessor", {}),
        CLIP_IMAGES,
    )
    has_bias = f"{visual}conv1.bias" in file
    rules = openclip_image_rules(len(blocks), images, has_bias, file)
    task = None
    if f"{visual}proj" in file:
        # It is stored as here: (D, embedding).
        rules["predictions/kernel"] = Direct(f"{visual}proj")
        rules["predictions/bias"] = Filled()
        size = required(file, f"{visual}proj", 2)[1]
        task = {"num_classes": size, "pooling": "class_token"}
    images_preprocessing, notes = openclip_preprocessing(preprocessing)
    return ConversionPlan(
        "CLIP (OpenCLIP)",
        "ViTBackbone",
        arguments,
        rules,
        task,
        ignored(file, text=_OPENCLIP_TEXT, logits=LOGIT_NAMES),
        notes,
        images_preprocessing,
    )


def transformers_image_root(file) -> str | None:
    """The start of the names of transformers' image tower, or None without one."""
    for root in ("vision_model.", ""):
        if f"{root}embeddings.patch_embedding.weight" in file:
            return root
    return None


def transformers_image_plan(file, config: dict, overrides: dict) -> ConversionPlan:
    """The plan for an image tower of transformers' CLIP or SigLIP."""
    root = transformers_image_root(file)
    if len(file[f"{root}embeddings.patch_embedding.weight"].shape) == 2:
        raise ValueError(
            "Expected a SigLIP 2 of one image size; received: one for images of any "
            f"shape (NaFlex) in {file.path}"
        )
    vision = config.get("vision_config") or config
    blocks = numbered(file, rf"{re.escape(root)}encoder\.layers\.(\d+)\.")
    embeddings = f"{root}embeddings."
    class_token = f"{embeddings}class_embedding" in file
    agree(
        file,
        vision,
        "config.json",
        hidden_size=required(file, f"{embeddings}patch_embedding.weight", 4)[0],
        num_hidden_layers=len(blocks),
        intermediate_size=required(file, f"{root}encoder.layers.0.mlp.fc1.weight", 2)[
            0
        ],
    )
    # Transformers leaves out the defaults of CLIP and SigLIP.
    is_siglip = not class_token
    activation = vision.get("hidden_act")
    if activation is None and config.keys() - {"preprocessor"}:
        activation = "gelu_pytorch_tanh" if is_siglip else "quick_gelu"
    arguments = {
        **_tower(
            file,
            f"{embeddings}patch_embedding.weight",
            f"{embeddings}position_embedding.weight",
            class_token,
            blocks,
            f"{root}encoder.layers.0.mlp.fc1.weight",
            overrides,
            vision.get("num_attention_heads"),
        ),
        "embedding_norm": f"{root}pre_layrnorm.weight" in file,
        "layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6 if is_siglip else 1e-5),
        "activation": activation_of(activation, file, overrides),
    }
    preprocessor = config.get("preprocessor", {})
    images = normalization(
        arguments["image_shape"][2],
        preprocessor.get("image_mean"),
        preprocessor.get("image_std"),
        preprocessor,
        None if is_siglip else CLIP_IMAGES,
    )
    has_bias = f"{embeddings}patch_embedding.bias" in file
    rules = transformers_image_rules(root, arguments, images, has_bias)
    task = None
    if "visual_projection.weight" in file:
        rules["predictions/kernel"] = Matrix("visual_projection.weight")
        rules["predictions/bias"] = Filled()
        size = required(file, "visual_projection.weight", 2)[0]
        task = {"num_classes": size, "pooling": "class_token"}
    elif f"{root}head.probe" in file:
        rules.update(siglip_pooler_rules(f"{root}head."))
        task = {"num_classes": arguments["hidden_dim"], "pooling": "map"}
    left = ignored(file, text=_TRANSFORMERS_TEXT, logits=LOGIT_NAMES)
    if f"{embeddings}position_ids" in file:
        left[f"{embeddings}position_ids"] = "the numbers 0, 1, 2, ..."
    images_preprocessing, notes = transformers_preprocessing(
        preprocessor, not is_siglip
    )
    return ConversionPlan(
        "SigLIP (transformers)" if is_siglip else "CLIP (transformers)",
        "ViTBackbone",
        arguments,
        rules,
        task,
        left,
        notes,
        images_preprocessing,
    )


def openclip_image_rules(
    num_layers: int,
    images: Normalization | None = None,
    has_bias: bool = False,
    file: Any = (),
) -> dict:
    """Rules of OpenCLIP's image tower without its projection."""
    visual = "visual."
    rules = {
        **patches(f"{visual}conv1.", has_bias, True, images),
        "class_token/token": Squeezed(f"{visual}class_embedding", axes=2),
        "position_embedding/embedding": Positions(
            f"{visual}positional_embedding", axes=1
        ),
        **norm("embedding_norm", f"{visual}ln_pre."),
        **norm("final_norm", f"{visual}ln_post."),
    }
    for i in range(num_layers):
        block = f"{visual}transformer.resblocks.{i}."
        rules.update(block_rules(file, f"block_{i}", block, OPENCLIP_BLOCK))
    return rules


def transformers_image_rules(
    root: str,
    arguments: dict,
    images: Normalization | None = None,
    has_bias: bool = False,
) -> dict:
    """Rules of transformers' image tower without its head."""
    embeddings = f"{root}embeddings."
    rules = {
        **patches(f"{embeddings}patch_embedding.", has_bias, True, images),
        "position_embedding/embedding": Positions(
            f"{embeddings}position_embedding.weight", axes=1
        ),
        **norm("final_norm", f"{root}post_layernorm."),
    }
    if arguments["class_token"]:
        token = Squeezed(f"{embeddings}class_embedding", axes=2)
        rules["class_token/token"] = token
    if arguments["embedding_norm"]:
        # Spelt so in the release.
        rules.update(norm("embedding_norm", f"{root}pre_layrnorm."))
    for i in range(arguments["num_layers"]):
        block = f"{root}encoder.layers.{i}."
        rules.update(block_rules((), f"block_{i}", block, TRANSFORMERS_BLOCK))
    return rules


def siglip_pooler_rules(head: str) -> dict:
    """Rules of SigLIP's attention pooling; the pooled vector itself is the output."""
    rules = {
        "pooler/probe": Direct(f"{head}probe"),
        **norm("pooler/norm", f"{head}layernorm."),
        **linear("pooler/mlp/hidden", f"{head}mlp.fc1."),
        **linear("pooler/mlp/output", f"{head}mlp.fc2."),
        "predictions/kernel": Filled("identity"),
        "predictions/bias": Filled(),
    }
    return {
        **rules,
        **attention_rules(
            "pooler/attention",
            [f"{head}attention.in_proj_"],
            f"{head}attention.out_proj.",
        ),
    }
