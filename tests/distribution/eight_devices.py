"""Trains one step of small models on 8 virtual devices, and prints what it saw.

A process of its own: XLA counts its devices when it starts. Arguments: a folder for
XLA's dumps, and cases as JSON: `[[model, layout], ...]` to train, and
`[[model, layout, images], ...]` to evaluate.
"""

import json
import math
import os
import re
import sys
from pathlib import Path

from tests.xla_flags import quick

DUMPS = Path(sys.argv[1])
os.environ.update(
    KERAS_BACKEND="jax",
    JAX_PLATFORMS="cpu",
    XLA_FLAGS=quick(
        xla_force_host_platform_device_count=8,
        xla_dump_to=DUMPS,
        xla_dump_hlo_as_text="true",
        xla_dump_hlo_module_re=".*(train_step|call).*",
    ),
)

import keras  # noqa: E402
import numpy as np  # noqa: E402

from keras_moe import data, distribution, models  # noqa: E402
from keras_moe._backends import jax_compilation  # noqa: E402
from tests.distribution import losses_on_devices, rows_on_devices  # noqa: E402
from tests.small_models import ONE_BLOCK, SMALL  # noqa: E402

# To compile for other devices hides XLA's flags, and not from these devices.
with jax_compilation.alone():
    keras.ops.zeros(1)

VIT = {**SMALL, **ONE_BLOCK, "image_shape": (16, 16, 3), "patch_size": 8, "seed": 0}
VIT |= {"num_heads": 8, "num_experts": 8, "examples_per_group": 1, "class_token": False}
MIXER = {k: x for k, x in VIT.items() if k not in ("num_heads", "class_token")}
TEXT = {"vocabulary_size": 20, "max_length": 6}
OF_BLOCKS = ("hidden_dim", "num_layers", "mlp_dim", "num_heads", "moe_layers")
EXPERTS = {"num_experts": 8, "num_selected_experts": 2, "examples_per_group": 1}
# Losses are averages over the whole batch: no threshold of an entropy is in the way.
LOSSES = {"load_balance": 0.01, "router_z": 1e-4}
PAIRS = {
    "clip": {
        "image": {"image_shape": (16, 16, 3), "patch_size": 8},
        "text": TEXT,
        "projection_dim": 4,
        **{name: VIT[name] for name in OF_BLOCKS},
        **EXPERTS,
        "seed": 0,
    },
    "limoe": {
        **{name: VIT[name] for name in (*OF_BLOCKS, "image_shape", "patch_size")},
        **TEXT,
        "projection_dim": 4,
        **EXPERTS,
        "auxiliary_losses": LOSSES,
        "noise_std": 0.0,
        "seed": 0,
    },
}
MODELS = {
    **PAIRS,
    "token choice": {**VIT, "num_layers": 2, "moe_layers": "last_1"},
    "dropless": {**VIT, "dropless": True},
    "whole batch": {**VIT, "examples_per_group": None},
    "expert choice, rematerialized": {
        **VIT,
        "router": "softmax_expert_choice",
        "rematerialize": True,
    },
    "soft": {**VIT, "router": "soft"},
    "einsum": {**VIT, "dispatcher": "einsum"},
    "moe++": {**VIT, "zero_experts": 1, "copy_experts": 1, "constant_experts": 1},
    "mumoe": {k: x for k, x in VIT.items() if k != "examples_per_group"}
    | {"router": "mumoe"},
    "mixer": {**MIXER, "token_mlp_dim": 8, "num_layers": 2, "moe_layers": "last_1"},
    "capacity at inference": {
        **VIT,
        "examples_per_group": 2,
        "eval_capacity_factor": 0.5,
    },
    # Its experts are larger than what Keras makes on one device.
    "large": {
        **VIT,
        "hidden_dim": 256,
        "expert_mlp_dim": 4096,
        "shared_expert_initialization": False,
    },
}
LAYOUTS = {
    "data": {"expert_parallel": 1},
    "experts on the batch": {"expert_parallel": "batch"},
    "experts on their own": {"expert_parallel": 2},
    "model": {"expert_parallel": 1, "model_parallel": 8},
    "model and data": {"expert_parallel": 1, "model_parallel": 2},
    "model and experts": {"expert_parallel": "batch", "model_parallel": 2},
    "all three": {"expert_parallel": 2, "model_parallel": 2},
}
IMAGES = np.random.default_rng(1).normal(size=(16, 16, 16, 3)).astype("float32")
LABELS = np.arange(16) % 3
IDS = np.random.default_rng(2).integers(1, 20, (16, 6))
IDS[::3, 4:] = 0


