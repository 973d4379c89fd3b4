"""muMoE's layers against the released code, and against the naive sum."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.analysis._hooks import with_layers, without_one
from keras_moe.layers import MultilinearExperts, MuMoE, MuMoEBlock
from tests import golden
from tests.compare import assert_close, assert_same, to_numpy
from tests.dense_tensor import dense_tensor
from tests.gradients import gradient_and_outputs
from tests.training_gradients import training_gradients

LAYERS = [*golden.cases("10_mumoe/cp_*"), *golden.cases("10_mumoe/tr_*")]
BLOCKS = golden.cases("10_mumoe/block_*")
NORMS = {"bn": "batch", "ln": "layer"}


def rank_of(config):
    ranks = config["ranks"]
    return ranks if isinstance(ranks, int) else tuple(row[0] for row in ranks)


def factorization(case):
    return "cp" if "cp" in case else "tr"


@pytest.mark.every_backend
@pytest.mark.parametrize("case", LAYERS)
def test_released_layer(case):
    arrays, config = golden.load(case)
    sizes = config["output_dim"], config["expert_dims"], factorization(case)
    experts = MultilinearExperts(*sizes, rank_of(config), use_bias=config["use_bias"])
    z = arrays["inputs/z"]
    arguments = [arrays[f"inputs/a{level}"] for level in range(config["hierarchy"])]
    experts.build(z.shape)
    names = [f"factors/{index}" for index in range(len(experts.factors))]
    factors = [arrays[f"params/{name}"] for name in names]
    assert [tuple(v.shape) for v in experts.factors] == [f.shape for f in factors]
    for variable, value in zip(experts.factors, factors):
        variable.assign(value)
    whole = dense_tensor(
        [ops.convert_to_tensor(f) for f in factors], factorization(case)
    )
    assert_close(whole, arrays["outputs/materialised_W"], 1e-4, 1e-5)

    def loss(z, *rest):
        a, values = rest[: len(arguments)], rest[len(arguments) :]
        with keras.StatelessScope(list(zip(experts.factors, values))):
            y = experts.call(z, list(a))
        return ops.sum(ops.multiply(y, arrays["inputs/cotangent"])), [y]

    grads, (y,) = gradient_and_outputs(loss, z, *arguments, *factors)
    assert_close(y, arrays["outputs/y"], 1e-4, 1e-5)
    wanted = ["z", *(f"a{level}" for level in range(len(arguments)))]
    wanted += [f"params/{name}" for name in names]
    for actual, name in zip(grads, wanted):
        assert_close(actual, arrays[f"grads/{name}"], 1e-3, 1e-5, err_msg=name)


@pytest.fixture(params=BLOCKS)
def block(request):
    """The block, and pairs of its variables and the reference's names."""
    arrays, config = golden.load(request.param)
    options = {
        "num_experts": config["expert_dims"],
        "factorization": factorization(request.param.split("block_")[1]),
        "rank": rank_of(config),
        "normalization": NORMS[config["normalization"]],
        "use_bias": config["use_bias"],
    }
    x = arrays["inputs/x"]
    if config["second_dim"]:
        sizes = config["output_dim"], config["second_dim"]
        layer = MuMoEBlock(*sizes, input_norm=config["apply_ln"], **options)
        layer.build(x.shape)
        stacks = {"MuMoE": layer.hidden, "MuMoE2": layer.output_experts}
    else:
        layer = MuMoE(config["output_dim"], **options)
        layer.build(x.shape)
        stacks = {"MuMoE": layer.experts}
    pairs = [
        (kernel, f"projs/{level}") for level, kernel in enumerate(layer.gate.kernels)
    ]
    for name, experts in stacks.items():
        pairs += [
            (factor, f"{name}/factors/{index}")
            for index, factor in enumerate(experts.factors)
        ]
    if config.get("apply_ln"):
        names = ("input_ln/weight", "input_ln/bias")
        pairs += zip((layer.norm.gamma, layer.norm.beta), names)
    for variable, name in pairs:
        variable.assign(arrays[f"params/{name}"])
    for level in range(len(layer.gate.means)):
        layer.gate.means[level].assign(arrays[f"state/bn/{level}/running_mean"])
        layer.gate.variances[level].assign(arrays[f"state/bn/{level}/running_var"])
    return layer, pairs, arrays


