"""Low-rank pairs and int8 kernels of the experts, with slots and with rows."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.layers import Experts
from tests.calls import call
from tests.compare import assert_close, assert_same, to_numpy
from tests.refusals import refuses
from tests.training_gradients import training_gradients

E, D, H, C, RANK = 3, 8, 12, 5, 2
COUNTS = np.array([4, 0, 3], "int32")


def slots():
    return np.random.default_rng(0).normal(size=(2, E, C, D)).astype("float32")


def rows():
    # One row more than the experts have.
    return np.random.default_rng(1).normal(size=(8, D)).astype("float32")


def experts(**kwargs):
    keras.utils.set_random_seed(3)
    layer = Experts(E, H, shared_initialization=False, **kwargs)
    layer.build((None, E, None, D))
    for bias in (layer.hidden_bias, layer.output_bias):
        bias.assign(np.random.default_rng(2).normal(size=bias.shape))
    return layer


def outputs(layer):
    """With slots, and with the rows that have an expert."""
    with_rows = layer(rows(), COUNTS)
    return to_numpy(layer(slots())), to_numpy(with_rows)[: COUNTS.sum()]


def fill_pairs(layer):
    generator = np.random.default_rng(4)
    for name in ("hidden_lora_b", "output_lora_b"):
        weight = getattr(layer, name)
        weight.assign(generator.normal(size=weight.shape))


def merged(layer):
    """An `Experts` layer without pairs, with kernels W + (alpha / rank) A B."""
    plain = experts()
    for name in ("hidden", "output"):
        a, b = (to_numpy(getattr(layer, f"{name}_lora_{part}")) for part in "ab")
        kernel = to_numpy(getattr(layer, f"{name}_kernel"))
        scaling = (layer.lora_alpha or layer.lora_rank) / layer.lora_rank
        getattr(plain, f"{name}_kernel").assign(kernel + scaling * a @ b)
    return plain


@pytest.mark.parametrize("alpha", [None, 5.0])
def test_pairs_change_each_expert_as_its_own_sum(alpha):
    layer = experts()
    layer.enable_lora(RANK, lora_alpha=alpha)
    fill_pairs(layer)
    assert_close(outputs(layer), outputs(merged(layer)), 1e-4, 1e-4)


def test_each_expert_has_a_pair_of_its_own():
    layer = experts()
    layer.enable_lora(RANK)
    shapes = {v.name: tuple(v.shape) for v in layer.trainable_weights}
    assert shapes == {
        "hidden_lora_a": (E, D, RANK),
        "hidden_lora_b": (E, RANK, H),
        "output_lora_a": (E, H, RANK),
        "output_lora_b": (E, RANK, D),
    }
    a = to_numpy(layer.hidden_lora_a)
    assert np.abs(a[0] - a[1]).max() > 0.01
    # A fan of one expert: he_uniform's limit is sqrt(6 / D).
    assert 0.7 * np.sqrt(6 / D) < np.abs(a).max() <= np.sqrt(6 / D)
    before = outputs(layer)
    changed = np.zeros(layer.output_lora_b.shape, "float32")
    changed[2] = 1.0
    layer.output_lora_b.assign(changed)
    after = outputs(layer)
    assert_same(after[0][:, :2], before[0][:, :2])
    assert np.abs(after[0][:, 2] - before[0][:, 2]).min() > 1e-4
    assert_same(after[1][:4], before[1][:4])
    assert np.abs(after[1][4:] - before[1][4:]).min() > 1e-4


@pytest.mark.every_backend
def test_only_the_pairs_have_gradients():
    layer = experts()
    layer.enable_lora(RANK)
    fill_pairs(layer)
    assert all("lora" in weight.name for weight in layer.trainable_weights)
    for inputs, kwargs in ((slots(), {}), (rows(), {"group_sizes": COUNTS})):
        gradients = training_gradients(layer, inputs, **kwargs)
        assert len(gradients) == 4
        for weight, gradient in zip(layer.trainable_weights, gradients):
            served = gradient if not kwargs else gradient[COUNTS > 0]
            assert np.abs(served).max(axis=(1, 2)).min() > 0, weight.path
            if kwargs:
                assert np.abs(gradient[COUNTS == 0]).max() == 0, weight.path


def test_what_it_cannot_do_is_refused():
    refuses("built=False", Experts(2, 4).enable_lora, 2)
    layer = experts(lora_rank=RANK)
    refuses("lora_enabled=True", layer.enable_lora, RANK)
    refuses("rank=0", experts().enable_lora, 0)
    refuses("lora_rank=0", Experts, 2, 4, lora_rank=0)
    with pytest.raises(NotImplementedError, match="mode='int4'"):
        experts().quantize("int4")
    with pytest.raises(NotImplementedError, match="mode='float8'"):
        Experts(E, H, dtype="float8_from_float32").build((1, E, 2, D))


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16"])
def test_int8_kernels_are_near_the_float_ones(dtype):
    layer = experts(dtype=dtype)
    before = [x.astype("float32") for x in outputs(layer)]
    kernel = to_numpy(ops.cast(layer.hidden_kernel, "float32"))
    layer.quantize("int8")
    assert layer.dtype_policy.name == f"int8_from_{dtype}"
    assert layer.hidden_kernel.dtype == layer.output_kernel.dtype == "int8"
    assert layer.hidden_bias.dtype == keras.dtype_policies.get(dtype).variable_dtype
    # A scale for each expert and output channel, by which the largest weight is 127.
    scale = to_numpy(layer.hidden_scale)
    assert scale.shape == (E, H)
    assert_close(scale, 127 / np.abs(kernel).max(axis=1), 1e-4)
    assert_same(np.abs(to_numpy(layer.hidden_kernel).astype("int32")).max(axis=1), 127)
    assert np.abs(to_numpy(layer.hidden_kernel) / scale[:, None] - kernel).max() <= (
        0.501 / scale.min()
    )
    for a, b in zip(before, outputs(layer)):
        # The step of the kernels is 1/254 of their largest weight.
        error = np.abs(a - b.astype("float32")).max() / np.abs(a).max()
        assert 0 < error < 0.02


def test_pairs_train_beside_int8_kernels(tmp_path):
    layer = experts()
    layer.quantize("int8")
    before = outputs(layer)
    layer.enable_lora(RANK)
    assert_same(before, outputs(layer))
    fill_pairs(layer)
    gradients = training_gradients(layer, slots())
    assert [np.abs(gradient).max() > 0 for gradient in gradients] == [True] * 4
    inputs = keras.Input((E, C, D))
    model = keras.Model(inputs, layer(inputs))
    expected = model.predict(slots(), verbose=0)
    model.save_weights(tmp_path / "model.weights.h5")
    plain = experts()
    plain.quantize("int8")
    plain = keras.Model(inputs, plain(inputs))
    plain.load_weights(tmp_path / "model.weights.h5")
    # The sums are rounded to int8 anew.
    error = np.abs(plain.predict(slots(), verbose=0) - expected).max()
    assert 0 < error < 0.02 * np.abs(expected).max()


@pytest.mark.every_backend
def test_int8_kernels_pass_gradients_to_the_tokens():
    layer = experts()

    class Before(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.experts = layer
            self.scale = self.add_weight(shape=(D,), initializer="ones")

        def call(self, x):
            return self.experts(x * self.scale)

    model = Before()
    model.built = True
    layer.trainable = False
    (exact,) = training_gradients(model, slots())
    layer.quantize("int8")
    layer.trainable = False
    (gradient,) = training_gradients(model, slots())
    assert 0 < np.abs(gradient - exact).max() < 0.02 * np.abs(exact).max()


def test_dropout_still_applies_while_training():
    layer = experts(dropout=0.5, seed=1)
    ones = np.ones((1, E, 200, D), "float32")
    calm = to_numpy(call(layer, ones))
    dropped = to_numpy(call(layer, ones, training=True))
    assert 0.4 < (dropped == 0).mean() < 0.6
    assert (calm != 0).all()


class Scaled(keras.layers.Layer):
    """An activation with a weight."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return self.scale * x


