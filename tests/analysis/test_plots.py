"""Pictures are drawn, and what cannot be drawn is refused."""

from functools import partial

import numpy as np
import pytest

from keras_moe.analysis import (
    BlockUsage,
    ExpertAblation,
    ExpertUsage,
    RoutingScores,
    TypeLoads,
    coverage_curves,
    expert_load,
    plots,
)
from keras_moe.ops import Routing

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.uniform(-1, 1, (12, 8, 8, 1))
HEAD = Routing(*[GENERATOR.dirichlet([0.2] * 3, (12, 1))] * 6)
BLOCK = Routing(*[GENERATOR.dirichlet([0.2] * 3, (12, 5))] * 6)
NAMES = list("abcdefghijkl")
MAPS = {"zero": np.ones((12, 2, 2)), "constant": np.zeros((12, 2, 2))}
ABLATION = ExpertAblation(
    experts=np.array([0, 3, 5]),
    counts=np.array([10, 10, 5, 0]),
    accuracy=np.array([1.0, 0.5, 0.8, 0.0]),
    ablated=np.array([[0, 0.5, 0.8, 0], [1.0, 0.25, 0.4, 0], [1.0, 0.5, 0.8, 0]]),
)
TOKENS = np.array([[1.0, 5.0, 2.0], [0.0, 1.0, 9.0]])
USAGE = ExpertUsage(["image", "text"], {"block_1": BlockUsage(TOKENS, TOKENS)})
CURVES = {group: coverage_curves(USAGE, groups=group) for group in USAGE.groups}
LOADS = {"a": expert_load(HEAD), "b": expert_load(BLOCK)}
SHARES = {"ffn": 0.6, "zero": 0.2, "copy": 0.1, "constant": 0.1}
SCORES = RoutingScores(np.linspace(0.4, 1, 50), np.linspace(0, 0.4, 50))
PICTURES = {
    "views": (plots.plot_expert_views, IMAGES, BLOCK, (2, 2)),
    "images": (partial(plots.plot_expert_images, labels=NAMES), IMAGES, HEAD),
    "patches": (plots.plot_expert_patches, IMAGES, BLOCK, (2, 2)),
    "compute": (plots.plot_compute_maps, IMAGES, MAPS["zero"]),
    "types": (plots.plot_type_maps, IMAGES, MAPS),
    "ablation": (plots.plot_ablation, {"a": ABLATION, "b": ABLATION}),
    "load": (plots.plot_expert_load, LOADS),
    "types_load": (plots.plot_load_by_type, {"b": TypeLoads(SHARES, SHARES, 0.0)}),
    "scores": (plots.plot_routing_scores, {"a": SCORES}),
    "coverage": (plots.plot_coverage, CURVES),
    "usage": (plots.plot_expert_usage, USAGE),
    "groups": (plots.plot_expert_groups, USAGE),
    "costs": (plots.plot_errors_over_costs, {"a": [0.1, 0.2]}, {"ms": {"a": 3.0}}),
    "history": (plots.plot_training_history, {"loss": [2.0, 1.0], "val_loss": [2, 1]}),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_drawn(name, tmp_path):
    draw, *arguments = PICTURES[name]
    path = tmp_path / f"{name}.png"
    figure = draw(*arguments, path=path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5_000
    assert figure.axes


def test_pictures_of_the_best_images_and_of_colours(tmp_path):
    colours = GENERATOR.uniform(-1, 1, (12, 8, 8, 3))
    options = {"experts": [2], "seed": None, "threshold": None}
    plots.plot_expert_images(colours, HEAD, tmp_path / "best", **options)
    assert (tmp_path / "best.png").is_file()
    assert plots.plot_expert_views(colours, BLOCK, (2, 2), images_per_expert=4).axes