@pytest.mark.every_backend
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_released_block(block, mode):
    layer, pairs, arrays = block
    x, training = arrays["inputs/x"], mode == "train"

    def loss(outputs):
        return ops.sum(ops.multiply(outputs[0], arrays["inputs/cotangent"]))

    gradients = training_gradients(layer, x, loss, training)
    # On PyTorch and TensorFlow that moved the statistics.
    for level in range(len(layer.gate.means)):
        layer.gate.means[level].assign(arrays[f"state/bn/{level}/running_mean"])
        layer.gate.variances[level].assign(arrays[f"state/bn/{level}/running_var"])
    actual = {id(v): g for v, g in zip(layer.trainable_variables, gradients)}
    assert len(actual) == len(pairs)
    for variable, name in pairs:
        expected = arrays[f"grads/{mode}/params/{name}"]
        assert_close(actual[id(variable)], expected, 1e-3, 2e-5, err_msg=name)
    y, routing = layer(x, training=training)
    assert_close(y, arrays[f"outputs/{mode}/y"], 1e-4, 1e-5)
    coefficients, _ = layer.gate(x, training=False)
    if mode == "eval":
        for level, value in enumerate(coefficients):
            expected = arrays[f"outputs/eval/expert_coefficients/{level}"]
            assert_close(value, expected, 1e-4, 2e-6)
        assert_close(to_numpy(routing.gates).sum(axis=-1), 1, 1e-5)
    elif layer.gate.means:
        prefix = "outputs/train/state_after/bn/0/running"
        for kept, name in ((layer.gate.means, "mean"), (layer.gate.variances, "var")):
            assert_close(kept[0], arrays[f"{prefix}_{name}"], 1e-4, 1e-6)


RANKS = {
    ("cp", 3): 5, ("cp", 4): 5, ("tr", 3): (2, 3, 2, 4, 3),
    ("tr", 4): (2, 3, 2, 2, 4, 3), ("tucker", 1): (2, 3, 4),
    ("tucker", 3): (2, 3, 2, 4, 3), (None, 1): None, (None, 2): None,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "levels"), RANKS)
def test_the_naive_sum_at_any_hierarchy(kind, levels):
    counts = (3, 2, 4, 2)[:levels]
    experts = MultilinearExperts(5, counts, kind, RANKS[kind, levels])
    generator = np.random.default_rng(0)
    z = generator.normal(size=(2, 3, 6)).astype("float32")
    arguments = [generator.random((2, 3, count)).astype("float32") for count in counts]
    experts.build(z.shape)
    for factor in experts.factors:
        factor.assign(generator.normal(size=factor.shape))
    tensor = to_numpy(
        dense_tensor([ops.convert_to_tensor(f) for f in experts.factors], kind)
    )
    one = np.concatenate([z, np.ones_like(z[..., :1])], axis=-1)
    # Experts last to first: (..., n_1, ..., n_L, o).
    expected = np.tensordot(one, tensor, axes=[[-1], [levels]])
    for coefficient in arguments:
        expected = np.einsum("btn,btn...->bt...", coefficient, expected)
    assert_close(experts(z, arguments), expected, 1e-4, 1e-4)
    chosen = [tuple(count - 1 for count in counts), (0,) * levels]
    chosen = [place[0] if levels == 1 else place for place in chosen]
    matrices = to_numpy(experts.expert_weights(chosen))
    for matrix, place in zip(matrices, chosen):
        assert_close(matrix, tensor[place], 1e-4, 1e-5)
        rank = np.linalg.matrix_rank(matrix, tol=1e-4)
        assert rank <= experts.expert_rank_bound
    assert experts.cost((1, 6)).parameters == experts.count_params()


