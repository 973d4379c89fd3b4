"""Dense models become mixtures: the reference, what is preserved, and optimizers."""

import json

import keras
import numpy as np
import pytest
from rich.console import Console

from keras_moe import models, training
from tests import golden
from tests.backends import every_backend_for
from tests.compare import assert_close, assert_same
from tests.flax_weights import assign_flax_weights, flax_name
from tests.pair_models import IMAGE, PAIRS, TEXT, clip, limoe
from tests.published import hub_clip, hub_siglip, hub_vit
from tests.refusals import refuses
from tests.small_models import images, with_weights

pytestmark = pytest.mark.usefixtures("op_by_op")

SIZES = {"image_shape": (16, 8, 3), "patch_size": 4, "hidden_dim": 16}
SIZES |= {"num_layers": 2, "mlp_dim": 24}
MAKERS = {
    "vit": lambda **kw: models.ViTImageClassifier(
        models.ViTBackbone.from_config({**SIZES, "num_heads": 2, **kw}), 3
    ),
    "mixer": lambda **kw: models.MixerImageClassifier(
        models.MixerBackbone.from_config({**SIZES, "token_mlp_dim": 6, **kw}), 3
    ),
}


def by_path(model):
    return {w.path: keras.ops.convert_to_numpy(w) for w in model.weights}


@pytest.mark.usefixtures("traced")
@pytest.mark.filterwarnings("ignore:normalize_gates='after'")
@pytest.mark.parametrize(
    "case", every_backend_for(golden.cases("14_upcycling/*"), "k2_large_capacity")
)
def test_reference_upcycling(case):
    arrays, config = golden.load(case)
    dense, moe = config["dense_model"], config["moe_model"]["encoder"]["moe"]
    sizes = {x: dense["encoder"][x] for x in ("num_layers", "num_heads", "mlp_dim")}
    backbone = models.ViTBackbone(
        image_shape=(32, 32, 3), patch_size=tuple(dense["patch_size"]), **sizes,
        hidden_dim=dense["hidden_size"], class_token=dense["classifier"] == "token",
    )  # fmt: skip
    model = models.ViTImageClassifier(backbone, dense["num_classes"])
    weights = {
        name.removeprefix("dense_"): value
        for name, value in arrays.items()
        if name.startswith("dense_params/")
    }
    assign_flax_weights(model, weights)
    x, expected = arrays["inputs/images"], arrays["outputs/dense_logits"]
    assert_close(model.predict(x, verbose=0), expected, 1e-4, 1e-5)
    for normalize, expected in [
        (True, "outputs/upcycled_logits_renormalised"),
        (False, "outputs/upcycled_logits"),
    ]:
        sparse, report = training.upcycle(
            model, moe["num_experts"], moe["layers"], normalize_gates=normalize,
            num_selected_experts=moe["router"]["num_selected_experts"], images=x,
        )  # fmt: skip
        assert report.preserved == normalize
        for weight in sparse.trainable_weights:
            if weight.path.endswith("router/kernel"):
                weight.assign(arrays[f"router_params/{flax_name(weight.path)}"])
        assert_close(sparse.predict(x, verbose=0), arrays[expected], 1e-4, 1e-5)