def preset_of(model):
    if model in PAIRS:
        return {"clip": "clip_up_b32", "limoe": "limoe_s32"}[model]
    return "mixer_s16" if "token_mlp_dim" in MODELS[model] else "vit_s16"


def make(model):
    """The model as a user makes it."""
    keras.utils.set_random_seed(0)
    task = {"task": "contrastive"} if model in PAIRS else {"num_classes": 3}
    return models.from_preset(preset_of(model), **task, **MODELS[model])


def train_step(classifier):
    """The loss of one step, and what it adds to each weight."""
    generator = np.random.default_rng(0)
    for weight in classifier.trainable_weights:
        weight.assign(generator.normal(size=weight.shape) * 0.3)
    inputs, labels = IMAGES, LABELS
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if isinstance(classifier, models.ContrastiveModel):
        inputs = {"images": IMAGES, "token_ids": IDS, "padding_mask": IDS != 0}
        labels, loss = None, "auto"
    classifier.compile(keras.optimizers.SGD(1.0, momentum=0.9), loss)
    before = [np.asarray(weight.value) for weight in classifier.trainable_weights]
    loss = float(np.ravel(classifier.train_on_batch(inputs, labels))[0])
    after = [np.asarray(weight.value) for weight in classifier.trainable_weights]
    return loss, [new - old for new, old in zip(after, before)]


def shards(variable):
    """The shapes of a variable's parts, and the devices that have them."""
    parts = variable.value.addressable_shards
    (shape,) = {part.data.shape for part in parts}
    facts = {"path": variable.path, "shape": list(variable.shape)}
    devices = len({part.device for part in parts})
    return {**facts, "shard": list(shape), "devices": devices}


def compiled(name):
    """The newest program of that name."""
    dumps = DUMPS.glob(f"*{name}*after_optimizations.txt")
    return max(dumps, key=lambda path: path.stat().st_mtime).read_text()


def collectives(program):
    """The shapes of the operands of each kind of collective operation."""
    shapes = {}
    pattern = r"= (.*?) (all-to-all|all-gather|reduce-scatter)(?:-start)?\("
    for result, kind in re.findall(pattern, program):
        shapes.setdefault(kind, []).extend(re.findall(r"\w+\[[\d,]*\]", result))
    return shapes


def for_evaluation(model):
    """The classifier with weights to evaluate."""
    classifier = make(model)
    generator = np.random.default_rng(0)
    for weight in classifier.weights:
        if "seed_generator" not in weight.path:
            weight.assign(generator.normal(size=weight.shape) * 0.3)
    if model in PAIRS:
        classifier.compile(metrics=[models.ContrastiveAccuracy()])
        return classifier
    classifier.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=None,
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return classifier


def evaluation(classifier, images, labels, on_several):
    """Loss, metrics and logits, of batches of 16 of which the last is not full."""
    if on_several:
        batches = data.padded(images, labels, batch_size=16, model=classifier)
        outputs = data.predictions(classifier, images, batch_size=16, verbose=0)
        metrics = classifier.evaluate(batches, verbose=0)
    else:
        metrics = classifier.evaluate(images, labels, batch_size=16, verbose=0)
        outputs = classifier.predict(images, batch_size=16, verbose=0)
    if isinstance(outputs, dict):
        outputs = np.concatenate(list(outputs.values()), axis=-1)
    return metrics, outputs


