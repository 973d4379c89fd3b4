"""A contrastive loss in chunks over the whole one: value and all gradients.

    KERAS_BACKEND=jax python tools/benchmark/contrastive.py

On JAX also the peak of temporary memory, from the compiler's own account.
"""

import argparse

import keras
import numpy as np
from gradients import forward_backward
from keras import ops
from runner import Report, run

from keras_moe.losses import sigmoid_contrastive_loss, softmax_contrastive_loss

MIB = 2**20


class PairLoss(keras.layers.Layer):
    """The loss of embeddings (2, B, D), with SigLIP's temperature and bias."""

    def __init__(self, loss: str, chunk_size: int | None):
        super().__init__()
        self.loss = loss
        self.chunk_size = chunk_size

    def build(self, shape):
        self.log_scale = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(np.log(10.0))
        )
        self.bias = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(-10.0)
        )

    def call(self, embeddings, training=None):
        images, texts = embeddings[0], embeddings[1]
        scale = ops.exp(self.log_scale)
        if self.loss == "softmax":
            return softmax_contrastive_loss(
                images, texts, scale, chunk_size=self.chunk_size
            )
        return sigmoid_contrastive_loss(
            images, texts, scale, self.bias, chunk_size=self.chunk_size
        )


def temporary_mib(layer: PairLoss, embeddings: np.ndarray) -> float:
    """The compiled step's temporary memory, on JAX."""
    import jax

    def loss(weights, embeddings):
        return layer.stateless_call(weights, [], embeddings)[0]

    weights = [v.value for v in layer.trainable_variables]
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    compiled = step.lower(weights, embeddings).compile()
    return compiled.memory_analysis().temp_size_in_bytes / MIB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, nargs="+", default=[8192])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--chunk", type=int, nargs="+", default=[1024])
    parser.add_argument("--loss", choices=("softmax", "sigmoid"), default="sigmoid")


def measure(args: argparse.Namespace, report: Report) -> None:
    generator = np.random.default_rng(0)
    for batch in args.batch:
        shape = (2, batch, args.dim)
        embeddings = generator.normal(size=shape).astype("float32")
        layers = {
            "whole": PairLoss(args.loss, None),
            **{f"chunks of {size}": PairLoss(args.loss, size) for size in args.chunk},
        }
        for layer in layers.values():
            layer.build(shape)
        timed = {
            name: forward_backward(layer, embeddings, np.float32(1.0))
            for name, layer in layers.items()
        }
        title = f"{args.loss} loss of {batch} pairs, D={args.dim}"
        report.compare(title, timed, "whole")
        if keras.backend.backend() == "jax":
            rows = [
                {"candidate": name, "temporary MiB": temporary_mib(layer, embeddings)}
                for name, layer in layers.items()
            ]
            report.table(title, rows, {"temporary MiB": ".1f"})


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=5)
