"""int8 models: which weights, how near, and whether they come back."""

import gc
import warnings

import keras
import numpy as np
import pytest

from keras_moe import data, models
from keras_moe.models import MixerBackbone, ViTBackbone, ViTImageClassifier
from tests.small_models import SMALL

pytestmark = pytest.mark.usefixtures("op_by_op")

to_numpy = keras.ops.convert_to_numpy


@pytest.fixture(autouse=True)
def quantizing_is_quick_and_quiet():
    # Keras collects garbage at each kernel that it replaces: of few objects then.
    gc.freeze()
    with warnings.catch_warnings():
        # Keras warns of each layer that cannot be quantised.
        warnings.filterwarnings("ignore", message=".*does not have a `quantize`")
        yield
    gc.unfreeze()


def images(batch=5):
    shape = (batch, *SMALL["image_shape"])
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def classifier(head=None, **kwargs):
    keras.utils.set_random_seed(0)
    model = ViTImageClassifier(
        ViTBackbone.from_config({**SMALL, **kwargs}), 3, **(head or {})
    )
    kernel = model.output_dense.kernel
    kernel.assign(np.random.default_rng(1).normal(size=kernel.shape))
    return model


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "kwargs", [{}, {"router": "soft"}], ids=["token_choice", "soft"]
)
def test_attention_and_experts_become_int8_and_routers_do_not(kwargs):
    model = classifier(**kwargs)
    paths = {weight.path for weight in model.weights}
    before = model.predict(images(), verbose=0)
    model.quantize("int8")
    int8 = {weight.path for weight in model.weights if weight.dtype == "int8"}
    # The kernels of attention, MLP, experts and head: all of the matmuls but those of
    # the router and the patches, whose kernel is none of a `Dense` layer.
    expected = {
        path
        for path in paths
        if path.endswith("kernel") and "router" not in path and "patch" not in path
    }
    assert int8 == expected
    assert len(int8) == 8 + 2 + 2 + 1
    assert paths < {weight.path for weight in model.weights}
    for weight in model.weights:
        if "router" in weight.path:
            assert weight.dtype == "float32", weight.path
    after = model.predict(images(), verbose=0)
    assert np.abs(after - before).max() > 0
    # In most images no token changes experts: they differ by the steps alone.
    assert np.median(np.abs(after - before)) < 0.05 * np.abs(before).max()


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_int8_models_come_back(tmp_path, policy):
    model = classifier(
        dtype=policy,
        num_layers=1,
        moe_layers=[0],
        head={"representation_dim": 5, "pooling": "map"},
    )
    model.quantize("int8")
    expected = model.predict(images(), verbose=0)
    # Saving twice: making a config must not change the model.
    for _ in range(2):
        model.save_to_preset(tmp_path / "preset")
    model.save(tmp_path / "model.keras")
    loaded = models.from_preset(str(tmp_path / "preset"))
    # A loaded model can be saved again, too.
    loaded.save_to_preset(tmp_path / "again")
    for other in (
        models.from_preset(str(tmp_path / "again")),
        keras.saving.load_model(tmp_path / "model.keras"),
    ):
        assert [(w.path, w.dtype) for w in sorted(other.weights, key=own)] == [
            (w.path, w.dtype) for w in sorted(model.weights, key=own)
        ]
        np.testing.assert_array_equal(other.predict(images(), verbose=0), expected)


def own(weight):
    return weight.path


def test_another_head_on_an_int8_backbone(tmp_path):
    model = classifier()
    model.quantize("int8")
    model.save_to_preset(tmp_path / "preset")
    other = models.from_preset(str(tmp_path / "preset"), num_classes=7)
    assert other.output_dense.kernel.dtype == "float32"
    assert tuple(other.output_dense.kernel.shape) == (16, 7)
    dtypes = [[w.dtype for w in x.backbone.weights] for x in (model, other)]
    assert sorted(dtypes[0]) == sorted(dtypes[1])


def test_filters_choose_the_experts_alone(tmp_path):
    model = classifier()
    model.quantize("int8", filters="experts")
    int8 = {weight.path for weight in model.weights if weight.dtype == "int8"}
    assert {path.split("/")[-2] for path in int8} == {"experts"}
    model.save_to_preset(tmp_path / "preset")
    loaded = models.from_preset(str(tmp_path / "preset"))
    assert {w.path for w in loaded.weights if w.dtype == "int8"} == int8


def test_an_int8_mixer_comes_back(tmp_path):
    sizes = {name: size for name, size in SMALL.items() if name != "num_heads"}
    model = MixerBackbone.from_config({**sizes, "token_mlp_dim": 8})
    model.quantize("int8")
    assert sum(weight.dtype == "int8" for weight in model.weights) == 4 + 2 + 2
    model.save_to_preset(tmp_path / "preset")
    loaded = models.from_preset(str(tmp_path / "preset"))
    np.testing.assert_array_equal(
        loaded.predict(images(), verbose=0), model.predict(images(), verbose=0)
    )


@pytest.mark.usefixtures("traced")
def test_digits_are_recognised_as_well_with_int8():
    keras.utils.set_random_seed(0)
    model = models.from_preset(
        "vmoe_digits",
        num_classes=10,
        num_layers=1,
        moe_layers=[0],
        seed=0,
        load_weights=False,
    )
    shape = model.backbone.image_shape
    model.compile(optimizer=keras.optimizers.AdamW(4e-3, global_clipnorm=1.0))
    # Whole batches alone: one shape, one program.
    train = [x[:1344] for x in data.load_digits("train", shape)]
    model.fit(*train, batch_size=64, epochs=8, verbose=0)
    test = data.load_digits("test", shape)
    _, before = model.evaluate(*test, batch_size=150, verbose=0)
    assert before > 0.8
    size = nbytes(model)
    model.quantize("int8")
    _, after = model.evaluate(*test, batch_size=150, verbose=0)
    assert after > before - 0.01
    assert nbytes(model) < 0.4 * size


def nbytes(model):
    return sum(to_numpy(weight).nbytes for weight in model.weights)