# Table 10 of the paper: hierarchies of experts on 768 inputs and 1,000 units.
TABLE_10 = {
    (128,): (1_069_568, 3_723_264), (128, 2): (1_072_128, 3_724_832),
    (128, 2, 2): (1_074_688, 3_726_400), (128, 2, 2, 2): (1_077_248, 3_727_968),
    (128, 4): (1_074_688, 3_726_400), (128, 4, 4): (1_079_808, 3_729_536),
    (128, 4, 4, 4): (1_084_928, 3_732_672),
}  # fmt: skip


@pytest.mark.parametrize("counts", TABLE_10)
def test_parameters_of_table_10(counts):
    cp = MuMoE(1000, counts, "cp", 512)
    ring = MuMoE(1000, counts, "tr", (*[4] * (len(counts) + 1), 512))
    parameters = tuple(x.cost((1, 768)).parameters for x in (cp, ring))
    assert parameters == TABLE_10[counts]
    if len(counts) == 1:
        cp.build((None, 768))
        assert cp.gate.count_params() == cp.gate.cost((1, 768)).parameters + 2 * 128
        assert sum(v.shape[0] for v in cp.gate.means) == 128


@pytest.mark.parametrize("kind", ["cp", "tr"])
def test_initialisation(kind):
    counts = (6, 3)
    layer = MuMoE(4, counts, kind, {"cp": 64, "tr": (4, 4, 4, 16)}[kind])
    x = np.random.default_rng(0).normal(size=(5, 8)).astype("float32")
    outputs, routing = layer(x)
    # The gate begins at zero: all coefficients alike.
    assert_close(routing.gates, 1 / 18, 1e-5)
    first, second, of_input, of_output = map(to_numpy, layer.experts.factors)
    if kind == "cp":
        assert 0.8 < first.std() < 1.2
        assert_same(second, 1.0)
        limits = (1 / np.sqrt(9), 1 / np.sqrt(64))
    else:
        # Diagonal slices; those of a further level are the identity.
        assert np.abs(first[~np.eye(4, dtype=bool)[:, None].repeat(6, 1)]).max() == 0
        assert_same(second, np.eye(4)[:, None].repeat(3, 1))
        limits = (1 / np.sqrt(9), 1 / np.sqrt(4 * 16))
    for factor, limit in zip((of_input, of_output), limits):
        assert 0.9 * limit < np.abs(factor).max() <= limit
    assert np.isfinite(to_numpy(outputs)).all()


@pytest.mark.parametrize("kind", ["cp", "tr", "tucker"])
@pytest.mark.parametrize("counts", [2, 16, (64, 2), 512])
def test_matching_a_dense_layer(kind, counts):
    experts = MultilinearExperts(1000, counts, kind)
    dense = 768 * 1000 + 1000
    actual = experts.cost((1, 768)).parameters
    assert dense <= actual
    # One rank less would be below it.
    rank = experts._rank(768)
    less = rank - 1 if kind == "cp" else (*rank[:-1], rank[-1] - 1)
    if kind == "tucker":
        assert rank[-1] == rank[-2]
        assert max(rank[:-2]) <= 4
        less = (*rank[:-2], rank[-1] - 1, rank[-1] - 1)
    smaller = MultilinearExperts(1000, counts, kind, less)
    assert smaller.cost((1, 768)).parameters < dense


def test_matching_a_dense_layer_counts_the_gate_and_both_layers():
    head = MuMoE(100, 8, "tucker")
    head.build((None, 64))
    # The last rank adds less than a hundredth or so.
    assert 65 * 100 <= head.cost((1, 64)).parameters < 65 * 100 + 400
    assert head.experts.count_params() + 64 * 8 == head.cost((1, 64)).parameters
    assert head.experts.expert_rank_bound == head.experts.factors[-1].shape[-1]
    block = MuMoEBlock(128, num_experts=8, factorization="tucker")
    dense = 65 * 128 + 129 * 64
    assert dense <= block.cost((1, 64)).parameters < 1.1 * dense


