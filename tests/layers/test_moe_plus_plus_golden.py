"""Two MoE++ layers against the released code, and against the paper's equations."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.layers import Experts, MoE
from keras_moe.losses import heterogeneous_balance_loss
from keras_moe.ops import ExpertTypes, heterogeneous_capacity, selected_experts
from keras_moe.routers import PathwayAwareRouter
from tests import golden
from tests.backends import every_backend_for
from tests.compare import assert_close, assert_same
from tests.training_gradients import training_gradients

OFFICIAL = golden.cases("11_moepp/official_*")
PAPER = "11_moepp/paper_two_layers"
LAYERS = 2


def our_order(num_ffn):
    """Where our experts (FFN, zero, copy, constant) are in the reference's order."""
    return [*range(num_ffn), num_ffn + 3, num_ffn + 2, num_ffn, num_ffn + 1]


class Stack(keras.layers.Layer):
    """h + MoE(h), twice, with the first layer's logits at the second."""

    def __init__(self, layers):
        super().__init__()
        self.moes = layers

    def build(self, shape):
        for moe in self.moes:
            moe.build(shape)

    def call(self, tokens, training=None):
        records, logits = [], None
        for moe in self.moes:
            residual = {} if logits is None else {"previous_logits": logits}
            outputs, routing = moe(tokens, training=training, **residual)
            tokens, logits = tokens + outputs, routing.logits
            records.append((outputs, routing))
        return tokens, records


def official(case):
    """The stack with the reference's weights, and pairs of weights and names."""
    arrays, config = golden.load(case)
    mixtral = config["moe_use_mixtral_gating"]
    scaled = not mixtral and not config["moe_feature_no_mul_topk"]
    is_gated = "fc2" not in config["expert_type"]
    num_experts, num_ffn = config["num_experts"], config["num_ffn"]
    order = our_order(num_ffn)

    def make(index):
        router = PathwayAwareRouter(
            num_experts,
            zero_experts=1,
            copy_experts=1,
            constant_experts=2,
            gating_residual=index > 0,
            gate_hidden_dim=8 * num_experts if config["moe_2layer_gate"] else None,
            logits_norm_std=config["moe_gate_norm_std"]
            if config["moe_use_logits_norm"]
            else None,
            normalize_gates="before",
            zero_gates="keep" if mixtral else "remove",
        )
        experts = Experts(
            num_ffn,
            config["intermediate"],
            activation="silu" if is_gated else "gelu",
            gated=is_gated,
            use_bias=not is_gated,
        )
        return MoE(router, experts, input_scale=2.0 if scaled else 1.0)

    stack = Stack([make(index) for index in range(LAYERS)])
    stack.build(arrays["inputs/x"].shape)
    pairs = []
    for index, moe in enumerate(stack.moes):
        pairs += official_pairs(moe, f"layer{index}/moe", config, order)
    return arrays, stack, pairs, order


def official_pairs(moe, prefix, config, order):
    """`(variable, function from the reference's arrays of a group)` of one layer."""
    router, experts = moe.router, moe.experts
    gate = f"{prefix}/gate"
    if config["moe_2layer_gate"]:
        yield router.hidden_kernel, lambda a: a(f"{gate}/wg/0/weight").T
        yield router.kernel, lambda a: a(f"{gate}/wg/2/weight").T[:, order]
    else:
        yield router.kernel, lambda a: a(f"{gate}/wg/weight").T[:, order]
    if router.gating_residual:
        square = np.ix_(order, order)
        yield (router.residual_kernel, lambda a: a(f"{gate}/gate_map/weight").T[square])

    def of_experts(name, part=slice(None)):
        def stacked(a):
            return np.stack(
                [
                    a(f"{prefix}/experts/experts/{i}/{name}").T[..., part]
                    for i in range(config["num_ffn"])
                ]
            )

        return stacked

    if experts.gated:
        half = config["intermediate"]
        yield experts.gate_kernel, of_experts("up_proj/weight", slice(half))
        yield experts.hidden_kernel, of_experts("up_proj/weight", slice(half, None))
        yield experts.output_kernel, of_experts("down_proj/weight")
    else:
        yield experts.hidden_kernel, of_experts("fc1/weight")
        yield experts.hidden_bias, of_experts("fc1/bias")
        yield experts.output_kernel, of_experts("fc2/weight")
        yield experts.output_bias, of_experts("fc2/bias")
    constants = moe.zero_computation_experts
    first = config["num_ffn"]

    def of_constants(name):
        return lambda a: np.stack(
            [a(f"{prefix}/experts/experts/{first + j}/{name}").T for j in range(2)]
        )

    yield constants.kernel, of_constants("wg/weight")
    yield constants.vector, of_constants("constant")


