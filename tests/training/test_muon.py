"""Muon: each expert's step is that of its matrix alone, and which weights have one."""

import json
import re

import keras
import numpy as np
import pytest

from keras_moe import models, training
from keras_moe.models import abstract
from tests.compare import to_numpy
from tests.forks import run_python

EXPERTS = "block_0/moe/experts/hidden_kernel"
# Paths, shapes, and shapes as matrices.
MATRICES = [
    (EXPERTS, (3, 4, 6), (3, 4, 6)),
    ("block_0/moe/experts/output_kernel", (3, 6, 4), (3, 6, 4)),
    ("block_0/attention/query/kernel", (8, 2, 3), (8, 6)),
    ("block_0/attention/attention_output/kernel", (2, 3, 8), (6, 8)),
    ("block_0/mlp/hidden/kernel", (5, 7), (5, 7)),
]


def variable(path, value):
    made = keras.Variable(value, name=path.replace("/", "_"), dtype="float32")
    made._path = path
    return made


def draws(*shapes, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.normal(size=shape).astype("float32") for shape in shapes]


def moved(optimizer, path, value, gradients):
    weight = variable(path, value)
    for gradient in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [weight])
    return to_numpy(weight)


@pytest.mark.every_backend
@pytest.mark.parametrize(("rule", "options"), [
    ("match_rms_adamw", {}),
    ("match_rms_adamw", {"nesterov": False, "ns_steps": 3, "momentum": 0.8}),
    # Without a factor, which is 1 for matrices of no more rows than columns.
    ("original", {"rms_rate": None}),
])  # fmt: skip
def test_every_matrix_moves_as_with_torch(rule, options, monkeypatch):
    torch = pytest.importorskip("torch")
    # PyTorch's takes its steps of Newton and Schulz in bfloat16, whatever it is given.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    for path, shape, matrices in MATRICES:
        if rule == "original" and matrices[-2] > matrices[-1]:
            continue
        weight, *gradients = draws(*[shape] * 4)
        optimizer = training.Muon(0.02, weight_decay=0.1, **options)
        mine = moved(optimizer, path, weight, gradients).reshape(-1, *matrices[-2:])
        theirs = [x.copy() for x in weight.reshape(mine.shape)]
        for i, matrix in enumerate(theirs):
            parameter = torch.nn.Parameter(torch.from_numpy(matrix))
            own = {name: x for name, x in options.items() if name != "rms_rate"}
            reference = torch.optim.Muon(
                [parameter], lr=0.02, weight_decay=0.1, adjust_lr_fn=rule, **own
            )
            for gradient in gradients:
                parameter.grad = torch.from_numpy(gradient.reshape(mine.shape)[i])
                reference.step()
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_move_as_each_by_itself(dtype):
    weight, *gradients = draws((4, 6, 5), (4, 6, 5), (4, 6, 5))
    # Of very different sizes, and one that no token reaches.
    sizes = np.array([1, 1e-3, 100, 0], "float32")[:, None, None]
    gradients = [sizes * gradient for gradient in gradients]
    options = {"weight_decay": None, "ns_dtype": dtype}
    together = moved(training.Muon(0.1, **options), EXPERTS, weight, gradients)
    for i in range(4):
        alone = [g[i : i + 1] for g in gradients]
        own = moved(training.Muon(0.1, **options), EXPERTS, weight[i : i + 1], alone)
        np.testing.assert_allclose(together[i], own[0], atol=1e-6)
    np.testing.assert_array_equal(together[3], weight[3])
    steps = np.linalg.norm(together - weight, axis=(1, 2))
    # Each has a step of the same size, whatever its gradient's.
    assert steps[:3].max() < 1.5 * steps[:3].min()


# Which weights


def matrix_paths(model, optimizer=None):
    optimizer = optimizer or training.Muon()
    return {
        re.sub(r"block_\d+", "block_N", weight.path)
        for weight in model.trainable_variables
        if optimizer.matrix_shape(weight)
    }


ATTENTION = {
    f"block_N/attention/{name}/kernel"
    for name in ("query", "key", "value", "attention_output")
}
DENSE = {f"block_N/mlp/{name}/kernel" for name in ("hidden", "output")}
OF_EXPERTS = {f"block_N/moe/experts/{name}_kernel" for name in ("hidden", "output")}


def test_which_weights_are_matrices():
    model = models.from_preset("vmoe_digits")
    assert matrix_paths(model) == ATTENTION | DENSE | OF_EXPERTS
    # Neither routers, which have kernels, nor factors, and no last layer.
    assert matrix_paths(abstract("moepp_lm_python")) == {
        *ATTENTION,
        *OF_EXPERTS,
        "block_N/moe/experts/gate_kernel",
    }
    assert matrix_paths(abstract("mumoe_vit_s16_cp", num_layers=1)) == ATTENTION
    assert matrix_paths(abstract("limoe_s16", num_layers=2)) == (
        ATTENTION | DENSE | OF_EXPERTS
    )
    mixer = {name.replace("mlp", "token_mlp") for name in DENSE} | DENSE
    assert matrix_paths(abstract("mixer_s16", num_layers=1)) == mixer
    without = training.Muon(exclude_layers=["attention", "mlp/hidden"])
    kept = OF_EXPERTS | {"block_N/mlp/output/kernel"}
    assert matrix_paths(model, without) == kept
    assert training.Muon.from_config(without.get_config()).exclude_layers == [
        "attention",
        "mlp/hidden",
    ]
    # Nor are adapters.
    model.backbone.enable_lora(2, ["query", "experts"])
    names = {weight.name for weight in model.backbone.trainable_variables}
    assert names >= {"lora_kernel_a", "hidden_lora_a", "hidden_lora_b"}
    assert matrix_paths(model.backbone) == set()


@pytest.mark.every_backend
def test_other_weights_move_by_adamw():
    (weight, *gradients) = draws((6, 4), (6, 4), (6, 4))
    path = "block_0/moe/router/kernel"
    rates = {"learning_rate": 0.1, "weight_decay": 0.3}
    mine = moved(training.Muon(**rates), path, weight, gradients)
    theirs = moved(keras.optimizers.AdamW(**rates), path, weight, gradients)
    np.testing.assert_allclose(mine, theirs, atol=1e-6)


# Devices

ON_EIGHT_DEVICES = """
import json, re
from tests.forks import use_jax_on_cpu
use_jax_on_cpu(devices=8)
import jax, keras, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from keras_moe.training import Muon

weight = keras.Variable(np.zeros((8, 16, 24), "float32"), name="hidden_kernel")
weight._path = "block_0/moe/experts/hidden_kernel"
optimizer = Muon(0.1)
optimizer.build([weight])

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("expert",))
def placed(x):
    spec = PartitionSpec("expert") if np.ndim(x) == 3 else PartitionSpec()
    return jax.device_put(x, NamedSharding(mesh, spec))

state = [placed(x.value) for x in optimizer.variables]
value = gradient = placed(np.ones(weight.shape, "float32"))
program = jax.jit(lambda w, s, g: optimizer.stateless_apply(s, [g], [w]))
text = program.lower(value, state, gradient).compile().as_text()
kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
print(json.dumps({"sent": re.findall(kinds, text), "shapes": "f32[1,16,24]" in text}))
"""


def test_experts_on_devices_of_their_own_send_nothing():
    pytest.importorskip("jax")
    ended = run_python("-c", ON_EIGHT_DEVICES)
    assert ended.returncode == 0, ended.stderr[-2000:]
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert seen == {"sent": [], "shapes": True}
