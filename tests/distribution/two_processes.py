"""Two processes on loopback, which train and evaluate together; one saves.

Arguments: the port of the first, and the folder to save to, where each writes its
results. The first one does the same by itself, too, with one device.
"""

import json
import os
import sys
from pathlib import Path

from tests.xla_flags import quick

PORT, FOLDER = sys.argv[1], Path(sys.argv[2])
os.environ.update(
    KERAS_BACKEND="jax",
    JAX_PLATFORMS="cpu",
    JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo",
    XLA_FLAGS=quick(xla_force_host_platform_device_count=2),
)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from keras_moe import distribution, models, training  # noqa: E402
from keras_moe._processes import gathered_batch  # noqa: E402
from keras_moe.training.callbacks import unchanged  # noqa: E402
from tests.forks import run_forked  # noqa: E402
from tests.small_models import ONE_BLOCK, SMALL  # noqa: E402

CONFIG = {**SMALL, **ONE_BLOCK, "image_shape": (16, 16, 3), "patch_size": 8}
CONFIG |= {"examples_per_group": 1, "class_token": False}
IMAGES = np.random.default_rng(1).normal(size=(8, 16, 16, 3)).astype("float32")
LABELS = np.arange(8) % 3
NAMES = ["red", "green", "blue"]


def make():
    keras.utils.set_random_seed(0)
    model = models.from_preset("vit_s16", num_classes=3, seed=0, **CONFIG)
    model.compile(
        optimizer=keras.optimizers.SGD(1.0, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.optimizer.build(model.trainable_variables)
    return model


def state(model):
    return [*model.weights, *model.optimizer.variables]


def step(model, images):
    return float(np.ravel(model.train_on_batch(IMAGES[images], LABELS[images]))[0])


def make_pairs():
    names = ("image_shape", "patch_size", "hidden_dim", "num_layers", "num_heads")
    sizes = {name: CONFIG[name] for name in names}
    sizes |= {"vocabulary_size": 520, "max_length": 8, "projection_dim": 6, "seed": 1}
    keras.utils.set_random_seed(0)
    model = models.from_preset("limoe_b16", task="contrastive", moe=None, **sizes)
    model.preprocessor = models.TextTokenizer.trained(NAMES, 515, max_length=8)
    return model


def evaluate(model, pair_model):
    """Figures of all kinds, of batches that the devices do not divide."""
    health = training.RouterHealth(IMAGES, min_entropy=0, max_share=1, max_dead=1)
    health.set_model(model)
    pool = (np.concatenate([IMAGES, IMAGES[::-1] / 2])[:15], np.arange(15) % 3)
    few_shot = training.FewShot(pool, pool, shots=(1, 2), seeds=(0,), batch_size=6)
    evaluation = training.PeriodicEvaluation({"few_shot": few_shot})
    evaluation.set_model(model)
    # All different: the order of sums would rank equal ones.
    texts = pair_model.preprocessor([*NAMES, "red blue", "green red"])
    pairs = {"images": np.concatenate([IMAGES, IMAGES])[:5], **texts}, None
    of_pairs = {
        "zero_shot": training.ZeroShot(pool, NAMES, batch_size=6),
        "retrieval": training.Retrieval(pairs, (1, 2), 4, batch_size=3),
    }
    of_pairs = training.PeriodicEvaluation(of_pairs)
    of_pairs.set_model(pair_model)
    with unchanged(model):
        return {**health.measure(), **evaluation.measure(), **of_pairs.measure()}


def work(number):
    # Before anything asks for devices.
    keras.distribution.initialize(f"127.0.0.1:{PORT}", 2, number)
    keras.utils.set_random_seed(0)
    actual = distribution.auto("vit_s16", batch_size=len(IMAGES), **CONFIG)
    assert actual.device_mesh.shape == (4,), actual.device_mesh
    keras.distribution.set_distribution(actual)
    model = make()
    mine = slice(4 * number, 4 * number + 4)
    np.testing.assert_array_equal(gathered_batch(IMAGES[mine]), IMAGES)
    losses = [step(model, mine)]
    figures = [evaluate(model, make_pairs())]
    values = [distribution.gathered(weight) for weight in state(model)]
    if number == 0:
        # Models of this process alone: with the weights of both, and trained by it.
        keras.distribution.set_distribution(None)
        model, alone = make(), make()
        for weight, value in zip(state(model), values):
            weight.assign(value)
        model.save_weights(FOLDER / "two.weights.h5")
        figures.append(evaluate(model, make_pairs()))
        losses.append(step(alone, slice(None)))
        alone.save_weights(FOLDER / "one.weights.h5")
    (FOLDER / f"{number}.json").write_text(json.dumps([losses, figures]))


if __name__ == "__main__":
    # Imported once for both.
    _ = tf.data, models.ViTBackbone, models.TextTokenizer, training.FewShot
    run_forked(work, 2)
