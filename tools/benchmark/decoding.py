"""Decoding by KerasHub's Mixtral, and by the same model with our experts.

    KERAS_BACKEND=torch python tools/benchmark/decoding.py --batches 1 16

A run generates 32 tokens greedily after prompts of 16; it passes over these, too.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import argparse
from collections.abc import Callable, Sequence

import keras
import keras_hub
import numpy as np
from runner import Report, run

from keras_moe.models import replace_moe

PROMPT, GENERATED = 16, 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--mlp-dim", type=int, default=1792)
    parser.add_argument("--num-experts", type=int, default=8)
    parser.add_argument("--vocabulary-size", type=int, default=8192)


def mixtral(
    dim: int = 512,
    mlp_dim: int = 1792,
    num_layers: int = 4,
    num_experts: int = 8,
    vocabulary_size: int = 8192,
) -> keras_hub.models.CausalLM:
    """KerasHub's model with random weights, always the same."""
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.MixtralBackbone(
        vocabulary_size=vocabulary_size,
        num_layers=num_layers,
        hidden_dim=dim,
        intermediate_dim=mlp_dim,
        num_query_heads=8,
        num_key_value_heads=4,
        num_experts=num_experts,
        top_k=2,
    )
    model = keras_hub.models.MixtralCausalLM(backbone=backbone, preprocessor=None)
    model.compile(sampler="greedy")
    return model


def models_and_prompts(
    batch: int, prompt: int = PROMPT, generated: int = GENERATED, **sizes: int
) -> dict[str, Callable]:
    """Generation of a batch by both models."""
    models = {"keras_hub": mixtral(**sizes), "keras_moe": replace_moe(mixtral(**sizes))}
    return {
        name: _generation(model, batch, prompt, generated)
        for name, model in models.items()
    }


def by_length(batch: int, prompts: Sequence[int], **sizes: int) -> dict[str, Callable]:
    """Generation by our model after prompts of several lengths."""
    model = replace_moe(mixtral(**sizes))
    return {
        f"after {prompt}": _generation(model, batch, prompt, GENERATED)
        for prompt in prompts
    }


def _generation(model, batch, prompt, generated):
    shape = (batch, prompt + generated)
    size = model.backbone.vocabulary_size
    ids = np.random.default_rng(0).integers(1, size, shape, "int32")
    prompts = {"token_ids": ids, "padding_mask": np.arange(shape[1]) < prompt}
    prompts["padding_mask"] = np.broadcast_to(prompts["padding_mask"], shape)
    return lambda: model.generate(prompts, stop_token_ids=None)["token_ids"]


def measure(args: argparse.Namespace, report: Report) -> None:
    for batch in args.batches:
        candidates = models_and_prompts(
            batch,
            dim=args.dim,
            mlp_dim=args.mlp_dim,
            num_layers=args.num_layers,
            num_experts=args.num_experts,
            vocabulary_size=args.vocabulary_size,
        )
        report.compare(
            f"decoding, batch {batch}",
            candidates,
            "keras_moe",
            examples=batch * GENERATED,
        )


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=7)