@pytest.mark.parametrize(("kind", "arguments", "preserved"), [
    ("vit", {}, True),
    ("vit", {"router": "sinkhorn_token_choice"}, True),
    ("vit", {"shared_experts": 2, "route_scale": 2.5}, True),
    ("vit", {"gates": "sigmoid", "selection_bias_rate": 0.001}, True),
    ("vit", {"route_scale": 2.5}, False),
    ("vit", {"normalize_gates": False}, False),
    ("vit", {"evaluation": "official", "eval_capacity_factor": 0.3}, False),
    ("vit", {"router": "softmax_expert_choice", "capacity_factor": 0.3}, False),
    ("vit", {"router": "soft"}, False),
    ("vit", {"noise": 0.5}, False),
    # A mixer's feed-forward parts are the same.
    ("mixer", {}, True),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:normalize_gates='after'")
def test_the_function_is_preserved_where_theory_says_so(kind, arguments, preserved):
    dense = with_weights(MAKERS[kind]())
    before = by_path(dense)
    # The first block: what becomes of any token is seen by those that are read.
    sparse, report = training.upcycle(
        dense, num_experts=4, moe_layers=[0], images=images(), **arguments
    )
    assert report.preserved == preserved
    assert (report.largest_difference < 1e-4) == preserved
    actual = np.abs(
        sparse.predict(images(), verbose=0) - dense.predict(images(), verbose=0)
    ).max()
    np.testing.assert_allclose(report.largest_difference, actual, rtol=1e-3, atol=1e-6)
    assert report.blocks == ("block_0",)
    assert report.dense_parameters == dense.count_params()
    trained = sum(int(np.prod(x.shape)) for x in sparse.trainable_weights)
    assert report.parameters == trained
    # The dense model is as it was, and everything but the MoE layers is copied.
    for path, value in by_path(dense).items():
        np.testing.assert_array_equal(value, before[path])
    after = by_path(sparse)
    for path, value in after.items():
        if "/moe/" not in path:
            np.testing.assert_array_equal(value, before[path], path)


def test_experts_are_copies_and_noise_makes_them_differ():
    dense = with_weights(MAKERS["vit"]())
    kernel = by_path(dense)["block_1/mlp/hidden/kernel"]

    def tiled(**options):
        sparse, _ = training.upcycle(dense, **options)
        return by_path(sparse)["block_1/moe/experts/hidden_kernel"]

    np.testing.assert_array_equal(tiled(num_experts=3), np.stack([kernel] * 3))
    actual = tiled(num_experts=64, noise=0.1, noise_seed=5)
    again = tiled(num_experts=64, noise=0.1, noise_seed=5)
    np.testing.assert_array_equal(actual, again)
    noise = actual - kernel
    np.testing.assert_allclose(noise.std(), 0.1 * kernel.std(), rtol=0.02)
    assert np.abs(noise[0] - noise[1]).max() > 0


def test_a_share_of_each_experts_units_is_drawn_again():
    """*Drop-Upcycling*: the same units in all kernels, others in each expert."""
    dense = with_weights(MAKERS["vit"](gated_mlp=True))
    sparse, report = training.upcycle(dense, num_experts=3, reinitialize=0.25)
    assert not report.preserved
    before, after = by_path(dense), by_path(sparse)
    is_new = {}
    for name, axis in (("hidden", 1), ("gate", 1), ("output", 0)):
        old = before[f"block_1/mlp/{name}/kernel"]
        new = after[f"block_1/moe/experts/{name}_kernel"]
        changed = (new != old).any(axis=2 - axis)
        # Whole units, and only a quarter of the 24.
        np.testing.assert_array_equal(changed, (new != old).all(axis=2 - axis))
        np.testing.assert_array_equal(changed.sum(axis=1), [6, 6, 6])
        is_new[name] = changed
        for expert, units in enumerate(changed):
            replaced, drawn = (
                np.moveaxis(x, axis, 0)[units] for x in (old, new[expert])
            )
            # Five standard errors of a mean of as many numbers.
            error = 5 * replaced.std() / replaced.size**0.5
            assert abs(drawn.mean() - replaced.mean()) < error
            assert drawn.std() == pytest.approx(replaced.std(), rel=0.35)
    np.testing.assert_array_equal(is_new["hidden"], is_new["output"])
    np.testing.assert_array_equal(is_new["hidden"], is_new["gate"])
    assert (is_new["hidden"][0] != is_new["hidden"][1]).any()
    biases = after["block_1/moe/experts/hidden_bias"]
    assert_same(biases != before["block_1/mlp/hidden/bias"], is_new["hidden"])
    expected = np.stack([before["block_1/mlp/output/bias"]] * 3)
    assert_same(after["block_1/moe/experts/output_bias"], expected)
    again, _ = training.upcycle(dense, num_experts=3, reinitialize=0.25)
    for path, value in by_path(again).items():
        # Routers have no seed here.
        if "/router/" not in path:
            np.testing.assert_array_equal(value, after[path], path)
    for arguments in (
        {"reinitialize": 1.5},
        {"reinitialize": 0.5, "router": "mumoe"},
        {"reinitialize": 0.5, "carry_optimizer": True},
    ):
        message = f"reinitialize={arguments['reinitialize']}"
        refuses(message, training.upcycle, dense, **arguments)


def test_a_backbone_keeps_its_policy():
    backbone = with_weights(MAKERS["vit"](dtype="bfloat16")).backbone
    sparse, report = training.upcycle(backbone, num_experts=2)
    assert sparse.dtype_policy.name == "bfloat16"
    assert report.largest_difference < 0.1


SLOTS = {"_momentums", "_velocities", "_r", "_c", "_v", "momentums", "adam_velocities"}


def carried_slots(dense, sparse):
    """Compares the slots of two optimizers, and counts those that are carried over."""

    def slots(model):
        paths = [weight.path for weight in model.trainable_variables]
        return {
            (name, path): keras.ops.convert_to_numpy(slot)
            for name, values in vars(model.optimizer).items()
            if name in SLOTS and values
            for path, slot in zip(paths, values)
            if slot is not None
        }

    old, new = slots(dense), slots(sparse)
    for (name, path), value in new.items():
        if "/router/" in path:
            assert np.abs(value).max() == 0
            continue
        source = path.replace("moe/experts/hidden_", "mlp/hidden/")
        source = source.replace("moe/experts/output_", "mlp/output/")
        expected = old[name, source]
        if source != path:
            expected = np.broadcast_to(expected, value.shape)
        np.testing.assert_array_equal(value, expected, path)
    tiled = [value for (_, path), value in new.items() if "experts" in path]
    assert any(np.abs(value).max() > 0 for value in tiled)
    return sum("/router/" not in path for _, path in new)


@pytest.mark.parametrize(("kind", "optimizer", "options"), [
    ("vit", "adamw", {}),
    ("vit", "adafactor", {}),
    ("vit", "sgd", {"momentum": 0.9}),
    # Weights that Adam moves have one slot more.
    ("vit", "keras_moe>Muon", {}),
    ("clip", "adamw", {}),
    ("limoe", "adamw", {}),
])  # fmt: skip
def test_the_optimizer_is_carried_over(kind, optimizer, options):
    keras.utils.set_random_seed(1)
    if kind == "vit":
        dense, batch = MAKERS["vit"](), (images(8, 16, 8, 3), np.arange(8) % 3)
    else:
        dense = models.ContrastiveModel(clip({}) if kind == "clip" else limoe(None))
        batch = (PAIRS,)
    config = {"learning_rate": 0.0123, **options}
    config = {"class_name": optimizer, "config": config}
    dense.compile(optimizer=keras.optimizers.get(config))
    dense.fit(*batch, batch_size=4, verbose=0)
    steps = int(dense.optimizer.iterations)
    sparse, report = training.upcycle(dense, num_experts=2, carry_optimizer=True)
    assert type(sparse.optimizer) is type(dense.optimizer)
    assert type(sparse.loss) is type(dense.loss)
    assert int(sparse.optimizer.iterations) == steps
    np.testing.assert_allclose(float(sparse.optimizer.learning_rate), 0.0123, rtol=1e-6)
    # And the number of steps and the rate.
    assert report.slots == carried_slots(dense, sparse) + 2
    before = by_path(dense)
    sparse.fit(*batch, batch_size=4, verbose=0)
    assert int(sparse.optimizer.iterations) == 2 * steps
    # Both go on by themselves: they share nothing.
    for path, value in by_path(dense).items():
        np.testing.assert_array_equal(value, before[path])


@pytest.mark.parametrize("make", [hub_vit, hub_clip, hub_siglip])
def test_vision_models_of_keras_hub_are_upcycled(make):
    model = make()
    sparse, report = training.upcycle(model, num_experts=3)
    assert report.blocks == ("block_1",)
    assert report.preserved
    assert report.largest_difference < 1e-4
    assert report.parameters > report.dense_parameters
    kernel = by_path(sparse)["block_1/moe/experts/hidden_kernel"]
    assert kernel.shape == (3, 8, 16)
    if make is hub_vit:
        x = images(2, 8, 12, 3)
        actual, expected = (each.predict(x, verbose=0) for each in (sparse, model))
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
        model.compile("adam", "mse")
        refuses("carry_optimizer=True", training.upcycle, model, carry_optimizer=True)


@pytest.mark.parametrize("options", [{"gated_mlp": True}, {"use_bias": False}])
def test_experts_are_like_other_dense_mlps(options):
    backbone = with_weights(models.ViTBackbone(**IMAGE, **options))
    sparse, report = training.upcycle(backbone, num_experts=2)
    assert report.preserved
    assert report.largest_difference < 1e-4
    experts = sparse.get_layer("block_1").feed_forward.experts
    assert experts.gated == ("gated_mlp" in options)
    assert experts.use_bias == ("use_bias" not in options)
    if not experts.gated:
        sparse, report = training.upcycle(backbone, router="mumoe", rank=20)
        assert report.preserved == (report.largest_difference < 1e-4)
        return
    refuses(r"without gates.*gated=True", training.upcycle, backbone, router="mumoe")


def compiled(**kwargs):
    model = MAKERS["vit"]()
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), **kwargs})
    model.fit(images(8, 16, 8, 3), np.arange(8) % 3, batch_size=4, verbose=0)
    return model


