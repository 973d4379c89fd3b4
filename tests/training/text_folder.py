"""A folder of small texts, and a recipe that trains on it."""

from pathlib import Path

import numpy as np

from keras_moe.training import Recipe
from tests.pair_models import TEXT

WORDS = "the cat sat on a mat and saw one dog run over two green hills"
TINY = {**TEXT, "vocabulary_size": 560, "max_length": 16, "num_experts": 4}


def text_recipe(source: str | dict, **changes) -> Recipe:
    """A MoE++ of two blocks, trained for two epochs."""
    mine = Recipe(
        "mine",
        data={"source": source, "batch_size": 4, "test_split": "test"},
        model={"preset": "moepp_lm_0.6b", **TINY},
        schedule={"epochs": 2, "learning_rate": 1e-2},
        objective={"name": "next_token"},
    )
    return mine.replace(**changes)


def write_texts(root: Path, seed: int = 0) -> str:
    """Writes splits of random sentences; returns the source of `load_texts`."""
    draw = np.random.default_rng(seed)
    for split, count in (("train", 12), ("test", 3)):
        (root / split).mkdir(parents=True)
        for number in range(count):
            words = draw.choice(WORDS.split(), draw.integers(5, 30))
            (root / split / f"{number}.txt").write_text(" ".join(words))
    return f"text:{root}"
