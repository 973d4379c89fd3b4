import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.models import ViTBackbone, ViTImageClassifier, describe
from keras_moe.routers import ROUTERS as ALL_ROUTERS
from tests import small_models
from tests.compare import assert_close, assert_same
from tests.small_models import ONE_BLOCK, SMALL, vit

to_numpy = ops.convert_to_numpy
# The package's own: other tests register further ones.
ROUTERS = [
    name
    for name, (cls, _) in ALL_ROUTERS.items()
    if cls.__module__.startswith("keras_moe.")
]


def images(batch=5):
    return small_models.images(batch, *SMALL["image_shape"])


def classifier(num_classes=3, **kwargs):
    names = {"pooling", "multi_label", "representation_dim", "head_bias"} & {*kwargs}
    head = {name: kwargs.pop(name) for name in names}
    return ViTImageClassifier(vit(**kwargs), num_classes, **head)


def test_each_site_that_draws_has_a_seed_of_its_own():
    model = classifier(
        seed=5, dropout_rate=0.1, attention_dropout=0.1, expert_dropout=0.1
    )
    seeds = [
        int(to_numpy(generator.state)[0])
        for layer in model._flatten_layers()
        for generator in layer._seed_generators
    ]
    # Embedding; two in each block and one in the MLP; experts and router.
    assert len(seeds) == len(set(seeds)) == 8
    assert min(seeds) == 5


def test_a_frozen_backbone_adds_no_losses():
    model = classifier(auxiliary_losses={"router_z": 1e6}, **ONE_BLOCK)
    model.backbone.trainable = False
    model.compile()
    assert model.train_on_batch(images(), np.zeros(5))[0] < 2


def test_routing_records_come_out_of_predict_with_uneven_batches():
    backbone = vit(moe_layers="every_1")
    model = keras.Model(backbone.input, backbone.routing)
    records = model.predict(images(batch=5), batch_size=2, verbose=0)
    assert list(records) == ["block_0", "block_1"]
    record = records["block_1"]
    assert record.gates.shape == (5, 9, 4)
    assert_close(record.gates.sum(axis=-1), 1.0, 1e-5)
    assert_same(record.dispatched.sum(axis=-1), 2.0)
    chosen = record.dispatched > 0
    assert_close(record.combined[chosen], record.gates[chosen])
    assert record.combined[~chosen].max() == 0


@pytest.mark.parametrize("kwargs", [
    {},
    {"eval_capacity_factor": 1.0, "evaluation": "official", "examples_per_group": 3},
    {
        "class_token": False, "position_embedding": "sincos", "pooling": "average",
        "dropout_rate": 0.1, "attention_dropout": 0.1, "expert_dropout": 0.1,
    },
    {"pooling": "map", "representation_dim": 6, "dtype": "mixed_bfloat16"},
    {"dtype": "bfloat16"},
])  # fmt: skip
def test_a_tiny_fit_lowers_the_loss(kwargs):
    keras.utils.set_random_seed(0)
    model = classifier(seed=0, **kwargs)
    # In batches of 8, of which the last is partial where groups may be, too.
    x = images(batch=21 if not kwargs or "examples_per_group" in kwargs else 24)
    y = (x[:, :8].mean(axis=(1, 2, 3)) > x[:, 8:].mean(axis=(1, 2, 3))).astype("int32")
    # Adam's 1 - 0.999^t is 0 in bfloat16, so there it would not move.
    adam = kwargs.get("dtype") != "bfloat16"
    model.compile(keras.optimizers.Adam(1e-2) if adam else keras.optimizers.SGD(0.3))
    history = model.fit(x, y, batch_size=8, epochs=12, verbose=0).history["loss"]
    assert history[-1] < 0.8 * history[0]
    assert np.isfinite(model.evaluate(x, y, batch_size=8, verbose=0)).all()


