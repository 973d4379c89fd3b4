"""Experts taken away, edited and steered, against the same done by hand."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe import analysis, models
from keras_moe.analysis.ablation import ablated_part
from keras_moe.layers import MuMoE
from tests import small_models
from tests.compare import assert_same, to_numpy
from tests.dense_tensor import dense_tensor
from tests.small_models import ONE_BLOCK, images, with_weights

SHAPE = (16, 8, 2)
CLASSES = 3
LABELS = np.arange(24) % CLASSES

pytestmark = pytest.mark.usefixtures("op_by_op")


def classifier(num_experts=4, position="final", units=None, **kwargs):
    options = {"rank": 5, **kwargs.pop("options", {})}
    head = MuMoE(units or CLASSES, num_experts, **options)
    head = {"head": head, "head_position": position, "pooling": "average"}
    sizes = {"num_layers": 1, "moe_layers": None, **kwargs}
    model = with_weights(small_models.classifier(head, CLASSES, **sizes))
    # So that images differ in what the head reads, and in its coefficients.
    norm = model.backbone.get_layer("final_norm")
    norm.gamma.assign(ops.full(norm.gamma.shape, 3.0))
    norm.beta.assign(ops.zeros(norm.beta.shape))
    for weight in model.weights:
        if "moving_variance" in weight.path:
            weight.assign(ops.full(weight.shape, 3.0))
    return model


def features(model, inputs):
    """What the head reads, with a one, and its coefficients."""
    parts = {"features": model.features, "gates": model.routing["head"].gates}
    outputs = keras.Model(model.input, parts).predict(inputs, verbose=0)
    ones = np.ones((len(inputs), 1), "f")
    return np.concatenate([outputs["features"], ones], 1), outputs["gates"][:, 0]


def weights_of_experts(model):
    """(E, I + 1, O), of all levels."""
    whole = dense_of(model.head.experts)
    return whole.reshape(-1, *whole.shape[-2:])


def dense_of(experts):
    """The tensor of all experts' weights, from its factors."""
    factors = [ops.convert_to_tensor(factor) for factor in experts.factors]
    return to_numpy(dense_tensor(factors, experts.factorization))


def accuracies(logits, labels):
    right = (logits.argmax(axis=1) == labels) & (np.ptp(logits, axis=1) > 0)
    counts = np.bincount(labels, minlength=logits.shape[1])
    return np.bincount(labels, right, logits.shape[1]) / np.maximum(counts, 1)


@pytest.mark.parametrize("position", ["final", "penultimate", "negative"])
def test_ablation_of_a_head_is_the_naive_one(position):
    if position == "penultimate":
        options = {"factorization": "tr", "rank": (2, 3, 2, 4)}
        model = classifier((3, 2), position, 7, options=options)
    elif position == "negative":
        model = classifier(options={"activation": "tanh"})
    else:
        model = classifier()
    inputs = images(24, *SHAPE)
    actual = analysis.ablate_experts(model, inputs, LABELS, verbose=0)
    z, gates = features(model, inputs)
    assert (gates.min() < 0) == (position == "negative")
    whole = weights_of_experts(model)

    def without(expert):
        tensor = whole.copy()
        if expert is not None:
            tensor[expert] = 0.0
        y = np.einsum("be,bi,eio->bo", gates, z, tensor)
        if position == "penultimate":
            kernel, bias = (to_numpy(w) for w in model.output_dense.weights)
            y = np.maximum(y, 0) @ kernel + bias
        return accuracies(y, LABELS)

    np.testing.assert_allclose(actual.accuracy, without(None))
    expected = [without(expert) for expert in range(len(whole))]
    np.testing.assert_allclose(actual.ablated, expected, atol=1e-12)
    # The test says something only if experts matter, and differently.
    assert len(np.unique(actual.ablated, axis=0)) > 1
    assert actual.counts.tolist() == [8, 8, 8]
    some = analysis.ablate_experts(model, inputs, LABELS, experts=[2, 0], verbose=0)
    np.testing.assert_array_equal(some.ablated, actual.ablated[[2, 0]])


def test_nothing_is_right_without_the_only_expert():
    model = classifier(num_experts=1, options={"use_bias": False})
    actual = analysis.ablate_experts(model, images(24, *SHAPE), LABELS, verbose=0)
    # All logits are 0 then: the first class must not be right by its place.
    assert actual.accuracy.sum() > 0
    assert not actual.ablated.any()
    known = actual.accuracy > 0
    np.testing.assert_array_equal(actual.changes[0], known.astype(float))


def test_several_labels_each_have_an_accuracy():
    model = classifier()
    model.multi_label = True
    labels = (np.random.default_rng(0).random((24, CLASSES)) < 0.5).astype(int)
    inputs = images(24, *SHAPE)
    actual = analysis.ablate_experts(model, inputs, labels, verbose=0)
    right = (model.predict(inputs, verbose=0) > 0) == labels
    np.testing.assert_allclose(actual.accuracy, right.mean(axis=0))
    z, gates = features(model, inputs)
    tensor = weights_of_experts(model)
    tensor[1] = 0.0
    y = np.einsum("be,bi,eio->bo", gates, z, tensor)
    np.testing.assert_allclose(actual.ablated[1], ((y > 0) == labels).mean(axis=0))


