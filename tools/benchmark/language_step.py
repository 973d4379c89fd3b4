"""MoE++ language models: a step, the memory of the logits, and decoding.

    KERAS_BACKEND=jax python tools/benchmark/language_step.py

The step is that of two blocks of MoE++'s 0.6B model, over its vanilla twin's, with
plain gradient descent, which costs next to nothing. Its routers are new, so that tokens
choose evenly among all types of experts. The memory is that of the log-likelihoods and
their gradients, by JAX's compiler, over that of logits that exist whole. Decoding is
greedy, by a vanilla mixture of four blocks, beside KerasHub's Mixtral of its sizes.
"""

import argparse
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from runner import Report, run

from keras_moe import models
from keras_moe.losses.language import token_log_likelihoods

PRESETS = {"MoE++": "moepp_lm_0.6b", "vanilla MoE": "moe_lm_0.6b"}
MIB = 2**20


def steps(
    batch_size: int = 4,
    length: int = 256,
    num_layers: int = 2,
    vocabulary_size: int = 4096,
) -> dict[str, Callable[[], Any]]:
    """Training steps of MoE++ and of its vanilla twin."""
    draw, candidates = np.random.default_rng(0), {}
    ids = draw.integers(4, vocabulary_size, (batch_size, length), "int32")
    batch = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    for name, preset in PRESETS.items():
        model = models.from_preset(
            preset,
            load_weights=False,
            num_layers=num_layers,
            max_length=length,
            vocabulary_size=vocabulary_size,
        )
        model.compile(keras.optimizers.SGD(1e-3))
        candidates[name] = lambda model=model: model.train_on_batch(batch)
    return candidates


def logits_memory(
    length: int = 2048, dim: int = 768, vocabulary_size: int = 65_536
) -> dict[str, float]:
    """MiB beyond inputs and results, with logits in chunks and whole."""
    import jax

    arrays = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((1, length, dim), "float32"),
            ((dim, vocabulary_size), "float32"),
            ((1, length), "int32"),
        )
    ]

    def temporary(chunk_size):
        def loss(tokens, kernel, targets):
            return -token_log_likelihoods(tokens, kernel, targets, chunk_size).mean()

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        memory = step.lower(*arrays).compile().memory_analysis()
        return memory.temp_size_in_bytes / MIB

    return {"in chunks": temporary(None), "whole": temporary(length)}


def decoding(
    length: int = 64, prompt: int = 8, compiled: bool = False
) -> dict[str, Callable[[], Any]]:
    """Continuations of one prompt, here (compiled?) and by KerasHub's Mixtral."""
    import keras_hub

    sizes = {"vocabulary_size": 4096, "num_layers": 4, "hidden_dim": 256}
    ours = models.from_preset(
        PRESETS["vanilla MoE"],
        task="causal_lm",
        load_weights=False,
        max_length=length,
        num_heads=8,
        mlp_dim=512,
        **sizes,
    )
    mixtral = keras_hub.models.MixtralBackbone(
        intermediate_dim=512,
        num_query_heads=8,
        num_key_value_heads=8,
        num_experts=8,
        top_k=2,
        **sizes,
    )
    ids = np.random.default_rng(0).integers(4, 4096, (1, length), "int32")
    text = {"token_ids": ids, "padding_mask": np.arange(length)[None] < prompt}
    hub = keras_hub.models.MixtralCausalLM(mixtral, preprocessor=None)
    candidates = {}
    for name, model in (("keras_moe", ours), ("keras_hub", hub)):
        own = {"jit_compile": True} if compiled and model is ours else {}
        model.compile(sampler="greedy", **own)
        candidates[name] = lambda model=model: model.generate(text, stop_token_ids=None)
    return candidates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)


def measure(args: argparse.Namespace, report: Report) -> None:
    report.compare(
        f"{args.batch_size} x {args.length} tokens: training step",
        steps(args.batch_size, args.length),
        "MoE++",
    )


if __name__ == "__main__":
    run(__doc__, measure, add_arguments)
