"""Names and activations that the image and the text tower of a CLIP have in common."""

from typing import Any

from keras_moe.models.conversion.torch_blocks import BlockNames

OPENCLIP_CONFIG = "open_clip_config.json"
OPENCLIP_BLOCK = BlockNames(
    norms=("ln_1.", "ln_2."),
    mlp=("mlp.c_fc.", "mlp.c_proj."),
    # PyTorch's own attention: `in_proj_weight`, `in_proj_bias`.
    queries=("attn.in_proj_",),
    output="attn.out_proj.",
    scales=("ls_1.gamma", "ls_2.gamma"),
)
TRANSFORMERS_BLOCK = BlockNames(
    norms=("layer_norm1.", "layer_norm2."),
    mlp=("mlp.fc1.", "mlp.fc2."),
    queries=tuple(f"self_attn.{name}_proj." for name in "qkv"),
    output="self_attn.out_proj.",
)
# The names of transformers' and OpenCLIP's configs -> this library's.
ACTIVATIONS = {
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
IMAGE_TOWER, TEXT_TOWER = "of the image tower", "of the text tower"
LOGITS = "of the logits of pairs"
LOGIT_NAMES = ("logit_scale", "logit_bias")
# Numbers that OpenAI's files have beside the weights.
OPENAI_NUMBERS = ("input_resolution", "context_length", "vocab_size")


def activation_of(name: str | None, file: Any, overrides: dict) -> Any:
    """The activation of a tower."""
    if "activation" in overrides:
        return overrides["activation"]
    if name not in ACTIVATIONS:
        raise ValueError(
            "Expected activation='quick_gelu' (OpenAI's weights) or 'gelu' (most of "
            f"OpenCLIP's), which neither weights nor config of {file.path} tell; "
            f"received: {name!r}"
        )
    return ACTIVATIONS[name]


def ignored(file: Any, **names: tuple[str, ...]) -> dict[str, str]:
    """The tensors of a file that a plan leaves out, with the reason."""
    reasons = {"image": IMAGE_TOWER, "text": TEXT_TOWER, "logits": LOGITS}
    return {
        name: reasons[kind]
        for kind, prefixes in names.items()
        for name in file
        if name.startswith(prefixes)
    }
