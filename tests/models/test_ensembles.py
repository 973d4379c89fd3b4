"""E3, efficient ensembles of experts, against the reference and by hand."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe import analysis, data, distribution, evaluation, models, training
from keras_moe.losses import AuxiliaryLoss, load_loss
from keras_moe.report import write_report
from keras_moe.routers import TokenChoiceRouter
from tests import golden
from tests.backends import every_backend_for
from tests.calls import call
from tests.compare import assert_close, assert_same
from tests.flax_weights import assign_flax_weights, flax_name
from tests.published import write_vmoe
from tests.refusals import refuses
from tests.small_models import (
    assert_same_outputs,
    classifier,
    images,
    vit,
    with_weights,
)
from tests.training_gradients import training_gradients

CASES = golden.cases("20_e3/*")
# Two members with two experts each, of which a token has one.
TWO = {
    "router": {"name": "softmax_token_choice", "num_selected_experts": 1,
               "ensemble_size": 2, "noise_std": 0.0, "dropless": True},
    "auxiliary_losses": None,
}  # fmt: skip
to_numpy = ops.convert_to_numpy


def ensemble(head=None, **config):
    sizes = {"image_shape": (16, 8, 3), **TWO, **config}
    return with_weights(classifier(dict(head or {}), **sizes))


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


@functools.cache
def reference(case):
    """The reference's model; its forward pass is deterministic, without a load loss."""
    arrays, config = golden.load(case)
    moe = config["encoder"]["moe"]
    given = moe["router"]["dispatcher"]
    limits = {x: given[x] for x in ("capacity", "capacity_factor") if x in given}
    fields = {
        "image_shape": (16, 24, 3), "patch_size": tuple(config["patch_size"]),
        "hidden_dim": config["hidden_size"],
        "class_token": config["classifier"] == "token",
        **{x: config["encoder"][x] for x in ("num_layers", "num_heads", "mlp_dim")},
        **{x: moe[x] for x in ("num_experts", "ensemble_size")},
        "moe_layers": moe["layers"], "examples_per_group": 4,
        "num_selected_experts": moe["router"]["num_selected_experts"],
        "evaluation": "official", "noise_std": 0.0,
        "auxiliary_losses": {"importance": 0.5}, **limits,
    }  # fmt: skip
    backbone = models.ViTBackbone.from_config(fields)
    dim = config["representation_size"]
    model = models.ViTImageClassifier(backbone, 7, representation_dim=dim)
    for name, array in arrays.items():
        if name.endswith("Router/dense/kernel"):
            # (D, M, E / M) there.
            arrays[name] = array.reshape(len(array), -1)
    assign_flax_weights(model, arrays)
    return model, arrays


@pytest.mark.parametrize("case", every_backend_for(CASES, "m2_k1_token"))
def test_outputs_and_losses_of_the_reference(case):
    model, arrays = reference(case)
    inputs, labels = arrays["inputs/images"], arrays["inputs/labels"]
    expected = arrays["outputs/log_mean_probability"]
    assert_close(model.predict(inputs, verbose=0), expected, 1e-4, 1e-5)
    members = to_numpy(model(inputs, training=True)).reshape(8, 7)
    assert_close(members, arrays["outputs/logits"], 1e-4, 1e-5)
    entropy = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.0), loss=entropy)
    trained = model.train_on_batch(inputs, labels, return_dict=True)
    tested = model.test_on_batch(inputs, labels, return_dict=True)
    assert_close(trained["loss"], arrays["outputs/loss_train"], 1e-5)
    assert_close(tested["loss"], arrays["outputs/xent_eval"].mean(), 1e-5)
    right = expected.argmax(-1) == labels.argmax(-1)
    assert_close((trained["accuracy"], tested["accuracy"]), [right.mean()] * 2, 1e-6)


