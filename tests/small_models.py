"""Sizes, images and non-trivial weights that tests of models share."""

from typing import Any

import numpy as np

# A V-MoE whose image is not square.
SMALL = {
    "image_shape": (16, 8, 2),
    "patch_size": 4,
    "hidden_dim": 16,
    "num_layers": 2,
    "num_heads": 2,
    "mlp_dim": 32,
    "moe_layers": "every_2",
    "num_experts": 4,
}


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


def flat_config(model: Any) -> dict:
    """A model's config with the fields of its `moe` beside the other arguments."""
    config = model.get_config()
    return {**config, **(config["moe"] or {})}
