"""A folder of small pictures with captions, for runs of pairs."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
GROUNDS = {"black": 0, "white": 255, "grey": 128}


def write_pairs(root: Path) -> str:
    """Writes squares of three colours on three grounds, with two captions each.

    Returns the source of `load_pairs`.
    """
    for split in ("train", "test"):
        (root / split).mkdir()
        lines = []
        for name, colour in COLOURS.items():
            for ground, level in GROUNDS.items():
                pixels = np.full((8, 8, 3), level, "uint8")
                pixels[2:6, 2:6] = colour
                file = f"{name}_{ground}.png"
                Image.fromarray(pixels).save(root / split / file)
                for caption in (f"a {name} square on {ground}", f"{name} {ground}"):
                    lines.append(json.dumps({"image": file, "caption": caption}))
        (root / split / "captions.jsonl").write_text("\n".join(lines))
    return f"folder:{root}"