@pytest.mark.parametrize("case", every_backend_for(CASES, "m2_k2_gap_drops"))
def test_gradients_of_the_reference(case):
    model, arrays = reference(case)
    labels = np.repeat(arrays["inputs/labels"], 2, axis=0)

    def mean_loss(members):
        logits = ops.reshape(members, (8, 7))
        loss = keras.losses.categorical_crossentropy
        return ops.mean(loss(labels, logits, from_logits=True))

    gradients = training_gradients(model, arrays["inputs/images"], mean_loss)
    names = (flax_name(weight.path) for weight in model.trainable_weights)
    mine = dict(zip(names, gradients))
    expected = golden.part(arrays, "grads/loss_train/")
    del expected["inputs/images"]
    assert len(expected) >= 9
    for name, value in expected.items():
        assert_close(mine[name], value, 1e-3, 1e-5, err_msg=name)


@pytest.mark.every_backend
def test_members_are_routers_of_their_own():
    router = TokenChoiceRouter(
        4, 1, ensemble_size=2, kernel_initializer="identity", dropless=True
    )
    tokens = np.array([[[3, 0, 1, 2], [3, 0, 1, 2]]], "float32")
    ids = np.array([[0, 1]])
    _, routing = call(router, tokens, modality_ids=ids)
    assert_same(routing.dispatched, [[[1, 0, 0, 0], [0, 0, 0, 1]]])
    first, second = softmax(np.array([[3.0, 0.0], [1.0, 2.0]]))
    assert_close(routing.gates, [[[*first, 0, 0], [0, 0, *second]]], 1e-6)
    # The noise is that of two experts.
    tokens = np.zeros((1, 4000, 4), "float32")
    ids = np.arange(4000)[None] % 2
    _, routing = call(router, tokens, modality_ids=ids, training=True)
    noise = to_numpy(routing.noisy_logits)[0]
    assert_close(noise[::2, :2].std(), 0.5, 0.05)
    assert_same(np.isfinite(noise[:2]), np.array([[1, 1, 0, 0], [0, 0, 1, 1]]) > 0)
    logits, noisy = map(to_numpy, routing[:2])
    parts = (0, slice(None, None, 2), slice(2)), (0, slice(1, None, 2), slice(2, 4))
    loads = [load_loss(logits[x][None], noisy[x][None], 0.5, 1) for x in parts]
    actual = AuxiliaryLoss("load", 2.0)(routing, router, None, ids)
    assert_close(actual, 2.0 * np.mean([to_numpy(x) for x in loads], axis=0), 1e-4)


@pytest.mark.every_backend
def test_equal_members_are_one_model():
    one = {**TWO["router"], "ensemble_size": 1}
    single = ensemble(num_experts=2, router=one)
    double = ensemble()
    by_path = {weight.path: to_numpy(weight) for weight in single.weights}
    for weight in double.weights:
        value = by_path.get(weight.path)
        if "/moe/" in weight.path and value is not None:
            axis = -1 if weight.path.endswith("router/kernel") else 0
            value = np.concatenate([value, value], axis=axis)
        if "seed_generator" not in weight.path:
            weight.assign(value)
    outputs = (model.predict(images(), verbose=0) for model in (single, double))
    first, second = map(softmax, outputs)
    assert_close(second, first, 1e-5, 1e-6)
    features = [
        keras.Model(model.input, model.backbone.features).predict(images(), verbose=0)
        for model in (single, double)
    ]
    for name in ("tokens", "pooled", "grid"):
        assert_close(features[1][name], features[0][name], 1e-4, 1e-5)


@pytest.mark.parametrize(("head", "probabilities"), [
    ({}, softmax),
    ({"multi_label": True}, lambda x: 1 / (1 + np.exp(-x))),
    ({"output_activation": "softmax"}, lambda x: x),
    ({"pooling": "map", "representation_dim": 6}, softmax),
])  # fmt: skip
def test_probabilities_are_averaged(head, probabilities):
    model = ensemble(head)
    members = to_numpy(model(images(), training=True))
    assert members.shape == (3, 2, model.num_classes)
    assert not np.allclose(members[:, 0], members[:, 1])
    actual = probabilities(model.predict(images(), verbose=0))
    assert_close(actual, probabilities(members).mean(axis=1), 1e-4, 1e-6)
    assert models.describe(model).parameters == model.count_params()