# Models that evaluate are compiled once, and serve several numbers of images.
EVALUATED = {}


def evaluated(model, layout, count):
    """How far evaluation of `count` images is from that on one device."""
    images = np.concatenate([IMAGES, IMAGES[:, ::-1]])[:count]
    labels = np.arange(count) % 3
    if model in PAIRS:
        ids = np.concatenate([IDS, IDS[:, ::-1]])[:count]
        images = {"images": images, "token_ids": ids, "padding_mask": ids != 0}
        labels = {"image_ids": np.arange(count)}
    overrides = {k: v for k, v in MODELS[model].items() if k != "seed"}
    layout_of_model = distribution.auto(
        preset_of(model), **LAYOUTS[layout], **overrides
    )
    if model not in EVALUATED:
        EVALUATED[model] = for_evaluation(model)
    expected, expected_logits = evaluation(EVALUATED[model], images, labels, False)
    with layout_of_model.scope():
        if (model, layout) not in EVALUATED:
            EVALUATED[model, layout] = for_evaluation(model)
        distributed = EVALUATED[model, layout]
        figures, logits = evaluation(distributed, images, labels, True)
    return {
        "figures": [abs(a - b) for a, b in zip(figures, expected)],
        "logits": np.abs(logits - expected_logits).max(axis=-1).tolist(),
    }


def arithmetic(model, arguments, overrides):
    """The costs on paper, or the reason why there are none."""
    if model not in PAIRS:
        overrides = {**overrides, "num_classes": 3}
    try:
        costs = distribution.costs(
            preset_of(model), 8, len(IMAGES), optimizer="momentum", dtype="float32",
            **arguments, **overrides,
        )  # fmt: skip
    except ValueError as error:
        return str(error)
    return {**costs.memory, **costs.traffic}


SINGLE = {}


def run(model, layout):
    arguments = dict(LAYOUTS[layout])
    overrides = {k: v for k, v in MODELS[model].items() if k != "seed"}
    if overrides.get("router") == "mumoe":
        arguments.pop("expert_parallel")
    layout_of_model = distribution.auto(
        preset_of(model), batch_size=len(IMAGES), **arguments, **overrides
    )
    if model == "large":
        with layout_of_model.scope():
            classifier = make(model)
        program = compiled("jit___call")
        return {
            "weights": [shards(weight) for weight in classifier.weights],
            "made": sorted(set(re.findall(r"f32\[[\d,]+\]", program))),
        }
    if model not in SINGLE:
        SINGLE[model] = train_step(make(model))
    with layout_of_model.scope():
        classifier = make(model)
        weights = [shards(weight) for weight in classifier.weights]
        loss, changes = train_step(classifier)
    program = compiled("train_step")
    expected_loss, expected = SINGLE[model]
    slots = classifier.optimizer.variables
    slots = [shards(slot) for slot in slots if "momentum" in slot.path]
    return {
        "costs": arithmetic(model, arguments, overrides),
        "loss": abs(loss - expected_loss) / max(1, abs(expected_loss)),
        "gradients": max(
            float(np.abs(a - b).max() / max(1, np.abs(b).max()))
            for a, b in zip(changes, expected)
        ),
        "moved": sum(bool(np.any(b)) for b in expected),
        "weights": weights,
        "slots": slots,
        "bytes": sum(4 * math.prod(weight["shard"]) for weight in weights),
        "collectives": collectives(program),
    }


if __name__ == "__main__":
    cases, evaluations = map(json.loads, sys.argv[2:])
    results = [[*case, run(*case)] for case in cases]
    results += [[*case, evaluated(*case)] for case in evaluations]
    results.append(["losses", losses_on_devices.results()])
    results.append(["rows", rows_on_devices.results()])
    print("RESULTS " + json.dumps(results))