def test_ablation_in_a_routed_block_zeroes_weights_and_brings_them_back():
    model = classifier(moe_layers=[0], router="softmax_token_choice")
    inputs = images(24, *SHAPE)
    experts = model.backbone.get_layer("block_0").feed_forward.experts
    labels = model.predict(inputs, verbose=0).argmax(axis=1)
    before = [to_numpy(w).copy() for w in model.weights]
    actual = analysis.ablate_experts(
        model, inputs, labels, layer="block_0", experts=[3, 1], verbose=0
    )
    assert_same(model.weights, before)
    parts = [experts.output_kernel, experts.output_bias]
    for row, expert in enumerate([3, 1]):
        with zeroed(parts, expert):
            logits = model.predict(inputs, verbose=0)
        np.testing.assert_allclose(actual.ablated[row], accuracies(logits, labels))
    assert (actual.changes != 0).any()


def mumoe_mixer(levels, **options):
    """A classifier of which each block's two muMoEs matter."""
    moe = {"moe_layers": "every_1", "router": "mumoe", "num_experts": levels}
    backbone = models.MixerBackbone(
        image_shape=SHAPE, patch_size=4, hidden_dim=8, num_layers=2, token_mlp_dim=6,
        mlp_dim=12, token_mixer="mumoe",
        moe={**moe, "gate_activation": "softmax", **options},
    )  # fmt: skip
    model = with_weights(models.MixerImageClassifier(backbone, CLASSES))
    for weight in model.weights:
        if "moving_variance" in weight.path:
            weight.assign(ops.full(weight.shape, 0.1))
        elif weight.path.endswith("output/output_factor"):
            # So that the experts are louder than what passes them by.
            weight.assign(30.0 * to_numpy(weight))
    norm = model.backbone.get_layer("final_norm")
    norm.beta.assign(ops.zeros(norm.beta.shape))
    model.output_dense.bias.assign(ops.zeros(CLASSES))
    return model


def as_whole_tensors(model, levels):
    """The same function with every expert's matrix stored, not factorised."""
    whole = mumoe_mixer(levels, factorization=None)
    stored = {weight.path: weight for weight in model.weights}
    for weight in whole.weights:
        if not weight.path.endswith("/tensor"):
            weight.assign(to_numpy(stored[weight.path]))
    for block in ("block_0", "block_1"):
        for name, part in mumoes(model, block).items():
            into = mumoes(whole, block)[name]
            into.hidden.factors[0].assign(dense_of(part.hidden))
            into.output_experts.factors[0].assign(dense_of(part.output_experts))
    return whole


def mumoes(model, block):
    layer = model.backbone.get_layer(block)
    return {block: layer.feed_forward, f"{block}/token_mixer": layer.token_mixer.block}