def own_loss(y, x):
    return keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")(y, x)


def test_what_was_compiled_is_compiled_alike():
    dense = compiled(loss=own_loss, metrics=["accuracy"])
    sparse, report = training.upcycle(dense, num_experts=2)
    assert sparse.loss is dense.loss
    assert sparse.optimizer is not dense.optimizer
    assert type(sparse.optimizer) is type(dense.optimizer)
    assert int(sparse.optimizer.iterations) == report.slots == 0
    inputs = images(3, 16, 8, 3), np.arange(3)
    assert "accuracy" in sparse.evaluate(*inputs, verbose=0, return_dict=True)


def test_accumulated_and_scaled_optimizers_are_carried_over():
    dense = compiled(optimizer=keras.optimizers.Adam(gradient_accumulation_steps=2))
    sparse, _ = training.upcycle(dense, num_experts=2, carry_optimizer=True)
    assert int(sparse.optimizer._iterations) == 2
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(), dynamic_growth_steps=2
    )
    dense = compiled(optimizer=scaled)
    sparse, _ = training.upcycle(dense, num_experts=2, carry_optimizer=True)
    for name in ("step_counter", "dynamic_scale"):
        mine = float(getattr(sparse.optimizer, name))
        assert mine == float(getattr(dense.optimizer, name)), name
    assert float(sparse.optimizer.dynamic_scale) != 2.0**15
    inner = sparse.optimizer.inner_optimizer
    assert max(float(keras.ops.max(slot)) for slot in inner._velocities) > 0


