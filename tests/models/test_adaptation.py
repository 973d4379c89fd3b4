"""LoRA adapters and int8 weights: which layers, training, and files."""

import gc
import warnings

import h5py
import keras
import numpy as np
import pytest

from keras_moe import data, models
from keras_moe.models.saving import _lora
from tests.backends import every_backend_for
from tests.compare import assert_same, to_numpy
from tests.refusals import refuses
from tests.small_models import SMALL, images, mixer, vit

pytestmark = pytest.mark.usefixtures("op_by_op")

NAMES = ["query", "value", "experts"]
IMAGES, LABELS = images(8, *SMALL["image_shape"]), np.arange(8) % 3


def backbone(**kwargs):
    keras.utils.set_random_seed(0)
    return vit(**{"seed": 0, **kwargs})


def classifier(head=None, **kwargs):
    model = models.ViTImageClassifier(backbone(**kwargs), 3, **(head or {}))
    kernel = model.output_dense.kernel
    kernel.assign(np.random.default_rng(1).normal(size=kernel.shape))
    return model


@pytest.mark.parametrize(("names", "expected"), [
    (None, {"query", "value"}),
    (NAMES, {"query", "value", "experts"}),
    (["key", "hidden"], {"key", "hidden"}),
])  # fmt: skip
def test_only_the_adapters_of_the_named_layers_are_trainable(names, expected):
    model = backbone()
    # Op by op: two programs may round differently.
    before = to_numpy(model(IMAGES))
    model.enable_lora(2, target_layer_names=names)
    assert_same(model(IMAGES), before)
    assert all("lora" in weight.name for weight in model.trainable_weights)
    assert {w.path.split("/")[-2] for w in model.trainable_weights} == expected
    # One adapter for each kernel of attention or of an MLP, two for an expert's.
    attention = len(expected - {"experts", "hidden"}) * SMALL["num_layers"]
    adapters = attention + ("hidden" in expected) + 2 * ("experts" in expected)
    assert len(model.trainable_weights) == 2 * adapters


@pytest.mark.every_backend
@pytest.mark.usefixtures("traced")
def test_training_lowers_the_loss_and_changes_the_adapters_alone():
    model = classifier()
    model.enable_lora(2, target_layer_names=NAMES)
    names = {weight.path.split("block_")[-1] for weight in model.trainable_weights}
    # A task's head stays trainable.
    assert {"predictions/kernel", "predictions/bias"} < names
    assert all("lora" in name or "predictions" in name for name in names)
    model.output_dense.trainable = False
    model.compile(optimizer=keras.optimizers.Adam(1e-2))
    before = {weight.path: to_numpy(weight).copy() for weight in model.weights}
    fitted = model.fit(IMAGES, LABELS, batch_size=4, epochs=12, verbose=0)
    losses = fitted.history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    for weight in model.weights:
        changed = not np.array_equal(to_numpy(weight), before[weight.path])
        assert changed == ("lora" in weight.name), weight.path
    # The experts' adapters went apart: each has learned from its own tokens.
    b = next(w for w in model.weights if w.path.endswith("experts/output_lora_b"))
    b = to_numpy(b)
    assert all(np.abs(b[i] - b[j]).max() > 1e-3 for i in range(4) for j in range(i))


def adapted():
    """A classifier whose adapters say something."""
    model = classifier(gated_experts=True)
    model.enable_lora(2, target_layer_names=NAMES)
    generator = np.random.default_rng(2)
    for weight in model.backbone.trainable_weights:
        weight.assign(0.1 * generator.normal(size=weight.shape))
    return model


def test_the_adapters_alone_are_saved_and_loaded(tmp_path):
    model = adapted()
    path = tmp_path / "adapters.lora.h5"
    model.backbone.save_lora_weights(path)
    expected = model.backbone.predict(IMAGES, verbose=0)
    # Once into a backbone as it comes, and once into one with adapters.
    for enable in (False, True):
        other = backbone(gated_experts=True)
        if enable:
            other.enable_lora(2, target_layer_names=NAMES)
        other.load_lora_weights(path)
        assert len(other.trainable_weights) == 14
        assert_same(other.predict(IMAGES, verbose=0), expected)
    for options in ({"rank": 3, "target_layer_names": NAMES}, {"rank": 2}):
        wrong = backbone(gated_experts=True)
        wrong.enable_lora(**options)
        refuses(r"of shape .*; received: shape=", wrong.load_lora_weights, path)