@pytest.mark.parametrize("layer", ["block_0", "block_1", "block_0/token_mixer"])
@pytest.mark.parametrize(
    ("levels", "options"),
    [((4,), {"rank": 5}), ((2, 3), {"factorization": "tr", "rank": (2, 2, 2, 4)})],
    ids=["one level", "two levels"],
)
def test_ablation_in_a_mumoe_block_zeroes_slices_of_the_whole_tensor(
    layer, levels, options
):
    model = mumoe_mixer(levels, **options)
    inputs = images(24, *SHAPE)
    labels = model.predict(inputs, verbose=0).argmax(axis=1)
    experts = [3, 0, 1]
    actual = analysis.ablate_experts(
        model, inputs, labels, layer, experts, batch_size=10, verbose=0
    )
    ablated = ablated_part(model, layer)
    tokens = keras.Model(model.input, ablated.inputs).predict(inputs, verbose=0)
    naive = as_whole_tensors(model, levels)
    logits = naive.predict(inputs, verbose=0)
    np.testing.assert_allclose(actual.accuracy, accuracies(logits, labels))
    part = mumoes(naive, layer.split("/")[0])[layer]
    tensors = [part.hidden.factors[0], part.output_experts.factors[0]]
    for row, expert in enumerate(experts):
        index = np.unravel_index(expert, levels)
        with zeroed(tensors, index):
            logits = naive.predict(inputs, verbose=0)
        without = ablated.without(tokens, np.array([index] * 24, "int32"))
        np.testing.assert_allclose(to_numpy(without), logits, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(actual.ablated[row], accuracies(logits, labels))
    assert (actual.changes != 0).any()


def test_an_edit_moves_one_logit_by_equation_5():
    model = classifier((2, 2))
    inputs = images(10, *SHAPE)
    inputs, members = inputs[:5], inputs[5:]
    before = model.predict(inputs, verbose=0)
    _, gates = features(model, inputs)
    mean = features(model, members)[1].mean(axis=0)
    # The default is the paper's: the number of experts, or 2.5 for all alike.
    for options, strength in (({"strength": -3.0}, -3.0), ({}, 4.0)):
        edited = analysis.edit_expert_logits(model, members, output=1, **options)
        change = edited.predict(inputs, verbose=0) - before
        expected = np.outer(strength * gates @ mean, [0, 1, 0])
        np.testing.assert_allclose(change, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(model.predict(inputs, verbose=0), before)
    blind = analysis.edit_expert_logits(model, None, output=2)
    change = blind.predict(inputs, verbose=0) - before
    np.testing.assert_allclose(change, [[0.0, 0.0, 2.5]] * 5, atol=1e-5)


def test_edits_add_up_are_saved_and_keep_the_training(tmp_path):
    model = classifier()
    model.compile(keras.optimizers.SGD(0.125), loss="auto")
    inputs = images(5, *SHAPE)
    before = model.predict(inputs, verbose=0)
    _, gates = features(model, inputs)
    first, second = np.arange(4.0), np.array([0.5, -1.0, 0.0, 2.0])
    edited = model.with_logit_offsets(2, first).with_logit_offsets(0, second)
    edited = edited.with_logit_offsets(2, second)
    change = edited.predict(inputs, verbose=0) - before
    expected = np.stack([gates @ second, np.zeros(5), gates @ (first + second)], 1)
    np.testing.assert_allclose(change, expected, atol=1e-5)
    assert edited.head.edited_outputs == (2, 0)
    assert float(edited.optimizer.learning_rate) == 0.125
    assert not any("logit_offsets" in w.path for w in edited.trainable_variables)
    edited.save_to_preset(tmp_path / "preset")
    again = models.from_preset(tmp_path / "preset")
    np.testing.assert_allclose(
        again.predict(inputs, verbose=0), before + expected, atol=1e-5
    )
    # A head of other classes is a new one, without the edits of the old.
    new = models.from_preset(tmp_path / "preset", num_classes=2)
    assert (new.head.units, new.head.edited_outputs) == (2, ())


@pytest.mark.parametrize("router", ["mumoe", "softmax_token_choice"])
def test_steering_adds_the_centre_before_the_experts(router):
    sizes = {**ONE_BLOCK, "router": router}
    if router == "mumoe":
        sizes |= {"num_experts": (2, 2), "rank": 4}
    model = with_weights(small_models.vit(**sizes))
    for weight in model.weights:
        if "moving_variance" in weight.path:
            weight.assign(ops.ones(weight.shape))
    inputs = images(3, *SHAPE)
    steered = analysis.steer_expert(model, "block_0", expert=2, strength=1.5)
    records = [
        keras.Model(m.input, m.routing["block_0"]).predict(inputs, verbose=0)
        for m in (model, steered)
    ]
    centres = analysis.interventions.expert_centres(model, "block_0")
    if router == "mumoe":
        first, second = model.get_layer("block_0").feed_forward.router.kernels
        # Expert 2 is the first of the second half.
        expected = to_numpy(first)[:, 1] + to_numpy(second)[:, 0]
        np.testing.assert_allclose(centres[2], expected, rtol=1e-6)
    change = records[1].logits - records[0].logits
    expected = np.broadcast_to(1.5 * centres[2] @ centres.T, change.shape)
    np.testing.assert_allclose(change, expected, rtol=1e-3, atol=1e-4)
    assert len(steered.weights) == len(model.weights)


def test_blocks_without_an_offset_are_steered_too():
    model = with_weights(small_models.vit(**ONE_BLOCK, norm="rms"))
    steered = analysis.steer_expert(model, "block_0", expert=2, strength=1.5)
    vector = steered.get_layer("block_0").steering
    centre = analysis.interventions.expert_centres(model, "block_0")[2]
    np.testing.assert_allclose(vector, 1.5 * centre, rtol=1e-6)
    # Steering adds up, and the model stays as it was.
    twice = analysis.steer_expert(steered, "block_0", expert=2, strength=0.5)
    vector = twice.get_layer("block_0").steering
    np.testing.assert_allclose(vector, 2.0 * centre, rtol=1e-6)
    assert model.get_layer("block_0").steering is None


@contextlib.contextmanager
def zeroed(variables, index):
    """Sets what belongs to an expert to zero within."""
    kept = [to_numpy(variable).copy() for variable in variables]
    for variable, value in zip(variables, kept):
        without = value.copy()
        without[index] = 0
        variable.assign(without)
    yield
    for variable, value in zip(variables, kept):
        variable.assign(value)


def mean_of_outputs(y, outputs):
    return ops.mean(outputs)


def test_copies_keep_what_is_frozen_and_need_no_loss():
    model = classifier(moe_layers=[0], router="softmax_token_choice")
    model.backbone.trainable = False
    model.compile(loss=mean_of_outputs)
    with pytest.warns(UserWarning, match="defaults"):
        steered = analysis.steer_expert(model, "block_0", 1)
    assert len(steered.trainable_weights) == len(model.trainable_weights)
    model.backbone.enable_lora(2)
    model.compile()
    copied = analysis.edit_expert_logits(model, None, 1)
    trained = {weight.path for weight in copied.trainable_weights}
    assert trained == {weight.path for weight in model.trainable_weights}
    assert any("lora" in path for path in trained)