def test_saved_and_quantized(tmp_path):
    model = ensemble()
    model.save(tmp_path / "e3.keras")
    model.save_to_preset(tmp_path / "e3")
    for loaded in (
        keras.saving.load_model(tmp_path / "e3.keras"),
        models.from_preset(str(tmp_path / "e3")),
    ):
        assert loaded.get_config() == model.get_config()
        assert_same_outputs(loaded, model, images())
    before = softmax(model.predict(images(), verbose=0))
    model.quantize("int8")
    assert_close(softmax(model.predict(images(), verbose=0)), before, 0, 0.05)


def test_rematerialized_members_have_the_same_gradients():
    plain, less = ensemble(), ensemble(rematerialize=True)
    gradients = (training_gradients(model, images()) for model in (plain, less))
    for first, second in zip(*gradients):
        assert_close(second, first, 1e-4, 1e-5)


@pytest.mark.every_backend
def test_fits_adapts_and_knows_how_sure_it_is():
    pixels, labels = data.load_digits("test", image_shape=(16, 16, 1))
    known = labels < 8
    model = models.from_preset(
        "vmoe_digits", num_classes=8, num_layers=2, ensemble_size=2,
        num_selected_experts=1, load_weights=False, seed=0,
    )  # fmt: skip
    model.compile(keras.optimizers.Adam(3e-3))
    health = training.RouterHealth(pixels[:16], min_entropy=0.0, max_share=1.0)
    history = model.fit(
        pixels[known], labels[known], epochs=4, verbose=0, callbacks=[health]
    ).history
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    assert history["accuracy"][-1] > 0.5
    assert 0 <= history["router/dropped"][-1] < 0.5
    assert {len(row["expert_shares"]) for row in health.layers} == {8}
    probabilities = softmax(model.predict(pixels, verbose=0))
    result = evaluation.calibration(probabilities[known], labels[known])
    assert result.nll < np.log(8)
    model.enable_lora(2, ["query", "experts"])
    model.compile("adam")
    model.fit(pixels[known][:32], labels[known][:32], verbose=0)


def test_upcycled_from_a_dense_model():
    dense = ensemble(moe_layers=None)
    model, report = training.upcycle(
        dense, 4, moe_layers=[1], ensemble_size=2, num_selected_experts=2,
        normalize_gates="before",
    )  # fmt: skip
    assert model.backbone.ensemble_size == 2
    assert report.preserved
    first, second = (softmax(x.predict(images(), verbose=0)) for x in (dense, model))
    assert_close(second, first, 1e-4, 1e-6)


def test_looked_at_by_analysis_and_report(tmp_path):
    model = ensemble({"pooling": "average"})
    pixels, labels = images(6, 16, 8, 3), np.arange(6) % 3
    usage = analysis.expert_usage(model, pixels, labels)
    # Nine tokens of six images, of each member.
    tokens = usage.blocks["block_1"].tokens.reshape(3, 2, 2)
    assert_same(tokens.sum(-1), np.full((3, 2), 18))
    limited = model.with_router_arguments(
        dropless=False, capacity_factor=0.8, evaluation="official"
    )
    write_report(limited, (pixels, labels), tmp_path / "report", verbose=0)
    assert (tmp_path / "report" / "report.json").exists()
    refuses("ensemble_size=1 to prune", analysis.prune_experts, model, {"block_1": [0]})