def test_what_cannot_be_adapted_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"without \['expert'\]"):
        backbone().enable_lora(2, target_layer_names=["expert"])
    with pytest.raises(
        ValueError, match=r"enable_lora was called.*received: 0 adapters"
    ):
        backbone().save_lora_weights(tmp_path / "x.lora.h5")
    model = backbone()
    model.enable_lora(2)
    refuses(r"x\.h5", model.save_lora_weights, tmp_path / "x.h5")
    # Mixers have experts and no attention.
    mixer().enable_lora(2, target_layer_names=["experts"])
    refuses(r"without \['query', 'value'\]", mixer().enable_lora, 2)


def test_adapters_in_another_file_are_not_read(tmp_path):
    path, other = tmp_path / "other.lora.h5", tmp_path / "secret"
    other.write_bytes(bytes(16))
    with h5py.File(path, "w") as file:
        file.attrs.update({"rank": 2, "target_layer_names": ["query"]})
        file.create_dataset("x", (4,), "float32", external=[(str(other), 0, 16)])
    refuses(rf"{path}.*another file", _lora.load_adapters, None, path)
    h5py.File(path, "w").close()
    refuses(rf"of save_lora_weights; .*{path}", _lora.load_adapters, None, path)


@pytest.fixture
def quiet():
    # Keras collects garbage at each kernel that it replaces: of few objects then.
    gc.freeze()
    with warnings.catch_warnings():
        # Keras warns of each layer that cannot be quantised.
        warnings.filterwarnings("ignore", message=".*does not have a `quantize`")
        yield
    gc.unfreeze()


def paths_of_int8(model):
    return {weight.path for weight in model.weights if weight.dtype == "int8"}


@pytest.mark.usefixtures("traced", "quiet")
@pytest.mark.parametrize("router", ["softmax_token_choice", "soft"])
def test_attention_and_experts_become_int8_and_routers_do_not(router):
    model = classifier(router=router)
    paths = {weight.path for weight in model.weights}
    before = model.predict(IMAGES[:5], verbose=0)
    model.quantize("int8")
    # The kernels of attention, MLP, experts and head: all of the matmuls but those of
    # the router and the patches, whose kernel is none of a `Dense` layer.
    kernels = {path for path in paths if path.endswith("kernel")}
    expected = {x for x in kernels if "router" not in x and "patch" not in x}
    assert paths_of_int8(model) == expected
    assert len(expected) == 8 + 2 + 2 + 1
    assert paths < {weight.path for weight in model.weights}
    routers = [weight for weight in model.weights if "router" in weight.path]
    assert {weight.dtype for weight in routers} == {"float32"}
    after = model.predict(IMAGES[:5], verbose=0)
    assert np.abs(after - before).max() > 0
    # In most images no token changes experts: they differ by the steps alone.
    assert np.median(np.abs(after - before)) < 0.05 * np.abs(before).max()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "policy", every_backend_for(["float32", "mixed_bfloat16"], "mixed_bfloat16")
)
def test_int8_models_come_back(tmp_path, policy):
    head = {"representation_dim": 5, "pooling": "map"}
    model = classifier(dtype=policy, num_layers=1, moe_layers=[0], head=head)
    model.quantize("int8")
    expected = model.predict(IMAGES[:5], verbose=0)
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
        saved, again = ({w.path: w.dtype for w in x.weights} for x in (model, other))
        assert again == saved
        assert_same(other.predict(IMAGES[:5], verbose=0), expected)
    new = models.from_preset(str(tmp_path / "preset"), num_classes=7)
    kernel = new.output_dense.kernel
    assert (kernel.dtype, tuple(kernel.shape)) == ("float32", (5, 7))


@pytest.mark.usefixtures("quiet")
def test_filters_choose_the_experts_alone(tmp_path):
    model = classifier(gated_experts=True)
    model.quantize("int8", filters="experts")
    int8 = paths_of_int8(model)
    assert {path.split("/")[-2] for path in int8} == {"experts"}
    assert len(int8) == 3
    model.save_to_preset(tmp_path / "preset")
    assert paths_of_int8(models.from_preset(str(tmp_path / "preset"))) == int8


@pytest.mark.usefixtures("traced", "quiet")
def test_digits_are_recognised_as_well_with_int8():
    model = models.from_preset("vmoe_digits")
    test = data.load_digits("test", model.backbone.image_shape)
    _, before = model.evaluate(*test, batch_size=150, verbose=0)
    size = nbytes(model)
    model.quantize("int8")
    _, after = model.evaluate(*test, batch_size=150, verbose=0)
    assert after > before - 0.01
    assert nbytes(model) < 0.4 * size


def nbytes(model):
    return sum(to_numpy(weight).nbytes for weight in model.weights)
