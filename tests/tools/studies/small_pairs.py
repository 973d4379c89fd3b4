"""Pairs of colours in a folder, and recipes of tiny models of them."""

import json
import math

import numpy as np
from PIL import Image

COLOURS = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "grey": 3 * (99,),
}
SIZES = {"hidden_dim": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 16}
IMAGES = {"image_shape": [8, 8, 3], "patch_size": 4}
TEXTS = {"vocabulary_size": 520, "max_length": 8}
PRESETS = {
    "limoe": {
        "preset": "limoe_s32",
        **SIZES,
        **IMAGES,
        **TEXTS,
        "projection_dim": 4,
        "num_experts": 4,
        "auxiliary_losses": {
            "limoe": {"thresholds": {"text": math.log(2), "image": math.log(3)}}
        },
    },
    "clip_up": {
        "preset": "clip_up_b32",
        "image": {**SIZES, **IMAGES, "num_experts": 4},
        "text": {**SIZES, **TEXTS, "num_experts": 4},
        "projection_dim": 4,
    },
}


def write_pairs(folder):
    """Writes pairs to train on and to test, and a recipe for each study."""
    for split, shades in (("train", 3), ("test", 2)):
        (folder / split).mkdir(parents=True)
        lines = ["image,caption"]
        for name, colour in COLOURS.items():
            for shade in range(shades):
                pixels = np.full((8, 8, 3), colour) // (shade + 1)
                path = f"{name}{shade}.png"
                Image.fromarray(pixels.astype("uint8")).save(folder / split / path)
                lines.append(f"{path},{name} of shade {shade}")
        (folder / split / "captions.csv").write_text("\n".join(lines))
    for name, model in PRESETS.items():
        recipe = {
            "data": {"source": f"folder:{folder}", "batch_size": 4},
            "model": model,
            "schedule": {"epochs": 2, "learning_rate": 1e-3, "warmup_steps": 1},
            "objective": {"name": "contrastive", "tokenizer": "trained"},
        }
        (folder / f"{name}.json").write_text(json.dumps(recipe))
    return folder
