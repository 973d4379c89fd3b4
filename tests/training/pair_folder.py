"""A folder of small pictures with captions, and a recipe that trains on it."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from keras_moe.training import Recipe
from tests.pair_models import IMAGE, TEXT

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
GROUNDS = {"black": 0, "white": 255, "grey": 128}
TINY = {**IMAGE, **TEXT, "image_shape": [8, 8, 3], "projection_dim": 8}
TINY |= {"num_experts": 4, "vocabulary_size": 530, "max_length": 8}
TINY["auxiliary_losses"] = {"limoe": {"thresholds": {"text": 0.7, "image": 1.0}}}


def pair_recipe(source: str, **changes) -> Recipe:
    """A LIMoE of two blocks, trained for two epochs."""
    mine = Recipe(
        "mine",
        data={"source": source, "batch_size": 4},
        model={"preset": "limoe_s32", **TINY},
        schedule={"epochs": 2, "learning_rate": 1e-3},
        objective={"name": "contrastive"},
    )
    return mine.replace(**changes)


def write_pairs(root: Path, captions: int = 2) -> str:
    """Writes coloured squares with captions; returns the source of `load_pairs`."""
    for split in ("train", "test"):
        (root / split).mkdir()
        lines = []
        for name, colour in COLOURS.items():
            for ground, level in GROUNDS.items():
                pixels = np.full((8, 8, 3), level, "uint8")
                pixels[2:6, 2:6] = colour
                file = f"{name}_{ground}.png"
                Image.fromarray(pixels).save(root / split / file)
                texts = (f"a {name} square on {ground}", f"{name} {ground}")
                for caption in texts[:captions]:
                    lines.append(json.dumps({"image": file, "caption": caption}))
        (root / split / "captions.jsonl").write_text("\n".join(lines))
    return f"folder:{root}"
