"""LIMoE's losses together: golden data with noise, groups, thresholds and names."""

import json
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from keras_moe import losses
from keras_moe.layers import Experts, MoE, MoEConfig
from keras_moe.losses import limoe_losses
from keras_moe.routers import TokenChoiceRouter
from tests import golden
from tests.compare import assert_close
from tests.losses.loss_table import normal, numbers, routing_of

ERF = np.vectorize(math.erf)


def load_loss(logits, noisy, noise_std, selected):
    """The load loss in float64, straight from its definition."""
    threshold = np.sort(noisy, axis=-1)[:, -selected, None]
    x = (threshold - logits) / noise_std
    load = np.sum(0.5 - 0.5 * ERF(x / math.sqrt(2)), axis=0)
    return (load.std() / load.mean()) ** 2


# The names of the local losses' values in the golden data.
LOCAL = {
    "local_entropy": "local_entropy",
    "target_entropy": "target_entropy_local",
    "merged_entropy": "merged_entropy_local",
}


@pytest.mark.every_backend
@pytest.mark.parametrize(("case", "local_loss"), [
    ("two_modalities_k1", "local_entropy"),
    ("two_modalities_k2", "target_entropy"),
    ("two_modalities_k2", "merged_entropy"),
])  # fmt: skip
def test_golden_in_training(case, local_loss):
    arrays, config = golden.load(f"09_limoe_losses/{case}")
    logits = arrays["inputs/logits"]
    num_experts, selected = config["E"], config["K"]
    noise = np.random.default_rng(0).normal(size=logits.shape) / num_experts
    ids = arrays["inputs/modality"]
    # Modality 0 of the data is called text here: both orders of names are right.
    text, image = arrays["inputs/tau"]
    thresholds = {"text": float(text), "image": float(image)}
    made = limoe_losses(thresholds, local_loss, modalities=("text", "image"))
    router = SimpleNamespace(
        num_selected_experts=selected, noise_deviation=1.0 / num_experts
    )

    def program(logits, noisy, ids):
        routing = routing_of(logits)._replace(noisy_logits=noisy)
        return sum(loss(routing, router, None, ids) for loss in made)

    inputs = (x[None].astype("float32") for x in (logits, logits + noise))
    actual = numbers(program, *inputs, ids[None])
    expected = [
        arrays["outputs/importance_all_tokens"],
        load_loss(logits, logits + noise, 1 / num_experts, selected),
        arrays["outputs/z_loss"],
        arrays[f"outputs/{LOCAL[local_loss]}"][0],
        *arrays["outputs/global_loss"],
    ]
    assert min(expected[:4]) > 1e-3
    assert_close(actual, [0.04 * np.mean(expected)], 1e-5)


def facts(made):
    return [(loss.name, loss.options) for loss in made]


def test_parts_and_config():
    made = limoe_losses(
        {"image": 2.0, "text": None},
        "merged_entropy",
        local_modalities=("image", "text"),
        classic=("importance", "router_z"),
        weight=0.1,
    )
    assert facts(made) == [
        ("importance", {}),
        ("router_z", {}),
        ("merged_entropy", {"modality": 0}),
        ("merged_entropy", {"modality": 1}),
        ("global_entropy", {"threshold": 2.0, "modality": 0}),
        ("global_entropy", {"threshold": None, "modality": 1}),
    ]
    assert {loss.weight for loss in made} == {0.1 / 6}
    stored = losses.get(json.loads(json.dumps(losses.serialize(made))))
    assert losses.serialize(stored) == losses.serialize(made)
    # Next to others, by name.
    options = {"thresholds": {"text": 1.0}, "weight": 0.5, "classic": ["importance"]}
    importance, *bag = losses.get({"importance": 0.1, "limoe": options})
    assert [importance.weight, *(x.weight for x in bag)] == [0.1, *[0.5 / 3] * 3]


# Text, image.
EXPERTS = {
    "limoe_s32": (12, 17), "limoe_b32": (12, 17), "limoe_s16": (9, 20),
    "limoe_b16": (9, 20), "limoe_l32": (20, 1), "limoe_l16": (28, 8),
    "limoe_h14": (4, 25), "several_experts": (4, 25), "by_modality": (4, 25),
}  # fmt: skip


def test_settings_of_presets_are_json_and_the_published_ones():
    stored = json.loads(json.dumps(losses.LIMOE_LOSSES))
    assert stored == losses.LIMOE_LOSSES
    assert {*stored} == {*EXPERTS, "expert_pools"}
    for name, (text, image) in EXPERTS.items():
        local = "merged_entropy" if name == "several_experts" else "local_entropy"
        # By a config, as a preset has them.
        moe = MoEConfig.from_dict({"auxiliary_losses": stored[name]})
        made = losses.get(moe.to_dict()["auxiliary_losses"])
        assert {loss.weight for loss in made} == {0.04 / 6}
        assert facts(made) == [
            ("importance", {}),
            ("load", {}),
            ("router_z", {}),
            (local, {"modality": 1}),
            ("global_entropy", {"threshold": math.log(text), "modality": 1}),
            ("global_entropy", {"threshold": math.log(image), "modality": 0}),
        ]
    made = losses.get(stored["expert_pools"])
    assert [loss.name for loss in made] == ["importance", "load", "router_z"]


def test_an_moe_layer_trains_with_them_and_warns_of_a_threshold():
    def layer(**thresholds):
        return MoE(
            TokenChoiceRouter(4, 1, noise_std=1.0, seed=0),
            Experts(4, 8),
            group_size=5,
            auxiliary_losses=limoe_losses(thresholds),
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moe = layer(image=math.log(4), text=1.0)
    # The second group has images alone.
    ids = np.array([[0, 0, 1, 1, 1], [0] * 5, [1, 1, 0, 0, 1]])
    moe(normal(0, 3, 5, 8), modality_ids=ids, training=True)
    assert 0 < float(sum(moe.losses)) < np.inf
    with pytest.warns(UserWarning, match=r"log\(num_experts\) = 1\.3863"):
        layer(text=2.0)
