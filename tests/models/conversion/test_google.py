"""Google's releases and vmoe's models have the same outputs here."""

import json
import shutil

import keras
import numpy as np
import pytest

from keras_moe import models
from tests import golden
from tests.compare import assert_close, assert_same
from tests.published import CHECKPOINTS, part, predict, write_vmoe

pytestmark = pytest.mark.usefixtures("op_by_op")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
# What weights do not tell: with which capacity the images of a batch compete.
CAPACITY = {
    "capacity_factor": 1.0, "eval_capacity_factor": 1.0, "evaluation": "official",
    "examples_per_group": 3, "priority": "max_gate",
}  # fmt: skip


@pytest.mark.every_backend
@pytest.mark.parametrize(("case", "source", "scheme"), [
    ("vit_classic", "vit_classic.npz", "ViT"),
    ("vit_classic_prelogits", "vit_classic_prelogits.npz", "ViT"),
    ("mixer", "mixer.npz", "MLP-Mixer"),
    ("vmoe_tiny", "vmoe_tiny/vmoe_tiny", "V-MoE"),
    ("vmoe_tiny", "vmoe_tiny/vmoe_tiny.index", "V-MoE"),
])  # fmt: skip
def test_logits_of_the_releases(case, source, scheme):
    arrays, _ = golden.load(f"07_checkpoints/{case}_expected")
    model, report = models.convert(str(CHECKPOINTS / source))
    actual = predict(model, arrays["inputs/images"])
    assert_close(actual, arrays["outputs/logits"], **TOLERANCE)
    assert report.scheme == f"{scheme} (Google)"
    assert report.licence == "Apache-2.0"
    assert not report.new
    assert not report.ignored
    paths = {w.path for w in model.weights if keras.backend.is_float_dtype(w.dtype)}
    assert {weight.weight for weight in report.weights} == paths
    assert json.loads(json.dumps(report.to_dict()))["scheme"] == report.scheme
    again = models.from_preset(str(CHECKPOINTS / source))
    assert_same(predict(again, arrays["inputs/images"]), actual)


@pytest.mark.parametrize(("case", "overrides"), [
    ("06_vmoe_models/soft_moe_vit_gap", {}),
    ("06_vmoe_models/vmoe_k2_map_bpr", CAPACITY),
    ("06_vmoe_models/vmoe_k2_token_cap4_nodrop", {}),
    ("06_vmoe_models/dense_vit_token", {}),
    ("16_query_key_norm/map", {}),
    # The first token's pooling has no weights that would tell it.
    ("16_query_key_norm/first", {"pooling": "first"}),
])  # fmt: skip
def test_logits_of_vmoes_models(tmp_path, case, overrides):
    arrays, config = golden.load(case)
    prefix = write_vmoe(tmp_path / "checkpoint", part(arrays, "params/"))
    model, report = models.convert(prefix, **overrides)
    assert model.count_params() == config["param_count"]
    assert models.describe(model).parameters == model.count_params()
    actual = predict(model, arrays["inputs/images"])
    assert_close(actual, arrays["outputs/logits"], **TOLERANCE)
    if "soft" in case:
        assert report.scheme == "Soft MoE (Google)"
        assert report.arguments["num_slots"] == 3


@pytest.mark.parametrize("prefix", ["params", "target"])
def test_a_training_state_gives_its_parameters(tmp_path, prefix):
    arrays, config = golden.load("16_query_key_norm/map")
    state = {"step": np.int32(7), "rngs/dropout": np.zeros(2, "uint32")}
    for name, array in part(arrays, "params/").items():
        state[f"{prefix}/{name}"] = array
        state[f"opt_state/0/mu/{name}"] = np.zeros_like(array)
    state["opt_state/0/count"] = np.int32(7)
    model, report = models.convert(write_vmoe(tmp_path / "state", state))
    actual = predict(model, arrays["inputs/images"])
    assert_close(actual, arrays["outputs/logits"], **TOLERANCE)
    assert set(report.ignored) == {x for x in state if not x.startswith(prefix)}
    assert "optimizer" in report.ignored["opt_state/0/count"]
    assert report.ignored["step"].endswith("no parameter: step")
    description = models.describe(str(tmp_path / "state"))
    assert description.parameters == config["param_count"]


def test_released_names_tell_what_weights_do_not(tmp_path):
    for file in (CHECKPOINTS / "vmoe_tiny").iterdir():
        name = file.name.replace("vmoe_tiny", "vmoe_b16_imagenet21k_randaug_strong")
        shutil.copy(file, tmp_path / name)
    model, report = models.convert(
        str(tmp_path / "vmoe_b16_imagenet21k_randaug_strong"), load_weights=False
    )
    assert report.arguments["examples_per_group"] == 8
    assert model.multi_label
    assert not report.notes
    assert not report.weights


def test_the_names_of_big_vision_and_linen(tmp_path):
    renamed = {}
    for name, array in np.load(CHECKPOINTS / "vit_classic.npz").items():
        for old, new in (
            ("LayerNorm_2", "LayerNorm_1"),
            ("MlpBlock_3", "MlpBlock_0"),
            ("Attention_1", "Attention_0"),
            ("Transformer/posembed_input/", ""),
        ):
            name = name.replace(old, new)
        renamed[f"params/{name}"] = array
    np.savez(tmp_path / "vit.npz", **renamed)
    expected, _ = golden.load("07_checkpoints/vit_classic_expected")
    model = models.from_preset(tmp_path / "vit.npz")
    actual = predict(model, expected["inputs/images"])
    assert_close(actual, expected["outputs/logits"], **TOLERANCE)


@pytest.mark.parametrize("case", ["map_pooling_no_bias", "moe_both_towers"])
def test_vmoes_two_towers(tmp_path, case):
    arrays, config = golden.load(f"08_two_tower/{case}")
    prefix = write_vmoe(tmp_path / "checkpoint", part(arrays, "params/"))
    overrides = {}
    for tower in ("image", "text"):
        if moe := config["model"][tower]["encoder"].get("moe"):
            examples = 4 if tower == "text" else moe["group_size"] // 16
            overrides[tower] = {
                **CAPACITY,
                "num_selected_experts": moe["router"]["num_selected_experts"],
                "examples_per_group": examples,
            }
    backbone, report = models.convert(prefix, task="backbone", **overrides)
    texts = arrays["inputs/texts"]
    pairs = {"token_ids": texts, "padding_mask": np.ones_like(texts)}
    outputs = backbone({"images": arrays["inputs/images"], **pairs})
    both = outputs["image_embeddings"], outputs["text_embeddings"]
    logits = backbone.logit_scale.logits(*both)
    for actual, name in zip((*both, logits), ("zimg", "ztxt", "logits")):
        actual = keras.ops.convert_to_numpy(actual)
        assert_close(actual, arrays[f"outputs/{name}"], **TOLERANCE)
    assert report.scheme == "V-MoE (Google)"
    text, report = models.convert(prefix, tower="text", **overrides.get("text", {}))
    assert isinstance(text, models.TextBackbone)
    assert "of the image tower" in report.ignored.values()