def test_the_settings_of_clip_up_are_one_argument():
    dense = with_weights(MAKERS["vit"]())
    spelt_out = {"normalize_gates": False, "noise_std": 0.0, "capacity_factor": 1.0}
    spelt_out |= {"num_selected_experts": 2, "examples_per_group": None}
    spelt_out["auxiliary_losses"] = {"load_balance": 0.01, "router_z": 1e-4}
    actual = []
    for arguments in ({"preset": "clip_up"}, spelt_out):
        sparse, report = training.upcycle(
            dense, 4, [0], images=images(), seed=0, **arguments
        )
        # Two gates of four sum to less than one.
        assert not report.preserved
        assert report.largest_difference > 1e-3
        layer = sparse.backbone.get_layer("block_0").feed_forward
        actual.append(layer.get_config())
    assert actual[0] == actual[1]


def test_towards_moe_plus_plus():
    dense = models.from_preset(
        "vmoe_digits", num_classes=10, moe_layers=None, num_layers=2, seed=0,
        gated_experts=True, load_weights=False,
    )  # fmt: skip
    sparse, report = training.upcycle(
        dense, num_experts=4, moe_layers="every_1", zero_experts=1, copy_experts=1,
        constant_experts="auto", gating_residual=True,
    )  # fmt: skip
    assert sparse.backbone.expert_types == (4, 1, 1, 1)
    # A zero expert is no copy of the MLP, and the report does not say it was.
    assert not report.preserved
    assert report.largest_token_difference > 1e-3
    kernel = sparse.backbone.get_layer("block_0").feed_forward.experts.hidden_kernel
    wanted = dense.backbone.get_layer("block_0").feed_forward.hidden.kernel
    kernel, wanted = map(keras.ops.convert_to_numpy, (kernel, wanted))
    np.testing.assert_array_equal(kernel[:4], np.stack([wanted] * 4))


# Pairs

BOTH = ("image/block_1", "text/block_1")


@pytest.fixture(scope="module")
def dense_pairs():
    keras.utils.set_random_seed(1)
    return {
        "clip": models.ContrastiveModel(with_weights(clip({}))),
        "limoe": with_weights(limoe(None)),
    }


