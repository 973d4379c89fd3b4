"""The work of the benchmark of one GPU: training steps, kernels, neighbours in a batch.

Each function takes `small`, which makes everything tiny, and otherwise the same. Models
compute in mixed bfloat16, and steps are those of plain gradient descent, whose cost is
next to nothing.
"""

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from training_step import hand_written_step

from keras_moe import models
from keras_moe.ops import _nn, _rows, entmax, expert_capacity, grouped
from keras_moe.ops.entmax import entmax_gradient_reference, solve_reference

CLASSES = 1000
SMALL = {
    "image_shape": (32, 32, 3),
    "num_layers": 2,
    "hidden_dim": 32,
    "mlp_dim": 64,
    "num_heads": 2,
}
# Forms of a preset that are this library's own.
OWN = {"ours": {}, "ours, dropless": {"dropless": True}}
# The largest differences, as shares of the largest number. GPUs multiply float32 in
# TF32, which has ten bits; bfloat16 has eight, and an MLP rounds between its layers.
TOLERANCES = {
    ("cpu", "float32"): 1e-5,
    ("cpu", "bfloat16"): 2e-2,
    ("gpu", "float32"): 2e-3,
    ("gpu", "bfloat16"): 2e-2,
}


class Step(NamedTuple):
    """A function to time.

    Attributes:
        function: the work, begun; returns what it computes.
        tokens: tokens that it sees.
        flops: FLOPs of the model, as `describe` counts them, without what a form pads
            or repeats; None if it was not counted.
    """

    function: Callable[[], Any]
    tokens: int
    flops: float | None


def device() -> str:
    """The name of the device on which Keras computes; `"cpu"` without a GPU."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.devices()[0].device_kind
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "cpu"


def overrides_of(preset: str, small: bool) -> dict[str, Any]:
    """What makes a preset small."""
    if not small:
        return {}
    experts: dict[str, Any] = {} if preset.startswith("vit") else {"num_experts": 4}
    if preset.startswith("soft"):
        experts["moe_layers"] = [1]
    return {**SMALL, **experts}


# Training steps.


def step(preset: str, form: str, batch_size: int, small: bool) -> Step:
    """A training step of a preset, here or in another's code.

    Args:
        preset: name of the preset.
        form: name among `OWN` or `OTHERS`.
        batch_size: number of images.
        small: whether everything is tiny.
    """
    overrides = {"num_classes": CLASSES, "multi_label": False}
    overrides |= overrides_of(preset, small)
    batch_size = min(batch_size, 8) if small else batch_size
    plan: Any = models.abstract(preset, **overrides)
    generator = np.random.default_rng(0)
    shape = (batch_size, *plan.backbone.image_shape)
    images = generator.normal(size=shape).astype("float32")
    labels = generator.integers(CLASSES, size=batch_size)
    if form in OWN:
        model: Any = models.from_preset(
            preset,
            dtype="mixed_bfloat16",
            load_weights=False,
            **overrides,
            **OWN[form],
        )
        optimizer = keras.optimizers.SGD(1e-3)
        function = hand_written_step(model, images, labels, optimizer)
    else:
        images, labels = map(ops.convert_to_tensor, (images, labels))
        function = OTHERS[form](plan.backbone, images, labels)
    flops = 3 * batch_size * sum(part.flops for part in plan.describe().parts)
    return Step(function, batch_size * plan.backbone.output.shape[1], flops)


def official(backbone: Any, images: Any, labels: Any) -> Callable[[], Any]:
    """The step of the official JAX code: V-MoE by einsums, or Soft MoE."""
    forms: Any = importlib.import_module("official_forms")
    config, moe = backbone.get_config(), backbone.moe
    arguments, tokens = moe.router_arguments, backbone.output.shape[1]
    mlp = functools.partial(forms.MLP, config["mlp_dim"])
    if config["class_token"]:
        group = moe.examples_per_group * tokens
        selected = arguments["num_selected_experts"]
        capacity = expert_capacity(
            group,
            moe.num_experts,
            arguments["capacity_factor"],
            selected,
            multiple_of=arguments["capacity_multiple_of"],
        )
        sizes = moe.num_experts, config["mlp_dim"], group, capacity, selected
        experts = functools.partial(forms.TokenChoice, *sizes)
    else:
        sizes = moe.num_experts, config["mlp_dim"]
        experts = functools.partial(forms.SoftMoE, *sizes)
    blocks = (f"block_{i}" for i in range(config["num_layers"]))
    encoder = forms.Encoder(
        config["patch_size"],
        config["hidden_dim"],
        config["num_heads"],
        tuple(experts if name in backbone.routing else mlp for name in blocks),
        class_token=config["class_token"],
        query_key_norm=config["query_key_norm"],
    )
    return forms.running(encoder, images, labels)


def plain_torch(backbone: Any, images: Any, labels: Any) -> Callable[[], Any]:
    """The step of a V-MoE written in plain PyTorch, with grouped matmuls."""
    import torch_forms

    model = torch_forms.GroupedVMoE(backbone.get_config(), CLASSES)
    return torch_forms.running(model, images, labels)


def timm(backbone: Any, images: Any, labels: Any) -> Callable[[], Any]:
    """The step of timm's ViT of the same size."""
    import torch_forms
    from zoo_step import import_timm

    config = backbone.get_config()
    model = import_timm().create_model(
        "vit_base_patch16_224",
        num_classes=CLASSES,
        img_size=config["image_shape"][0],
        depth=config["num_layers"],
        embed_dim=config["hidden_dim"],
        num_heads=config["num_heads"],
        mlp_ratio=config["mlp_dim"] / config["hidden_dim"],
    )
    return torch_forms.running(model, images, labels)