@pytest.mark.parametrize("case", every_backend_for(OFFICIAL, "official_default"))
def test_released_code(case):
    arrays, stack, pairs, order = official(case)
    for variable, of in pairs:
        variable.assign(of(lambda name: arrays[f"params/{name}"]))
    final, records = stack(arrays["inputs/x"])
    for index, (outputs, routing) in enumerate(records):
        expected = {
            name.removeprefix(f"outputs/layer{index}/"): value
            for name, value in arrays.items()
            if name.startswith(f"outputs/layer{index}/")
        }
        actual = {
            name: ops.convert_to_numpy(value).reshape(expected["selected"].shape)
            for name, value in routing._asdict().items()
        }
        assert_close(
            actual["logits"], expected["logits_after_residual"][:, order], 1e-4, 1e-5
        )
        assert_same(actual["dispatched"] > 0, expected["selected"][:, order])
        # A gate of the zero expert that is kept weighs nothing, and is no gate there.
        assert_close(actual["combined"], expected["gates"][:, order], 1e-4, 1e-5)
        assert_close(outputs, expected["moe_output"], 1e-4, 1e-5)
    expected = arrays["outputs/final"]
    # Sums of numbers up to 76 in float32, some of which almost cancel.
    atol = 1e-6 * np.abs(expected).max()
    assert_close(final, expected, 1e-4, atol)
    gradients = training_gradients(
        stack,
        arrays["inputs/x"],
        loss=lambda outputs: ops.sum(
            ops.multiply(outputs[0], arrays["inputs/cotangent"])
        ),
        training=False,
    )
    actual = {id(v): g for v, g in zip(stack.trainable_variables, gradients)}
    assert len(actual) == len(pairs)
    for variable, of in pairs:
        expected = of(lambda name: arrays[f"grads/params/{name}"])
        # Sums over tokens of numbers up to thousands, some of which cancel.
        atol = 1e-5 * max(np.abs(expected).max(), 1.0)
        gradient = actual[id(variable)]
        assert_close(gradient, expected, 1e-3, atol, err_msg=variable.path)


@pytest.mark.every_backend
def test_the_papers_equations():
    arrays, config = golden.load(PAPER)
    order = our_order(4)
    moes = [
        MoE(
            PathwayAwareRouter(
                8,
                config["K"],
                zero_experts=1,
                copy_experts=1,
                constant_experts=2,
                gating_residual=index > 0,
            ),
            Experts(4, config["hidden"], activation="gelu"),
        )
        for index in range(LAYERS)
    ]
    stack = Stack(moes)
    tokens = arrays["inputs/x"][None].astype("float32")
    stack.build(tokens.shape)
    for index, moe in enumerate(moes):
        params = {
            name.removeprefix(f"params/layer{index}/"): value
            for name, value in arrays.items()
        }
        moe.router.kernel.assign(params["router_W"][:, order])
        if index:
            moe.router.residual_kernel.assign(
                params["gate_residual_Wg"][np.ix_(order, order)]
            )
        moe.experts.hidden_kernel.assign(params["ffn_W1"])
        moe.experts.hidden_bias.assign(params["ffn_b1"])
        moe.experts.output_kernel.assign(params["ffn_W2"])
        moe.experts.output_bias.assign(params["ffn_b2"])
        moe.zero_computation_experts.vector.assign(params["constant_v"])
        moe.zero_computation_experts.kernel.assign(params["constant_Wc"])
    final, records = stack(tokens)
    for index, (outputs, routing) in enumerate(records):
        for actual, name in ((routing.logits, "logits"), (routing.combined, "gates")):
            expected = arrays[f"outputs/layer{index}/{name}"][:, order]
            # Logits are of size 1, in float32.
            assert_close(actual[0], expected, 1e-5, 1e-6)
        expected = arrays[f"outputs/layer{index}/moe_output"]
        assert_close(outputs[0], expected, 1e-5, 2e-6)
    assert_close(final[0], arrays["outputs/final"], 1e-5, 2e-6)


@pytest.mark.every_backend
def test_heterogeneous_balance_loss():
    arrays, config = golden.load("11_moepp/paper_balance_and_capacity")
    order = our_order(4)
    logits = arrays["inputs/logits"][None][..., order].astype("float32")
    gates = ops.softmax(logits)
    selected = selected_experts(gates, config["K"])
    assert_same(ops.convert_to_numpy(selected)[0], arrays["outputs/selected"][:, order])
    types = ExpertTypes(4, 1, 1, 2)
    for tau, expected in zip(arrays["inputs/tau"], arrays["outputs/load_balance_loss"]):
        actual = heterogeneous_balance_loss(gates, selected, types, float(tau))
        assert_close(actual, [expected], 1e-5)


def test_heterogeneous_capacity():
    arrays, config = golden.load("11_moepp/paper_balance_and_capacity")
    types = ExpertTypes(4, 1, 1, 2)
    for tau, row in zip(arrays["inputs/tau"], arrays["outputs/capacities"]):
        for gamma, expected in zip(arrays["inputs/gamma"], row):
            actual = heterogeneous_capacity(config["T"], types, tau, gamma)
            # Equation 8 gives real numbers; of 3.0000000000000004 the ceiling is 3.
            wanted = np.ceil(np.round([expected[0], expected[-1]], 9))
            wanted = np.maximum(wanted, 1)
            assert np.abs(np.array(actual) - wanted).max() <= 0, (tau, gamma)
