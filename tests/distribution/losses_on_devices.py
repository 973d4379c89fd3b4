"""Compares losses and routers by modality on 8 virtual devices with one.

`eight_devices.py`, which has these devices, imports it.
"""

import functools

import jax
import keras
import numpy as np

from keras_moe import losses
from keras_moe.layers import Experts, MoE
from keras_moe.routers import TokenChoiceRouter
from tests.losses.loss_table import contrastive_loss

BATCH, CHUNK = 24, 7
GENERATOR = np.random.default_rng(0)
INPUTS = [*GENERATOR.normal(size=(2, BATCH, 4)).astype("float32")]
INPUTS += [np.float32(1.5), np.float32(-0.5)]
OPTIONS = {
    "image_ids": np.arange(BATCH, dtype="int32") // 2,
    "sample_weight": np.arange(BATCH, dtype="float32") % 5,
}


def program(name, chunk_size):
    def loss(*inputs):
        return contrastive_loss(name, *inputs, **OPTIONS, chunk_size=chunk_size)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))


@functools.cache
def on_one_device(name):
    return program(name, None)(*INPUTS)


def compared(name, chunk_size):
    """How far eight devices are from one, and which logits a device has."""
    expected_value, expected = on_one_device(name)
    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    with distribution.scope():
        layout = distribution.get_data_layout((BATCH, 4))
        placed = [keras.distribution.distribute_tensor(x, layout) for x in INPUTS[:2]]
        compiled = program(name, chunk_size).lower(*placed, *INPUTS[2:]).compile()
        value, gradients = compiled(*placed, *INPUTS[2:])
    text = compiled.as_text()
    columns = chunk_size or BATCH
    others = {f"{BATCH},{columns}", f"{BATCH},{BATCH}", f"{BATCH // 8},{BATCH}"}
    others.discard(f"{BATCH // 8},{columns}")
    return {
        "differences": [
            float(np.abs(np.asarray(a) - np.asarray(b)).max())
            for a, b in zip((value, *gradients), (expected_value, *expected))
        ],
        "own_logits": f"f32[{BATCH // 8},{columns}]" in text,
        # Logits of other devices' images, and of more than a chunk of texts.
        "others": [x for x in others if f"[{x}]" in text],
    }


# Ten tokens, of which the last four are text, in each of eight groups.
TOKENS = GENERATOR.normal(size=(8, 10, 4)).astype("float32")
MODALITY_IDS = np.tile(np.arange(10) // 6, (8, 1)).astype("int32")
MODALITY_IDS[3] = 0


def routers_by_modality():
    """How far a layer with a kernel and a pool for each modality is from one device."""
    router = TokenChoiceRouter(
        6, num_modalities=2, expert_pools=[[0, 1, 2], [3, 4, 5]], capacity=2,
        priority=(1, 0), noise_std=1.0, seed=0,
        kernel_initializer=keras.initializers.RandomNormal(seed=0),
    )  # fmt: skip
    bag = losses.limoe_losses({"image": 1.0, "text": 1.0}, "merged_entropy")
    layer = MoE(router, Experts(6, 8), group_size=10, auxiliary_losses=bag)
    layer.build(TOKENS.shape)
    states = [variable.value for variable in layer.non_trainable_variables]

    def loss(weights, tokens, ids):
        (outputs, routing), _, added = layer.stateless_call(
            weights, states, tokens, modality_ids=ids, training=True, return_losses=True
        )
        value = keras.ops.mean(keras.ops.square(outputs)) + sum(added)
        return value, routing.dispatched

    def results(tokens, ids):
        weights = [variable.value for variable in layer.trainable_variables]
        program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (value, dispatched), gradients = program(weights, tokens, ids)
        return [np.asarray(x) for x in (value, *gradients[0], gradients[1], dispatched)]

    expected = results(TOKENS, MODALITY_IDS)
    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    with distribution.scope():
        placed = [
            keras.distribution.distribute_tensor(
                x, distribution.get_data_layout(x.shape)
            )
            for x in (TOKENS, MODALITY_IDS)
        ]
        sharded = results(*placed)
    dispatched = sharded[-1]
    text = MODALITY_IDS == 1
    pairs = zip(sharded, expected, strict=True)
    others = dispatched[text][:, :3].sum() + dispatched[~text][:, 3:].sum()
    return {
        "differences": [float(np.abs(a - b).max()) for a, b in pairs],
        "served": float(dispatched.sum()),
        "in_other_pools": float(others),
    }


def results():
    """What eight devices compute: the contrastive losses, and the routers."""
    contrastive = {
        f"{name} {chunk_size}": compared(name, chunk_size)
        for name in ("softmax", "sigmoid")
        for chunk_size in (None, CHUNK)
    }
    return [contrastive, routers_by_modality()]