@pytest.mark.parametrize(
    ("kind", "rank", "fast"), [("cp", 512, "1.44"), ("tr", (4, 4, 512), "3.56")]
)
def test_multiply_adds_of_table_8(kind, rank, fast):
    layer = MultilinearExperts(768, 512, kind, rank)
    gate = 512 * 768
    # The paper cuts its 1.4M and 3.5M off.
    assert f"{(gate + layer.tensor_spec(768).multiply_adds) / 1e6:.2f}" == fast
    assert MuMoE(768, 512, kind, rank).cost((1, 768)).flops == 2 * (
        gate + layer.tensor_spec(768).multiply_adds
    )


def without_experts(layer, places):
    experts = layer.experts
    return with_layers(layer, {id(experts): without_one(experts, places)})


FACTORIZED = {
    "cp": ((3,), {"rank": 4}),
    "cp, normalised": ((3,), {"rank": 4, "input_norm": True}),
    "cp, three levels": ((3, 2, 2), {"rank": 4}),
    "tr, levels": ((3, 2), {"factorization": "tr", "rank": (2, 3, 2, 4)}),
    "tucker": ((3,), {"factorization": "tucker", "rank": (2, 3, 4)}),
    "whole": ((3, 2), {"factorization": None}),
}


@pytest.mark.parametrize("case", FACTORIZED)
def test_ablated_outputs_are_those_of_a_zeroed_slice(case):
    levels, options = FACTORIZED[case]
    layer = MuMoE(5, levels, activation="softmax", edited_outputs=(4, 1), **options)
    generator = np.random.default_rng(0)
    total = int(np.prod(levels))
    x = generator.normal(size=(total + 1, 6)).astype("float32")
    layer.build(x.shape)
    for kernel in (*layer.gate.kernels, layer.logit_offsets):
        kernel.assign(generator.normal(size=kernel.shape))
    whole, routing = layer(x)
    factors = [ops.convert_to_tensor(f) for f in layer.experts.factors]
    tensor = to_numpy(dense_tensor(factors, layer.experts.factorization))
    tensor = tensor.reshape(total, 7, 5)
    gates = to_numpy(routing.gates)
    offsets = np.zeros((len(x), 5))
    offsets[:, [4, 1]] = gates @ to_numpy(layer.logit_offsets)
    # What the experts read is normalised, without one of them as with all.
    z = to_numpy(layer.norm(x)) if "input_norm" in options else x
    z = np.concatenate([z, np.ones((len(x), 1), "f")], axis=1)
    every = np.einsum("be,bi,eio->bo", gates, z, tensor)
    assert_close(whole, every + offsets, 1e-4, 1e-4)
    # Row b is without expert b; the last without the last again.
    flat = np.minimum(np.arange(total + 1), total - 1)
    places = np.stack(np.unravel_index(flat, levels), axis=-1)
    actual = to_numpy(without_experts(layer, places.astype("int32"))(x)[0])
    for row, expert in enumerate(flat):
        without = tensor.copy()
        without[expert] = 0
        expected = np.einsum("e,i,eio->o", gates[row], z[row], without) + offsets[row]
        assert_close(actual[row], expected, 1e-4, 1e-4)


def test_a_share_is_of_the_inputs_of_the_block():
    block = MuMoEBlock(12, num_experts=3, rank=0.75)
    block.build((None, 5, 9))
    assert {tuple(f.shape)[1] for f in block.hidden.factors} == {6}
    assert {tuple(f.shape)[1] for f in block.output_experts.factors} == {6}
    layer = MuMoE(4, 3, "tr", (2, 2, 0.01))
    layer.build((None, 9))
    shapes = [tuple(f.shape) for f in layer.experts.factors]
    assert shapes == [(2, 3, 2), (2, 10, 1), (1, 4, 2)]
    assert layer.cost((1, 9)).parameters == sum(
        int(np.prod(w.shape)) for w in layer.trainable_weights
    )
