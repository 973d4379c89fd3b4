"""One of two processes on loopback, which train one step together; one saves.

Arguments: the process's number, the port of the first, and the file to save to; with
"alone" for a port, the step of one process with one device.
"""

import os
import sys

NUMBER, PORT, PATH = int(sys.argv[1]), sys.argv[2], sys.argv[3]
ALONE = PORT == "alone"
os.environ.update(
    KERAS_BACKEND="jax",
    JAX_PLATFORMS="cpu",
    JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo",
    XLA_FLAGS="--xla_backend_optimization_level=0 "
    f"--xla_force_host_platform_device_count={1 if ALONE else 2}",
)

import keras  # noqa: E402
import numpy as np  # noqa: E402

CONFIG = {
    "image_shape": (16, 16, 3),
    "patch_size": 8,
    "hidden_dim": 16,
    "num_layers": 1,
    "mlp_dim": 32,
    "num_heads": 2,
    "moe_layers": "every_1",
    "num_experts": 4,
    "images_per_group": 1,
    "class_token": False,
}
IMAGES = np.random.default_rng(1).normal(size=(8, 16, 16, 3)).astype("float32")
LABELS = np.arange(8) % 3


def make():
    from keras_moe import models

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


def main():
    keras.utils.set_random_seed(0)
    mine = slice(None)
    if not ALONE:
        # Before anything asks for devices.
        keras.distribution.initialize(f"127.0.0.1:{PORT}", 2, NUMBER)
        from keras_moe import distribution

        actual = distribution.auto("vit_s16", batch_size=len(IMAGES), **CONFIG)
        assert actual.device_mesh.shape == (4,), actual.device_mesh
        keras.distribution.set_distribution(actual)
        mine = slice(4 * NUMBER, 4 * NUMBER + 4)
    model = make()
    loss = float(np.ravel(model.train_on_batch(IMAGES[mine], LABELS[mine]))[0])
    if not ALONE:
        values = [distribution.gathered(weight) for weight in state(model)]
        # A model of this process alone.
        keras.distribution.set_distribution(None)
        model = make()
        for weight, value in zip(state(model), values):
            weight.assign(value)
    if NUMBER == 0:
        model.save_weights(PATH)
    print("LOSS", loss)


if __name__ == "__main__":
    main()