@pytest.mark.parametrize(("kind", "arguments", "blocks", "preserved"), [
    pytest.param("clip", {}, BOTH, (True, True), marks=pytest.mark.every_backend),
    ("clip", {"towers": ("image",)}, BOTH[:1], (True, True)),
    ("clip", {"preset": "clip_up", "towers": ("text",)}, BOTH[1:], (True, False)),
    ("clip", {"preset": "clip_up", "normalize_gates": True}, BOTH, (True, True)),
    ("limoe", {}, BOTH, (True, True)),
    ("limoe", {"preset": "clip_up"}, BOTH, (False, False)),
])  # fmt: skip
def test_the_function_is_preserved_by_modality(
    dense_pairs, kind, arguments, blocks, preserved
):
    model = dense_pairs[kind]
    before = by_path(model)
    sparse, report = training.upcycle(model, num_experts=4, images=PAIRS, **arguments)
    assert type(sparse) is type(model)
    assert report.blocks == blocks
    assert report.preserved == all(preserved)
    assert list(report.modalities) == ["image", "text"]
    for (name, each), same in zip(report.modalities.items(), preserved):
        assert each.preserved == same
        assert each.blocks == tuple(x for x in blocks if x.startswith(name))
        assert (each.largest_difference < 1e-4) == same
        assert (each.largest_token_difference < 1e-4) == same
    expected = max(each.largest_difference for each in report.modalities.values())
    assert report.largest_difference == expected
    assert report.dense_parameters == model.count_params()
    assert report.parameters == sparse.count_params() > report.dense_parameters
    after = by_path(sparse)
    for path, value in after.items():
        if "/moe/" not in path:
            np.testing.assert_array_equal(value, before[path], path)
    kernels = [path for path in after if path.endswith("experts/hidden_kernel")]
    assert len(kernels) == (1 if kind == "limoe" else len(blocks))
    for path in kernels:
        mlp = before[path.replace("moe/experts/hidden_kernel", "mlp/hidden/kernel")]
        np.testing.assert_array_equal(after[path], np.stack([mlp] * 4))


def test_each_tower_has_settings_of_its_own(dense_pairs):
    towers = {"image": {"num_experts": 3, "preset": "clip_up"}, "text": {}}
    sparse, report = training.upcycle(
        dense_pairs["clip"], num_experts=2, towers=towers, seed=5
    )
    config = sparse.backbone.get_config()
    assert [config[name]["moe"]["num_experts"] for name in towers] == [3, 2]
    assert [each.preserved for each in report.modalities.values()] == [False, True]
    # CLIP-UP routes padding.
    assert config["text"]["mask_padding"]
    routed, _ = training.upcycle(dense_pairs["clip"], num_experts=2, preset="clip_up")
    assert not routed.backbone.get_config()["text"]["mask_padding"]
    # Both towers follow from the pair's seed, and draw for themselves.
    seeds = [x["seed"] for x in (config, config["image"], config["text"])]
    assert seeds == [5, None, None]
    # One tower after the other.
    first, _ = training.upcycle(dense_pairs["clip"], num_experts=2, towers=("image",))
    second, report = training.upcycle(first, num_experts=3, towers=["text"])
    assert report.blocks == BOTH[1:]
    assert list(second.backbone.routing) == list(BOTH)
    assert report.largest_difference < 1e-4
    refuses(r"in \['image/block_1'\]", training.upcycle, first)


def test_texts_alone_are_upcycled():
    dense = with_weights(models.TextBackbone(**TEXT))
    texts = {name: PAIRS[name] for name in ("token_ids", "padding_mask")}
    for arguments, preserved in (({}, True), ({"preset": "clip_up"}, False)):
        _, report = training.upcycle(dense, 4, images=texts, **arguments)
        assert (report.blocks, report.modalities) == (("block_1",), {})
        assert report.preserved == preserved
        assert (report.largest_difference < 1e-4) == preserved
        assert (report.largest_token_difference < 1e-4) == preserved


def test_the_report_prints_and_is_plain_data():
    _, report = training.upcycle(clip({}), num_experts=2, towers=("text",))
    console = Console(record=True, width=100)
    report.print(console)
    text, plain = console.export_text(), json.loads(json.dumps(report.to_dict()))
    assert f"{report.parameters:,}" in text
    assert "largest difference, image" in text
    assert plain["modalities"]["text"]["blocks"] == ["text/block_1"]
