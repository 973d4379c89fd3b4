"""muMoE's layers and blocks over the dense layers that they replace.

    KERAS_BACKEND=jax python tools/benchmark/mumoe_layer.py

Forward and backward pass with gating, batch statistics and record, at as many
parameters as the dense side has; entmax over softmax; the arrays that the forward pass
keeps for the backward pass; and the peak of a layer with very many experts. Weights and
the caller's arrays do not count as kept, but the inputs count once on either side: a
dense layer keeps nothing else. TensorFlow does not tell what its gradient's program
keeps, so bytes are those of JAX and PyTorch only.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from gradients import forward_backward
from row import peer
from runner import Report, rows_of_process, run

from keras_moe.layers import (
    MLP,
    Block,
    MoEBlock,
    MuMoE,
    MuMoEBlock,
    TokenMLP,
    TokenMuMoE,
)
from keras_moe.layers.activations import entmax15
from keras_moe.ops import entmax
from tools.benchmark.execution import wait

MIB = 2**20
PARTS = ("layers", "blocks", "entmax", "peak")
KINDS = ("cp", "tr")
# Ranks of the presets mumoe_mixer_s16_*.
MIXER_RANKS = {"cp": 0.75, "tr": (4, 4, 0.19)}


class Activation(keras.layers.Layer):
    """A function over the last axis; `training` is taken, and no matter."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x, training=None):
        return self.function(x)


def randomised(layer: keras.layers.Layer, shape: tuple) -> keras.layers.Layer:
    """The layer, built; its gate, which begins at zero, tells its tokens apart."""
    layer.build(shape)
    for weight in layer.weights:
        if "gate/kernel" in weight.path:
            weight.assign(keras.random.normal(weight.shape, stddev=0.05, seed=0))
    return layer


def dense_and_layers(counts: list[int], units: int, shape: tuple) -> dict:
    layers = {"dense": keras.layers.Dense(units)}
    for count in counts:
        for kind in KINDS:
            layers[f"{kind}, N={count}"] = MuMoE(units, count, kind)
    return {name: randomised(layer, shape) for name, layer in layers.items()}


def dense_and_blocks(count: int, mlp_dim: int, shape: tuple) -> dict:
    layers = {"MLP": MLP(mlp_dim, activation="gelu")}
    for kind in KINDS:
        layers[f"{kind}, N={count}"] = MuMoEBlock(mlp_dim, None, count, kind)
    return {name: randomised(layer, shape) for name, layer in layers.items()}


def dense_and_mixer_blocks(count: int, sizes: tuple[int, int], shape: tuple) -> dict:
    """Whole blocks of a Mixer: tokens and channels, with residuals and norms."""
    token_mlp_dim, mlp_dim = sizes
    layers = {
        "Mixer": Block(
            TokenMLP(token_mlp_dim, activation="gelu"), MLP(mlp_dim, activation="gelu")
        )
    }
    for kind in KINDS:
        tokens, channels = (
            MuMoEBlock(size, None, count, kind, rank=MIXER_RANKS[kind])
            for size in sizes
        )
        layers[f"{kind}, N={count}"] = MoEBlock(TokenMuMoE(tokens), channels)
    return {name: randomised(layer, shape) for name, layer in layers.items()}


def kept_bytes(layer: keras.layers.Layer, inputs: np.ndarray) -> float:
    """The size of what the forward pass keeps, the inputs included; NaN if unknown."""
    kept = {"jax": _kept_on_jax, "torch": _kept_on_torch}.get(keras.backend.backend())
    if kept is None:
        return np.nan
    arrays, weights, x = kept(layer, inputs)
    sizes = {pointer: size for pointer, size in arrays if pointer not in weights}
    return sum(sizes.values()) + inputs.nbytes * (x not in sizes)


def _kept_on_jax(layer, inputs):
    import jax

    state = [v.value for v in layer.non_trainable_variables]
    trainable = [v.value for v in layer.trainable_variables]
    x = jax.numpy.asarray(inputs)

    def outputs(trainable, x):
        outputs, state_after = layer.stateless_call(trainable, state, x, training=True)
        return outputs[0] if isinstance(outputs, tuple) else outputs, state_after

    # The function that `vjp` returns carries what it needs as the leaves of a tree.
    _, backward, _ = jax.vjp(outputs, trainable, x, has_aux=True)
    kept = jax.tree.leaves(backward)
    arrays = [(a.unsafe_buffer_pointer(), a.nbytes) for a in kept]
    weights = {v.unsafe_buffer_pointer() for v in (*trainable, *state)}
    return arrays, weights, x.unsafe_buffer_pointer()