OTHERS = {
    "official, einsums": official,
    "official": official,
    "plain grouped_mm": plain_torch,
    "timm": timm,
}


def siglino(form: str, batch_size: int, small: bool) -> Step:
    """SigLino's forward pass in float32, here or in the form of its release."""
    from encoder_forward import siglino

    layers, size = (1, 32) if small else (6, 256)
    batch_size = 2 if small else batch_size
    candidates = siglino(layers, batch_size, size)
    name = "keras_moe" if form == "ours" else "official form"
    return Step(candidates[name], batch_size * (size // 16) ** 2, None)


# Kernels beside their references.


class Kernel(NamedTuple):
    """A kernel and its reference: functions of arrays that have gradients."""

    function: Callable[..., Any]
    reference: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]


def kernels(dtype: str, small: bool) -> list[dict[str, Any]]:
    """The largest differences of kernels from `keras.ops`, in results and gradients.

    Args:
        dtype: dtype of the kernel's arrays; the reference computes in float32.
        small: whether the arrays are small.
    """
    tolerance = TOLERANCES["cpu" if device() == "cpu" else "gpu", dtype]
    lines = []
    for name, kernel in _kernels(small).items():
        rounded = [ops.cast(ops.convert_to_tensor(x), dtype) for x in kernel.arrays]
        exact = [ops.cast(x, "float32") for x in rounded]
        results = _with_gradients(kernel.function, rounded)
        with _exact_products():
            expected = _with_gradients(kernel.reference, exact)
        forward, *gradients = (
            float(np.max(np.abs(x - y)) / np.max(np.abs(y)))
            for x, y in zip(results, expected)
        )
        backward = max(gradients)
        errors = {"forward": forward, "gradients": backward, "tolerance": tolerance}
        # Not a number is no success.
        met = forward <= tolerance and backward <= tolerance
        lines.append({"form": name, **errors, "met": met})
    return lines


def _kernels(small: bool) -> dict[str, Kernel]:
    """Kernels by name; those of PyTorch alone are left out elsewhere."""
    rows, dim, mlp_dim, experts = (48, 16, 32, 4) if small else (2048, 256, 1024, 8)
    # The second has no row, and some rows have no expert.
    share = rows // (experts + 1)
    sizes = np.full(experts, share, "int32")
    sizes[0], sizes[1] = share + share // 2, 0
    draw = np.random.default_rng(0).normal

    def array(*shape, scale=1.0):
        return draw(size=shape, scale=scale).astype("float32")

    x = array(rows, dim)
    hidden, gate = array(2, experts, dim, mlp_dim, scale=dim**-0.5)
    output = array(experts, mlp_dim, dim, scale=mlp_dim**-0.5)
    biases = array(experts, mlp_dim), array(experts, dim)
    mlp, reference = (
        functools.partial(_mlp, form, sizes)
        for form in (grouped, types.SimpleNamespace(grouped_matmul=_by_masks))
    )
    found = {
        "grouped_matmul": Kernel(
            lambda x, kernels: grouped.grouped_matmul(x, kernels, sizes),
            lambda x, kernels: _by_masks(x, kernels, sizes),
            (x, hidden),
        ),
        "grouped_mlp": Kernel(mlp, reference, (x, hidden, output, *biases)),
        "grouped_mlp, gate": Kernel(
            mlp, reference, (x, hidden, output, *biases, gate, array(experts, mlp_dim))
        ),
    }
    if keras.backend.backend() != "torch":
        return found
    heads = tuple(array(2, 5 if small else 197, 2, 16 if small else 64) for _ in "qkv")
    places = np.random.default_rng(0).permutation(2 * rows).reshape(rows, 2)
    readers = np.argsort(places.flatten()) // 2
    places, readers = (
        ops.convert_to_tensor(x.astype("int32")) for x in (places, readers)
    )
    return found | {
        "attend": Kernel(
            lambda q, k, v: _nn.attend(q, k, v, 0.25),
            lambda q, k, v: _nn.attend_reference(q, k, v, 0.25),
            heads,
        ),
        "gelu_tanh": Kernel(_nn.gelu_tanh, _nn.gelu_tanh_reference, (x,)),
        "linear": Kernel(
            _nn.linear, _nn.linear_reference, (x, hidden[0], biases[0][0])
        ),
        "entmax": Kernel(entmax, _entmax_reference, (x,)),
        "gather_rows": Kernel(
            lambda x: _rows.gather_rows(x, readers, places),
            lambda x: _rows.gather_rows_reference(x, readers, places),
            (x,),
        ),
        "combine_rows": Kernel(
            lambda x, y: _rows.combine_rows(x, ops.cast(y, "float32"), places, readers),
            lambda x, y: _rows.combine_rows_reference(x, y, places, readers),
            (array(2 * rows, dim), array(rows, 2)),
        ),
    }


def _by_masks(x, kernels, sizes):
    """`grouped_matmul`, by a matmul of all rows for every expert."""
    ends = np.cumsum(sizes)
    row, total = np.arange(x.shape[0]), 0.0
    for expert, (size, end) in enumerate(zip(sizes, ends)):
        own = ops.convert_to_tensor(((row >= end - size) & (row < end))[:, None])
        inputs = ops.where(own, x, ops.zeros_like(x))
        total = total + ops.matmul(inputs, kernels[expert])
    return total


def _mlp(form, sizes, x, hidden, output, hidden_bias, output_bias, *gate):
    """`grouped_mlp`, or its layers one after another where `form` has none."""
    activation = keras.activations.silu if gate else _nn.gelu_tanh_reference
    if hasattr(form, "grouped_mlp"):
        names = "gate_kernel", "gate_bias"
        return form.grouped_mlp(
            x,
            sizes,
            hidden,
            output,
            activation=activation,
            hidden_bias=hidden_bias,
            output_bias=output_bias,
            **dict(zip(names, gate)),
        )
    owner = np.repeat(np.arange(len(sizes)), sizes)
    own = np.arange(x.shape[0])[:, None] < len(owner)
    owner = ops.convert_to_tensor(np.pad(owner, (0, x.shape[0] - len(owner))))

    def linear(x, kernels, biases):
        outputs = form.grouped_matmul(x, kernels, sizes)
        return outputs + ops.take(biases, owner, axis=0)

    between = linear(x, hidden, hidden_bias)
    between = activation(linear(x, *gate)) * between if gate else activation(between)
    outputs = linear(between, output, output_bias)
    return ops.where(ops.convert_to_tensor(own), outputs, ops.zeros_like(outputs))


def _entmax_reference(x):
    """1.5-entmax by `keras.ops`, with the gradient that its formula has."""
    scores = ops.stop_gradient(x)
    gates, *_ = solve_reference(scores, 1.5, 10)
    gates = ops.stop_gradient(gates)
    # The product of x with the Jacobian, which is symmetric, and which stays still.
    change = entmax_gradient_reference(gates, x, 1.5)
    return gates + change - ops.stop_gradient(change)


def _with_gradients(function, arrays):
    """The result of a function, and its gradients at a fixed cotangent."""
    draw = np.random.default_rng(1).normal

    def cotangent(output):
        return ops.cast(draw(size=tuple(output.shape)), output.dtype)

    if keras.backend.backend() == "jax":
        import jax

        output, pullback = jax.vjp(jax.jit(function), *arrays)
        found = output, *pullback(cotangent(output))
    else:
        import torch

        arrays = [x.detach().requires_grad_() for x in arrays]
        output = function(*arrays)
        change: Any = cotangent(output)
        found = output, *torch.autograd.grad(output, arrays, change)
    return [ops.convert_to_numpy(ops.cast(x, "float32")) for x in found]


def _exact_products() -> Any:
    """Products of float32 that are not in TF32."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()


# Neighbours in a batch.


def neighbours(preset: str, small: bool) -> Iterator[dict[str, Any]]:
    """Bits of an image's logits that depend on the batch around it.

    Args:
        preset: name of the preset.
        small: whether the model is tiny.
    """
    model: Any = models.from_preset(
        preset,
        num_classes=CLASSES,
        multi_label=False,
        dtype="mixed_bfloat16",
        load_weights=False,
        **overrides_of(preset, small),
    )
    draw = np.random.default_rng(0).normal
    shape = (8 if small else 64, *model.backbone.image_shape)
    images, others = draw(size=(2, *shape)).astype("float32")
    others[0] = images[0]
    alone, among, elsewhere = (
        np.asarray(model.predict_on_batch(x)[0], "float32")
        for x in (images[:1], images, others)
    )
    for form, x in {"alone": alone, "among other neighbours": elsewhere}.items():
        yield {"form": form, **differing_bits(x, among)}


def differing_bits(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """The bits in which two float32 arrays differ, and their largest difference."""
    differing = np.bitwise_count(x.view("uint32") ^ y.view("uint32"))
    return {
        "bits": int(differing.sum()),
        "values": int(np.count_nonzero(differing)),
        "of": x.size,
        "largest": float(np.max(np.abs(x - y))),
    }
