"""Costs of whole models as XLA compiles them: nothing runs, and no weight is made.

    python tools/benchmark/compiled_cost.py --presets vmoe_b16 vit_b16
    PYTHONPATH=vmoe:vision_transformer python tools/benchmark/compiled_cost.py

On JAX: operations, bytes that all instructions read and write, and memory beside
arguments and results, of a forward pass and of a loss with its gradients. With
google-research/vmoe and vision_transformer on the path, and Flax, the official model
of the same sizes is compiled too, with each of its dispatchers. XLA counts a loop's
body once, so that inference has the capacity of training here: a model without a
capacity is loops.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import keras
from jax import numpy as jnp
from row import peer
from runner import Report, run

from keras_moe.models import from_preset
from keras_moe.ops._initializers import skip_init

GIGA = 10**9
MIB = 2**20
NUM_CLASSES = 1000
OFFICIAL = "vmoe.nn.vit_moe"
PASSES = ("forward", "gradients")
# The official dispatchers; the released configurations have the first.
DISPATCHERS = {
    "einsum, bfloat16": {"name": "einsum", "bfloat16": True},
    "einsum": {"name": "einsum"},
    "indices": {"name": "indices"},
}


def specification(x: Any) -> jax.ShapeDtypeStruct:
    """A variable or tensor as shape and dtype."""
    return jax.ShapeDtypeStruct(
        tuple(x.shape), keras.backend.standardize_dtype(x.dtype)
    )


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean loss of both models."""
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def own_model(preset: str, num_layers: int | None) -> keras.Model:
    """The model of a preset, with weights that nobody has written."""
    overrides = {"num_layers": num_layers} if num_layers else {}
    if preset.startswith("vmoe"):
        overrides["evaluation"] = "official"
    with skip_init():
        return from_preset(
            preset,
            num_classes=NUM_CLASSES,
            multi_label=False,
            load_weights=False,
            **overrides,
        )


def own_passes(model: keras.Model) -> dict[str, tuple[Callable, tuple]]:
    """A forward pass and a loss with gradients, with all arguments but the batch."""

    def forward(images, trainable, state):
        return model.stateless_call(trainable, state, images, training=False)[0]

    def step(images, labels, trainable, state):
        def loss(trainable):
            logits, new_state, losses = model.stateless_call(
                trainable, state, images, training=True, return_losses=True
            )
            return cross_entropy(logits, labels) + sum(losses), new_state

        return jax.value_and_grad(loss, has_aux=True)(trainable)

    groups = (model.trainable_variables, model.non_trainable_variables)
    variables = tuple([specification(v) for v in group] for group in groups)
    return {"forward": (forward, variables), "gradients": (step, variables)}


def official_passes(
    model: keras.Model, dispatcher: dict[str, Any], images: jax.ShapeDtypeStruct
) -> dict[str, tuple[Callable, tuple]]:
    """The same of google-research/vmoe.

    Args:
        model: model of this library, whose sizes the official one gets.
        dispatcher: arguments of the official router's dispatcher.
        images: batch of images.
    """
    config, moe = model.backbone.get_config(), model.backbone.moe
    encoder = {name: config[name] for name in ("num_layers", "mlp_dim", "num_heads")}
    if moe is not None:
        layers = (int(name.removeprefix("block_")) for name in model.backbone.routing)
        encoder["moe"] = {
            "layers": tuple(layers),
            "num_experts": moe.num_experts,
            "group_size": moe.examples_per_group * model.backbone.output.shape[1],
            "dropout_rate": moe.expert_dropout,
            "router": {
                "num_selected_experts": moe.router_arguments["num_selected_experts"],
                "importance_loss_weight": 0.005,
                "load_loss_weight": 0.005,
                "dispatcher": {
                    "capacity_factor": moe.router_arguments["capacity_factor"],
                    "batch_priority": False,
                    **dispatcher,
                },
            },
        }

    def official(deterministic):
        return peer(OFFICIAL).VisionTransformerMoe(
            num_classes=NUM_CLASSES,
            patch_size=(config["patch_size"],) * 2,
            hidden_size=config["hidden_dim"],
            representation_size=model.get_config()["representation_dim"],
            encoder=encoder,
            deterministic=deterministic,
        )

    def forward(images, weights):
        return official(True).apply(weights, images)[0]

    def step(images, labels, weights, key):
        gating, dropout = jax.random.split(key)

        def loss(weights):
            logits, metrics = official(False).apply(
                weights, images, rngs={"gating": gating, "dropout": dropout}
            )
            auxiliary = jnp.mean(jnp.asarray(metrics["auxiliary_loss"]))
            return cross_entropy(logits, labels) + auxiliary

        return jax.value_and_grad(loss)(weights)

    key = jax.eval_shape(lambda: jax.random.key(0))
    weights = jax.eval_shape(official(True).init, key, images)
    return {"forward": (forward, (weights,)), "gradients": (step, (weights, key))}


def cost(function: Callable, arguments: tuple) -> dict[str, float]:
    """The compiler's account of a function of abstract arguments."""
    start = time.process_time()
    compiled = jax.jit(function).lower(*arguments).compile()
    seconds = time.process_time() - start
    counts, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return {
        "GFLOP": counts["flops"] / GIGA,
        "GB": counts["bytes accessed"] / GIGA,
        "temporary MiB": memory.temp_size_in_bytes / MIB,
        "arguments MiB": memory.argument_size_in_bytes / MIB,
        "compilation CPU s": seconds,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--presets", nargs="+", default=["vit_b16", "vmoe_b16"])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--layers", type=int, help="blocks; the preset's by default")
    parser.add_argument(
        "--dispatchers", nargs="*", choices=DISPATCHERS, default=list(DISPATCHERS)
    )
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)


def measure(args: argparse.Namespace, report: Report) -> None:
    for preset in args.presets:
        model = own_model(preset, args.layers)
        batch = (
            specification(keras.KerasTensor((args.batch_size, *model.input_shape[1:]))),
            jax.ShapeDtypeStruct((args.batch_size,), "int32"),
        )
        candidates = {"keras_moe": own_passes(model)}
        dispatchers = args.dispatchers if peer(OFFICIAL) else ()
        if model.backbone.moe is None:
            # A dense model has none.
            dispatchers = dispatchers[:1]
        for name in dispatchers:
            candidates[f"vmoe, {name}"] = official_passes(
                model, DISPATCHERS[name], batch[0]
            )
        rows = []
        for work in args.passes:
            inputs = batch[: 1 + (work == "gradients")]
            for name, passes in candidates.items():
                function, arguments = passes[work]
                costs = cost(function, (*inputs, *arguments))
                rows.append({"model": name, "pass": work, **costs})
        formats = dict.fromkeys(rows[0], ".1f") | {"model": "", "pass": ""}
        layers = model.backbone.get_config()["num_layers"]
        title = f"{preset}, {layers} blocks, batch {args.batch_size}"
        report.table(title, rows, formats | {"GB": ".2f"})


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=0)
