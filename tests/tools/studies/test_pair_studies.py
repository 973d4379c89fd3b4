"""The studies of LIMoE and CLIP-UP on a few steps, and what all studies refuse."""

import json

import numpy as np
import pytest

from keras_moe import training
from tests.tools.studies.few_digits import MOEPP, TINY_ROUTERS
from tests.training.pair_folder import TINY, write_pairs

SIZES = ("hidden_dim", "num_layers", "num_heads", "mlp_dim", "num_experts")
TOWERS = {
    name: {x: TINY[x] for x in (*SIZES, *own)}
    for name, own in {
        "image": ("image_shape", "patch_size"),
        "text": ("vocabulary_size", "max_length"),
    }.items()
}
MODELS = {
    "limoe": {"preset": "limoe_s32", **TINY},
    "clip_up": {"preset": "clip_up_b32", "projection_dim": 4, **TOWERS},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pairs, and a recipe of a tiny model for each study."""
    folder = tmp_path_factory.mktemp("pairs")
    source = write_pairs(folder, captions=1)
    for name, model in MODELS.items():
        recipe = {
            "data": {"source": source, "batch_size": 4},
            "model": model,
            "schedule": {"epochs": 2, "learning_rate": 1e-3, "warmup_steps": 1},
            "objective": {"name": "contrastive", "tokenizer": "trained"},
        }
        (folder / f"{name}.json").write_text(json.dumps(recipe))
    return folder


def test_rows_of_limoe_train_once_and_are_drawn(done, folder, tmp_path):
    arguments = ["limoe", "--recipe", folder / "limoe.json", "--seeds", "1"]
    arguments += ["--parts", "losses", "orders", "pruning", "--output", tmp_path]
    arguments += ["--only", "none", "all (LIMoE)", "max gate (BPR)"]
    pruned = "text soft minimum 2.01"
    arguments += [pruned, "--set", "num_experts=2", "--epochs", "1"]
    assert "I→T R@1" in done(*arguments)
    results = json.loads((tmp_path / "results.json").read_text())
    rows = results["losses"]["rows"]
    assert list(rows) == ["none", "all (LIMoE)"]
    # LIMoE's order is BPR: the row of another part is the same run.
    assert results["orders"]["rows"]["max gate (BPR)"] == rows["all (LIMoE)"]
    assert len(list((tmp_path / "runs").glob("pairs-seed0-*.json"))) == 2
    curves = results["pruning"]["rows"][pruned]["pruned"]
    for methods in curves.values():
        # With both experts both ways are the whole model.
        assert methods["router_drop"]["2"] == methods["router_pred_skip"]["2"]
    for name in ("losses", "orders", "coverage", "pruning"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000


def test_upcycled_models_begin_with_the_dense_ones(done, folder, tmp_path, monkeypatch):
    recipe = folder / "clip_up.json"
    arguments = ["clip-up", "--recipe", recipe, "--dense-recipe", recipe]
    arguments += ["--parts", "upcycling", "--seeds", "1", "--output", tmp_path]
    arguments += ["--only", "dense, before it is upcycled", "upcycled"]
    starts = []
    train = training.train

    def watched(recipe, callbacks=(), **options):
        def prepared(model, datasets):
            every = callbacks(model, datasets)
            weights = {w.path: np.array(w) for w in model.backbone.weights}
            starts.append((recipe, weights))
            return every

        return train(recipe, callbacks=prepared, **options)

    monkeypatch.setattr(training, "train", watched)
    done(*arguments)
    (dense, _), (recipe, weights) = starts
    assert dense.model.overrides["image"]["moe_layers"] is None
    # With capacities, as in training: else those of two rows would not differ.
    assert recipe.model.overrides["evaluation"] == "official"
    with np.load(next((tmp_path / "runs").glob("dense-*.npz"))) as stored:
        kernels = [x for x in stored.values() if x.shape == (8, 16)]
    experts = [w for path, w in weights.items() if "experts/hidden_kernel" in path]
    assert len(experts) == 2
    for kernel in experts:
        # Every expert is a copy of one of the dense model's MLPs.
        assert any(np.array_equal(kernel, 4 * [mlp]) for mlp in kernels)
    results = json.loads((tmp_path / "results.json").read_text())
    rows = results["upcycling"]["rows"]
    assert not rows["dense, before it is upcycled"]["start"]
    assert 0 <= rows["upcycled"]["start"]["r1"]["mean"] <= 1
    assert (tmp_path / "upcycling_curves.png").stat().st_size > 5_000


@pytest.mark.parametrize(("command", "message"), [
    ("limoe --only other", "rows of each part"),
    ("limoe --parts losses --selected 2", "the part selected"),
    ("limoe --parts thresholds --text-experts 9", "from 1 to 4"),
    ("limoe --recipe vmoe_digits", "a recipe of pairs"),
    ("clip-up --epochs 1", "at least two epochs"),
    ("mumoe --experts 0", "--experts"),
    ("moepp --parts training --only tau=7", "tau=7"),
    ("moepp --parts costs --only vanilla", "Expected the part training with"),
    ("routers --set router=soft", "arguments that the study does not set"),
    ("routers --batch-size 500", "1347 and 450 images, batch_size=500"),
    ("routers --test-split validation", "split='validation'"),
])  # fmt: skip
def test_bad_arguments_end_with_a_line(mistake, folder, tmp_path, command, message):
    study, *arguments = command.split()
    own = {
        "limoe": ["--recipe", folder / "limoe.json"],
        "clip-up": [f"--{x}recipe={folder / 'clip_up.json'}" for x in ("", "dense-")],
        "moepp": MOEPP,
        "routers": TINY_ROUTERS,
    }.get(study, [])
    assert message in mistake(study, *own, "--output", tmp_path, *arguments)