def _kept_on_torch(layer, inputs):
    import torch

    arrays = []

    def keep(tensor):
        storage = tensor.untyped_storage()
        arrays.append((storage.data_ptr(), storage.nbytes()))
        return tensor

    x = torch.tensor(inputs, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = layer(x, training=True)
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    # A gradient written by hand keeps what its function closes over, besides.
    nodes, seen = [outputs.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        function = getattr(node, "grad_fn", None)
        function = getattr(node, "gradient", function)
        for cell in getattr(function, "__closure__", None) or ():
            if isinstance(cell.cell_contents, torch.Tensor):
                keep(cell.cell_contents)
    weights = {v.value.untyped_storage().data_ptr() for v in layer.variables}
    return arrays, weights, x.untyped_storage().data_ptr()


def compare(title: str, layers: dict, shape: tuple, report: Report) -> None:
    """Tables of the times and the bytes of layers, over the first of them."""
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=shape).astype("float32")
    units = layers["dense"].units if "dense" in layers else shape[-1]
    cotangent = generator.normal(size=(*shape[:-1], units)).astype("float32")
    steps = {
        name: forward_backward(layer, inputs, cotangent)
        for name, layer in layers.items()
    }
    baseline = next(iter(layers))
    report.compare(title, steps, baseline)
    kept = {name: kept_bytes(layer, inputs) for name, layer in layers.items()}
    whole = kept[baseline] + cotangent.nbytes
    rows = [
        {
            "candidate": name,
            "MiB": size / MIB,
            f"over {baseline}": size / kept[baseline],
            "with outputs": (size + cotangent.nbytes) / whole,
        }
        for name, size in kept.items()
    ]
    formats = {"MiB": ".1f", f"over {baseline}": ".3f", "with outputs": ".3f"}
    report.table(f"{title}: kept for the backward pass", rows, formats)


def compare_entmax(rows: int, count: int, report: Report) -> None:
    steps = entmax_and_softmax(rows, count)
    report.compare(f"({rows}, {count}), forward and backward", steps, "softmax")


def entmax_and_softmax(
    rows: int, count: int, alpha: float = 1.5
) -> dict[str, Callable[[], Any]]:
    """Forward and backward passes of entmax, softmax and the entmax package's.

    Args:
        rows: number of distributions.
        count: length of each.
        alpha: alpha; of another than 1.5 entmax is beside 1.5-entmax alone.
    """
    generator = np.random.default_rng(0)
    logits, cotangent = (
        generator.normal(size=(rows, count)).astype("float32") for _ in range(2)
    )
    functions = {"softmax": keras.ops.softmax, "entmax": entmax15}
    if alpha != 1.5:
        functions = {"1.5-entmax": entmax15, "entmax": lambda x: entmax(x, alpha)}
    elif keras.backend.backend() == "torch" and (package := peer("entmax")):
        functions["entmax package"] = package.entmax15
    steps = {}
    for name, function in functions.items():
        layer = Activation(function)
        layer.build(logits.shape)
        steps[name] = forward_backward(layer, logits, cotangent)
    return steps


def layer_and_dense(
    kind: str, count: int, kept: bool = False, shape: tuple = (8, 196, 768)
) -> dict[str, Any]:
    """A muMoE layer and the dense layer that it replaces.

    Args:
        kind: factorisation of the layer.
        count: number of experts.
        kept: whether the values are MiB kept for the backward pass, and not functions.
        shape: shape of the inputs, (images, tokens, D).
    """
    inputs, cotangent = (
        np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    )
    layers = dense_and_layers([count], shape[-1], shape)
    layers = {"dense": layers["dense"], kind: layers[f"{kind}, N={count}"]}
    if kept:
        return {name: kept_bytes(x, inputs) / MIB for name, x in layers.items()}
    return {
        name: forward_backward(layer, inputs, cotangent)
        for name, layer in layers.items()
    }


def peak_mib() -> float:
    """The peak of this program; Linux's `ru_maxrss` begins with its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


def measure_peak(tokens: int, dim: int, count: int, rank: int) -> list[dict]:
    """How far a forward and backward pass raises this process's peak memory."""
    shape = (1, tokens, dim)
    layer = randomised(MuMoE(dim, count, rank=rank), shape)
    generator = np.random.default_rng(0)
    inputs, cotangent = (
        generator.normal(size=shape).astype("float32") for _ in range(2)
    )
    step = forward_backward(layer, inputs, cotangent)
    before = peak_mib()
    wait(step())
    added = peak_mib() - before
    return [{"N": count, "rank": rank, "tokens": tokens, "D": dim, "MiB": added}]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=196, help="of one image")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--experts", type=int, nargs="+", default=[64, 128, 512])
    parser.add_argument("--block-dim", type=int, default=512)
    parser.add_argument("--mlp-dim", type=int, default=2048)
    parser.add_argument("--token-mlp-dim", type=int, default=256)
    parser.add_argument("--block-experts", type=int, default=64)
    parser.add_argument("--entmax-experts", type=int, default=512)
    parser.add_argument("--peak-experts", type=int, default=16384)
    parser.add_argument("--peak-rank", type=int, default=64)


def measure(args: argparse.Namespace, report: Report) -> None:
    rows = args.images * args.tokens
    if "layers" in args.parts:
        shape = (args.images, args.tokens, args.dim)
        layers = dense_and_layers(args.experts, args.dim, shape)
        compare(f"{rows} tokens, {args.dim} units", layers, shape, report)
    if "blocks" in args.parts:
        # The channel block sees tokens, the token block channels.
        for name, shape, mlp_dim in (
            ("tokens", (args.images, args.tokens, args.block_dim), args.mlp_dim),
            (
                "channels",
                (args.images, args.block_dim, args.tokens),
                args.token_mlp_dim,
            ),
        ):
            blocks = dense_and_blocks(args.block_experts, mlp_dim, shape)
            title = f"{shape[0] * shape[1]} {name}, {shape[-1]} -> {mlp_dim}"
            compare(f"{title} -> {shape[-1]}", blocks, shape, report)
        shape = (args.images, args.tokens, args.block_dim)
        sizes = (args.token_mlp_dim, args.mlp_dim)
        blocks = dense_and_mixer_blocks(args.block_experts, sizes, shape)
        compare("a block of a Mixer", blocks, shape, report)
    if "entmax" in args.parts:
        compare_entmax(rows, args.entmax_experts, report)
    if "peak" in args.parts:
        if list(args.parts) == ["peak"]:
            peak = measure_peak(rows, args.dim, args.peak_experts, args.peak_rank)
        else:
            # A process of its own, whose peak nothing else has raised.
            peak = rows_of_process(*sys.argv[1:], "--parts", "peak")
        title = "added to the peak of the process, forward and backward"
        report.table(title, peak, {"MiB": ".0f"})


if __name__ == "__main__":
    run(__doc__, measure, add_arguments, rounds=15)
