"""Models saved by earlier versions predict as they did."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_moe import models
from tests.small_models import images

FOLDER = Path(__file__).parent.parent / "data" / "saved_models"


@pytest.mark.every_backend
@pytest.mark.parametrize("name", ["sinkhorn", "moepp", "mumoe"])
def test_presets_load_and_predict_as_they_did(name):
    model = models.from_preset(str(FOLDER / name))
    np.testing.assert_allclose(
        model.predict(images(), verbose=0),
        np.load(FOLDER / name / "outputs.npy"),
        atol=2e-5,
    )
    described = models.describe(str(FOLDER / name))
    weights = model.trainable_weights
    assert described.parameters == sum(int(np.prod(w.shape)) for w in weights)


def test_keras_files_load_and_predict_as_they_did():
    model = keras.models.load_model(FOLDER / "soft.keras")
    np.testing.assert_allclose(
        model.predict(images(), verbose=0),
        np.load(FOLDER / "soft_outputs.npy"),
        atol=2e-5,
    )


@pytest.mark.backend_free
def test_their_flat_arguments_have_become_a_config():
    moe = models.from_preset(str(FOLDER / "sinkhorn"), task="backbone").moe
    assert (moe.moe_layers, moe.num_experts, moe.expert_mlp_dim) == ([0, 2], 4, 12)
    assert (moe.priority, moe.evaluation) == ("max_gate", "official")
    assert moe.router_options["affinity"]["config"]["iterations"] == 7
    mumoe = models.from_preset(str(FOLDER / "mumoe"), task="backbone").moe
    assert (mumoe.num_experts, mumoe.rank) == ([3, 2], 0.75)


@pytest.mark.backend_free
def test_flat_overrides_find_their_way_into_a_saved_model():
    model = models.from_preset(
        str(FOLDER / "sinkhorn"), capacity_factor=3.0, load_weights=False
    )
    assert model.backbone.moe.capacity_factor == 3.0
    assert model.backbone.moe.priority == "max_gate"


@pytest.mark.backend_free
def test_folders_of_before_evaluation_keep_their_groups(tmp_path):
    folder = tmp_path / "preset"
    backbone = models.from_preset(
        "vmoe_digits",
        router="softmax_expert_choice",
        router_options={"eval_capacity_factor": 1.0},
        evaluation="batch_invariant",
        load_weights=False,
    )
    backbone.save_to_preset(folder)
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    saved["config"].update(saved["config"].pop("moe"))
    del saved["config"]["evaluation"]
    path.write_text(json.dumps(saved))
    for again in (
        models.from_preset(str(folder)),
        models.ViTBackbone.from_preset(folder),
    ):
        router = again.get_layer("block_1").feed_forward.router
        assert router.groups_by_image(False)
    saved["config"].update(moe_layers=[], router_options=None)
    path.write_text(json.dumps(saved))
    assert "MoE" not in {p.kind[:3] for p in models.describe(str(folder)).parts}


@pytest.mark.backend_free
def test_a_dense_model_has_no_router_options():
    dense = models.from_preset("vit_s32", num_layers=1, hidden_dim=12)
    with pytest.raises(ValueError, match="ViTBackbone without"):
        dense.with_router_options(normalize_gates="after")