def test_multi_label_heads_train_on_vectors():
    keras.utils.set_random_seed(0)
    # About the head.
    dense = {"num_layers": 1, "moe_layers": None}
    model = classifier(multi_label=True, head_bias="prior", num_classes=4, **dense)
    x = images(batch=16)
    y = (np.random.default_rng(0).random((16, 4)) > 0.5).astype("float32")
    assert_close(model.predict(x, verbose=0), -np.log(4), 1e-5)
    expected = (np.log1p(np.exp(-np.log(4))) + np.log(4) * y).sum(axis=-1).mean()
    loss, auc = model.evaluate(x, y, verbose=0)
    assert_close(loss, expected, 1e-4)
    assert 0 <= auc <= 1
    model.compile(optimizer=keras.optimizers.Adam(1e-2))
    history = model.fit(x, y, batch_size=8, epochs=10, verbose=0).history["loss"]
    assert history[-1] < 0.9 * history[0]


@pytest.mark.parametrize("name", ROUTERS)
def test_one_argument_switches_the_router(name):
    model = classifier(router=name, seed=0, **ONE_BLOCK)
    labels = np.array([0, 1, 2, 0])
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=model.loss)
    losses = model.fit(images(4), labels, batch_size=4, epochs=4, verbose=0).history
    assert losses["loss"][-1] < losses["loss"][0]


@pytest.mark.parametrize("class_token", [True, False])
def test_without_position_embedding_places_do_not_matter(class_token):
    kwargs = {**SMALL, "moe_layers": None, "class_token": class_token, "num_layers": 1}
    actual = {}
    for kind in (None, "sincos"):
        backbone = ViTBackbone.from_config({**kwargs, "position_embedding": kind})
        assert not any("position" in weight.path for weight in backbone.weights)
        config = backbone.get_config()
        assert config["position_embedding"] == kind
        assert describe(backbone).parameters == backbone.count_params()
        x = images(1)
        size = backbone.get_layer("patch_embedding").patch_size[0]
        # The first and the last row of patches change places.
        swapped = x.copy()
        swapped[:, :size], swapped[:, -size:] = x[:, -size:], x[:, :size]
        grid = keras.Model(backbone.input, backbone.features["grid"])
        before, after = (to_numpy(grid(values)) for values in (x, swapped))
        actual[kind] = np.abs(before[:, 0] - after[:, -1]).max()
    assert actual[None] < 1e-5
    assert actual["sincos"] > 1e-2


def test_which_losses_auto_means():
    def names(**kwargs):
        block = vit(**kwargs).get_layer("block_1")
        return [loss.name for loss in block.feed_forward.auxiliary_losses]

    assert names() == ["importance", "load"]
    assert names(noise_std=0.0) == ["importance"]
    assert names(router="sinkhorn_token_choice") == []
    assert names(router="soft") == []
    assert names(auxiliary_losses={"router_z": 1.0}) == ["router_z"]


@pytest.mark.parametrize(
    ("dtype", "pooling"), [("mixed_float16", None), ("float16", "map")]
)
def test_half_precision_trains(dtype, pooling):
    model = classifier(dtype=dtype, pooling=pooling, query_key_norm=True)
    assert model.predict(images(), verbose=0).dtype == "float16"
    model.compile(keras.optimizers.SGD(0.01))
    history = model.fit(images(), np.array([0, 1, 2, 0, 1]), verbose=0).history
    assert np.isfinite(history["loss"]).all()


def test_nan_images_give_nan_for_themselves_alone():
    model = classifier()
    kernel = model.output_dense.kernel
    kernel.assign(np.random.default_rng(1).normal(size=kernel.shape))
    x = images()
    clean = model.predict(x, verbose=0)
    x[1, 0, 0, 0] = np.nan
    logits = model.predict(x, verbose=0)
    assert np.isnan(logits[1]).all()
    assert_close(logits[[0, 2, 3, 4]], clean[[0, 2, 3, 4]], 1e-5)
