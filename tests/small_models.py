"""Sizes, images and non-trivial weights that tests of models share."""

from typing import Any

import numpy as np

from keras_moe import models
from tests.compare import assert_close, assert_same

# One block with experts: what is asked of a router or of training compiles once.
ONE_BLOCK = {"num_layers": 1, "moe_layers": [0]}
ONE_EXPERT_PER_TOKEN = {"name": "softmax_token_choice", "num_selected_experts": 1}
# A V-MoE whose image is not square.
SMALL = {
    "image_shape": (16, 8, 2), "patch_size": 4, "hidden_dim": 16, "num_layers": 2,
    "num_heads": 2, "mlp_dim": 32, "moe_layers": "every_2", "num_experts": 4,
}  # fmt: skip
# GPT-2's decoder: what differs from the defaults.
GPT2 = {
    "positions": "learned", "norm": "layer", "gated_mlp": False, "use_bias": True,
    "activation": "gelu_tanh", "tied_embeddings": True,
}  # fmt: skip
_SIZES = {
    "hidden_dim", "num_layers", "num_heads", "mlp_dim", "patch_size", "image_shape",
    "token_mlp_dim", "moe_layers", "num_experts", "vocabulary_size", "max_length",
    "expert_mlp_dim", "projection_dim", "num_key_value_heads",
}  # fmt: skip


def presets_of_each_kind() -> list[str]:
    """One preset of all that differ only in their sizes."""
    kinds = {}
    for name, preset in models.builtin_presets().items():
        facts, arguments = [preset["backbone"], preset["task"]], [preset["config"]]
        for config in arguments:
            arguments += [x for x in config.values() if isinstance(x, dict)]
            facts += sorted({*config} - _SIZES) + ["moe"] * ("moe_layers" in config)
            facts += [x for x in config.values() if isinstance(x, str)]
        kinds.setdefault(tuple(facts), name)
    return sorted(kinds.values())


def images(*shape: int) -> np.ndarray:
    """Normal noise, always the same; (3, 16, 8, 3) without a shape."""
    shape = shape or (3, 16, 8, 3)
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def with_weights(model: Any, seed: int = 1) -> Any:
    """Gives every weight something to say: some start at zero."""
    generator = np.random.default_rng(seed)
    for weight in model.weights:
        if "seed_generator" not in weight.path:
            values = generator.normal(size=weight.shape) * 0.3
            is_variance = "variance" in weight.path.split("/")[-1]
            # The root of a negative one is NaN, which equals itself in comparisons.
            weight.assign(np.abs(values) if is_variance else values)
    return model


def assert_same_outputs(actual: Any, expected: Any, inputs: Any, **tolerance: float):
    """Compares what two models predict: bit for bit, unless a tolerance is given."""
    outputs = [model.predict(inputs, verbose=0) for model in (actual, expected)]
    if tolerance:
        assert_close(*outputs, **tolerance)
    else:
        assert_same(*outputs)


def vit(**config: Any) -> Any:
    """The V-MoE of `SMALL`, some of whose arguments may be others."""
    return models.ViTBackbone.from_config({**SMALL, **config})


def mixer(**config: Any) -> Any:
    """An MLP-Mixer of the same sizes."""
    sizes = {name: size for name, size in SMALL.items() if name != "num_heads"}
    return models.MixerBackbone.from_config({**sizes, "token_mlp_dim": 8, **config})


def classifier(head: dict | None = None, num_classes: int = 3, **config: Any) -> Any:
    """A classifier around `vit`, by its own arguments."""
    return models.ViTImageClassifier(vit(**config), num_classes, **(head or {}))


def small_classifier(**kwargs: Any) -> Any:
    """A classifier of three classes with experts, for images of (16, 8, 3)."""
    fields = {**SMALL, "image_shape": (16, 8, 3), "num_classes": 3, **kwargs}
    return with_weights(models.from_preset("vmoe_s32", load_weights=False, **fields))


def small_pairs_model(captions: list[str]) -> Any:
    """A LIMoE for images of (8, 8, 3), whose tokenizer is trained on captions."""
    tokenizer = models.TextTokenizer.trained(captions, 520, max_length=8)
    backbone = models.LIMoEBackbone(
        image_shape=(8, 8, 3), patch_size=4, vocabulary_size=520, max_length=8,
        hidden_dim=8, num_layers=2, num_heads=2, mlp_dim=16, projection_dim=4,
        moe={"num_experts": 4, "router": ONE_EXPERT_PER_TOKEN},
    )  # fmt: skip
    return models.ContrastiveModel(with_weights(backbone), tokenizer)


def small_tokenizer(**kwargs: Any) -> Any:
    """Byte pairs trained on a few captions."""
    captions = ["a photo of a cat", "a photo of two cats", "the cat's hat"]
    return models.TextTokenizer.trained(captions, **{"vocabulary_size": 530, **kwargs})


def flat_config(model: Any) -> dict:
    """A model's config by flat name, as presets and overrides have it."""
    config = model.get_config()
    moe = config["moe"] or {}
    flat = {**config, **moe}
    if isinstance(moe.get("router"), dict):
        flat |= {**moe["router"], "name": config["name"]}
        flat["router"] = moe["router"]["name"]
    return flat
