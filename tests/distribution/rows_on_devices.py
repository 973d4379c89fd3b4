"""Compares layers without a capacity on 8 virtual devices with one.

`eight_devices.py`, which has these devices, imports it.
"""

import math
import re
from typing import Any

import jax
import keras
import numpy as np

from keras_moe import data, distribution, models
from keras_moe.layers import Experts, MoE
from keras_moe.ops._row_blocks import rows_per_round
from keras_moe.routers import PathwayAwareRouter, TokenChoiceRouter
from tests.small_models import ONE_BLOCK, SMALL

GENERATOR = np.random.default_rng(0)
BATCH, LENGTH, DIM = 16, 5, 4
TOKENS = GENERATOR.normal(size=(BATCH, LENGTH, DIM)).astype("float32")
FITTED = {**SMALL, **ONE_BLOCK, "num_experts": 8, "seed": 0}
MASK = GENERATOR.random((BATCH, LENGTH)) < 0.7
MODALITY_IDS = np.tile(np.arange(LENGTH) // 3, (BATCH, 1)).astype("int32")
ALL = {"expert_parallel": "batch"}
POOLS = {"num_modalities": 2, "expert_pools": [[0, 1, 2, 3, 4], [5, 6, 7]]}
# The router's experts and arguments, those of the experts and of the call, the layout.
CASES: dict[str, tuple[int, dict, dict, dict, dict]] = {
    "one expert": (8, {"excluded_experts": [0, 1, 2, 4, 5, 6, 7]}, {}, {}, ALL),
    "one replica's": (
        8, {"excluded_experts": [2, 3, 4, 5, 6, 7]}, {}, {}, {"expert_parallel": 4}
    ),
    "six experts": (6, {"num_selected_experts": 2}, {"use_bias": False}, {}, {}),
    "gated, masked, modalities": (
        8, {"num_selected_experts": 2, **POOLS}, {"gated": True},
        {"mask": MASK, "modality_ids": MODALITY_IDS},
        {"expert_parallel": 2, "model_parallel": 2},
    ),
    "MoE++": (
        8, {"zero_experts": 1, "copy_experts": 1, "num_selected_experts": 2}, {},
        {"mask": MASK, "training": False}, ALL,
    ),
    "low rank": (8, {}, {"lora_rank": 2}, {}, ALL),
}  # fmt: skip


def make(num_experts, routing, experts):
    keras.utils.set_random_seed(0)
    options: dict[str, Any] = {"num_selected_experts": 1, "noise_std": 0.0, **routing}
    if "zero_experts" in options:
        router = PathwayAwareRouter(num_experts + 2, **options)
    else:
        router = TokenChoiceRouter(num_experts, dropless=True, **options)
    layer = MoE(router, Experts(num_experts, 8, name="experts", **experts), name="moe")
    layer.build(TOKENS.shape)
    generator = np.random.default_rng(1)
    for weight in layer.trainable_variables:
        weight.assign(generator.normal(size=weight.shape))
    return layer


def compiled(layer, tokens, call):
    """A program and its inputs."""
    states = [variable.value for variable in layer.non_trainable_variables]
    weights = [variable.value for variable in layer.trainable_variables]

    def loss(weights, tokens):
        (outputs, routing), _ = layer.stateless_call(
            weights, states, tokens, **{"training": True, **call}
        )
        return keras.ops.mean(keras.ops.square(outputs)), (outputs, routing.dispatched)

    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    return program.lower(weights, tokens).compile(), (weights, tokens)


def compared(num_experts, routing, experts, call, layout):
    """How far eight devices are from one, and the rounds of the busiest device."""
    program, inputs = compiled(make(num_experts, routing, experts), TOKENS, call)
    (value, (outputs, dispatched)), gradients = program(*inputs)
    expected = [value, outputs, dispatched, *jax.tree.leaves(gradients)]

    sizes = {**SMALL, **ONE_BLOCK, "num_experts": num_experts, **layout}
    split = distribution.auto("vit_s16", **sizes)
    with split.scope():
        layer = make(num_experts, routing, experts)
        by_batch = split.get_data_layout(TOKENS.shape)
        tokens = keras.distribution.distribute_tensor(TOKENS, by_batch)
        program, inputs = compiled(layer, tokens, call)
        actual = jax.tree.leaves(program(*inputs))
        taken = layer.experts.row_split(call.get("training", True))
    result = {
        "differences": [
            float(np.abs(np.asarray(a) - np.asarray(b)).max())
            for a, b in zip(actual, expected, strict=True)
        ],
        # What has an axis of size D or H.
        "gathered": [
            x
            for x in re.findall(r"= (\S+) all-gather", str(program.as_text()))
            if re.search(r"\[.*\b[48]\b.*\]", x) and x.startswith("f32")
        ],
    }
    if taken is not None:
        selected = routing.get("num_selected_experts", 1)
        room = BATCH * LENGTH * selected // taken.num_blocks
        room = rows_per_round(room, taken.ways)
        # The tokens of each replica by the devices of their experts.
        served = np.asarray(dispatched)[..., :num_experts]
        served = served.reshape(taken.num_blocks // taken.ways, -1, taken.ways,
                                num_experts // taken.ways)  # fmt: skip
        result["rounds"] = math.ceil(served.sum((1, 3)).max() / room)
    return result


def fitted(on_several):
    """Losses of two epochs, an evaluation, and predictions of a small model."""
    generator = np.random.default_rng(3)
    images = generator.normal(size=(32, 16, 8, 2)).astype("float32")
    labels = np.arange(32) % 3
    keras.utils.set_random_seed(0)
    model: Any = models.from_preset(
        "vit_s16", num_classes=3, load_weights=False, **FITTED, dropless=True
    )
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=None,
        weighted_metrics=["accuracy"],
    )
    batches: dict[str, Any] = {"batch_size": 16, "verbose": 0}
    history = model.fit(
        images, labels, epochs=2, shuffle=False, validation_data=(images, labels),
        **batches,
    ).history  # fmt: skip
    numbers = [history[name] for name in sorted(history)]
    logits = (
        data.predictions(model, images[:19], **batches)
        if on_several
        else model.predict(images[:19], **batches)
    )
    return [*np.ravel(numbers), *np.ravel(logits)]


def results():
    """Differences of each case, and of training and evaluating a model."""
    found: dict[str, Any] = {name: compared(*case) for name, case in CASES.items()}
    expected = fitted(False)
    with distribution.auto("vit_s16", **FITTED, expert_parallel=2).scope():
        actual = fitted(True)
    found["fit"] = float(np.abs(np.subtract(actual, expected)).max())
    return found


if __name__ == "__main__":
    print(results())