@pytest.mark.parametrize("axes", [2, 3])
def test_released_checkpoints_load(tmp_path, axes):
    sizes = {"image_shape": (8, 8, 3), "num_experts": 8}
    expected = ensemble({"representation_dim": 16}, **sizes)
    arrays = {}
    for weight in expected.trainable_weights:
        name, array = flax_name(weight.path), to_numpy(weight)
        if axes == 3 and name.endswith("Router/dense/kernel"):
            array = array.reshape(16, 2, 4)
        arrays[name] = array
    name = "eee_s32_last2_ilsvrc2012" + "_ft_cifar100" * (axes == 3)
    model, report = models.convert(write_vmoe(tmp_path / name, arrays))
    assert report.scheme == "E3 (Google)"
    assert not report.notes
    assert model.multi_label == (axes == 2)
    router = model.backbone.get_layer("block_1").feed_forward.router
    assert (router.ensemble_size, router.num_selected_experts) == (2, 1)
    assert router.capacity_factor == 1.5
    model = models.from_preset(str(tmp_path / name), num_classes=5)
    tokens = (x.backbone(images(2, 8, 8, 3)) for x in (model, expected))
    assert_close(*map(to_numpy, tokens), 1e-5, 1e-5)
    # Under another name, a kernel of two axes does not tell.
    other, _ = models.convert(write_vmoe(tmp_path / "other", arrays))
    assert other.backbone.ensemble_size == axes - 1


def test_costs_of_members():
    # V-MoE-B/32, Last 2: nine of twelve blocks are shared.
    sizes = {"moe_layers": "last_2", "num_selected_experts": 1}
    one = models.describe("vmoe_b32", **sizes)
    two = models.describe("vmoe_b32", ensemble_size=2, **sizes)
    assert two.parameters == one.parameters
    assert two.active_parameters == one.active_parameters
    assert two.gflops < (1 - 0.35) * 2 * one.gflops
    assert_close(two.separate_gflops, 2 * one.gflops, 1e-9)
    # The released E3 against two of the released V-MoEs.
    released, vmoe = (
        models.describe(name, num_classes=1000)
        for name in ("eee_s32_last2_e8", "vmoe_s32_last2_e8")
    )
    assert released.gflops < (1 - 0.35) * 2 * vmoe.gflops
    assert {part.name: part.members for part in released.parts} == {
        **dict.fromkeys(["embedding", *(f"block_{i}" for i in range(5))], 1),
        **dict.fromkeys(["block_5", "block_6", "block_7"], 2),
        **dict.fromkeys(["final_norm", "pre_logits", "predictions"], 2),
    }
    costs = [
        distribution.costs("vmoe_b32", 4, 64, ensemble_size=size, **sizes)
        for size in (1, 2)
    ]
    assert_close(costs[1].flops, 3 * 1e9 * two.gflops * 64 / 4, 1e-9)
    assert costs[0].memory["weights"] == costs[1].memory["weights"]


@pytest.mark.parametrize(("arguments", "message"), [
    ({"ensemble_size": 8}, "num_experts=4, ensemble_size=8"),
    ({"ensemble_size": 3}, "multiple of ensemble_size"),
    ({"ensemble_size": 0}, "ensemble_size=0"),
    ({"ensemble_size": 2, "num_selected_experts": 3}, "num_selected_experts=3"),
    ({"ensemble_size": 2, "expert_pools": [[0], [1]]}, "with modalities"),
    ({"ensemble_size": 2, "zero_experts": 1}, "ensemble_size"),
    ({"ensemble_size": 2, "router": "soft"}, "ensemble_size"),
])  # fmt: skip
def test_bad_arguments(arguments, message):
    refuses(message, vit, **arguments)


def test_only_image_classifiers_have_members():
    sizes = {"hidden_dim": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 16}
    pixels = {"image_shape": (8, 8, 3), "patch_size": 4}
    words_of = {"vocabulary_size": 20, "max_length": 6}
    moe = {"moe": {"num_experts": 4, **TWO}}
    text, image = {**sizes, **words_of, **moe}, {**sizes, **pixels, **words_of, **moe}
    towers = {"image": {**sizes, **pixels, **moe}, "text": {**sizes, **words_of}}
    words = "only in classifiers"
    refuses(words, vit, max_patches=8, **TWO)
    refuses(words, models.TextBackbone, **text)
    refuses(words, models.LIMoEBackbone, **image)
    refuses(words, models.CLIPBackbone, projection_dim=4, **towers)
    backbone = vit(**TWO)
    refuses(words, models.TeacherFeatures, backbone, {"dino": {"dim": 4}})
    head = {"num_experts": 2}
    refuses("head=None", models.ViTImageClassifier, backbone, 3, head=head)
