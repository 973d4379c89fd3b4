"""One of two processes on loopback, which train one model and may be killed.

Arguments: the process's number, the port of the first, and the run's folder. At the end
of the run the first process reads all weights, alone, and saves them.
"""

import os
import sys
from pathlib import Path

NUMBER, PORT, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
os.environ.update(
    KERAS_BACKEND="jax",
    JAX_PLATFORMS="cpu",
    CUDA_VISIBLE_DEVICES="",
    JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo",
    XLA_FLAGS="--xla_backend_optimization_level=0 "
    "--xla_force_host_platform_device_count=2",
    JAX_COMPILATION_CACHE_DIR=str(FOLDER.parent / "programs"),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
)

import keras  # noqa: E402
import numpy as np  # noqa: E402

EPOCHS, STEPS, EVERY, BATCH = 2, 15, 2, 8
MODEL = {
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


def datasets(step):
    """Noise, another for each step; half of each batch is this process's."""
    import tensorflow as tf

    from keras_moe import training

    draw = np.random.default_rng(0)
    count = EPOCHS * STEPS
    images = draw.normal(size=(count, BATCH, 16, 16, 3)).astype("float32")
    labels = np.eye(3, dtype="float32")[draw.integers(3, size=(count, BATCH))]
    mine = slice(NUMBER * BATCH // 2, (NUMBER + 1) * BATCH // 2)
    images, labels = images[:, mine], labels[:, mine]
    train = tf.data.Dataset.from_tensor_slices((images[step:], labels[step:])).repeat()
    return training.Datasets(train, (images[0], labels[0]), 3, STEPS)


def main():
    # Before anything asks for devices.
    keras.distribution.initialize(f"127.0.0.1:{PORT}", 2, NUMBER)
    from keras_moe import distribution, training

    recipe = training.Recipe(
        "killed",
        data={"batch_size": BATCH},
        model={"preset": "vit_s16", **MODEL},
        schedule={"epochs": EPOCHS, "learning_rate": 1e-2, "warmup_steps": 5},
        optimizer={"weight_decay": 0.1, "ema_momentum": 0.9},
    )
    keras.distribution.set_distribution(
        distribution.auto(
            "vit_s16", batch_size=BATCH, auto_shard_dataset=False, **MODEL
        )
    )
    trained = training.train(
        recipe,
        datasets,
        verbose=0,
        checkpoint_dir=FOLDER,
        checkpoint_every=EVERY,
    )
    shards = [x.value.sharding for x in trained.model.weights]
    assert any(not shard.is_fully_replicated for shard in shards)
    if NUMBER == 0:
        keras.distribution.set_distribution(None)
        alone = training.train(recipe, datasets, verbose=0, checkpoint_dir=FOLDER)
        assert alone.history == trained.history
        alone.model.save_weights(FOLDER.parent / f"{FOLDER.name}.weights.h5")
    print("DONE")


if __name__ == "__main__":
    main()