def test_an_activation_with_weights_learns():
    layer = experts(activation=Scaled())
    layer(rows(), COUNTS)
    gradients = training_gradients(layer, rows(), group_sizes=COUNTS)
    by_name = {w.name: g for w, g in zip(layer.trainable_weights, gradients)}
    assert np.abs(by_name["scale"]) > 0


@pytest.mark.every_backend
@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_int8_experts_are_saved_and_loaded(tmp_path):
    inputs = keras.Input((E, C, D))
    layer = experts()
    layer.quantize("int8")
    model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    (again,) = (x for x in loaded.layers if isinstance(x, Experts))
    assert again.hidden_kernel.dtype == "int8"
    assert_same(loaded.predict(slots(), verbose=0), model.predict(slots(), verbose=0))
    model.save_weights(tmp_path / "model.weights.h5")
    plain = keras.Model(inputs, experts()(inputs))
    refuses("quantization_mode=None", plain.load_weights, tmp_path / "model.weights.h5")


def test_saved_experts_have_their_pairs_in_their_kernels(tmp_path):
    inputs = keras.Input((E, C, D))
    layer = experts()
    layer.enable_lora(RANK, lora_alpha=3.0)
    fill_pairs(layer)
    model = keras.Model(inputs, layer(inputs))
    expected = model.predict(slots(), verbose=0)
    model.save_weights(tmp_path / "model.weights.h5")
    plain = keras.Model(inputs, experts()(inputs))
    plain.load_weights(tmp_path / "model.weights.h5")
    actual = plain.predict(slots(), verbose=0)
    assert_close(actual, expected, 1e-4, 1e-4)
    # With pairs, and as a whole model: they change nothing, and can learn again.
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    (again,) = (x for x in loaded.layers if isinstance(x, Experts))
    assert (again.lora_rank, again.lora_alpha) == (RANK, 3.0)
    assert len(again.trainable_weights) == 4
    actual = loaded.predict(slots(), verbose=0)
    assert_close(actual, expected, 1e-4, 1e-4)
    assert np.abs(to_numpy(again.hidden_lora_a)).max() > 0
    assert np.abs(to_numpy(again.hidden_lora_b)).max() == 0
