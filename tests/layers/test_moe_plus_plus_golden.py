"""Two MoE++ layers against the released code, and against the paper's equations."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.layers import Experts, MoE
from keras_moe.losses import heterogeneous_balance_loss
from keras_moe.ops import ExpertTypes, heterogeneous_capacity
from keras_moe.ops.token_choice import selected_experts
from keras_moe.routers import PathwayAwareRouter
from tests import golden
from tests.backends import every_backend_for
from tests.compare import assert_close, assert_same
from tests.training_gradients import training_gradients

OFFICIAL = golden.cases("11_moepp/official_*")
PAPER = "11_moepp/paper_two_layers"
LAYERS = 2
TYPES = {"zero_experts": 1, "copy_experts": 1, "constant_experts": 2}


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
    """The reference's arrays and settings, and a stack like its own."""
    arrays, config = golden.load(case)
    mixtral = config["moe_use_mixtral_gating"]
    scaled = not mixtral and not config["moe_feature_no_mul_topk"]
    is_gated = "fc2" not in config["expert_type"]
    num_experts = config["num_experts"]
    moes = []
    for index in range(LAYERS):
        router = PathwayAwareRouter(
            num_experts,
            **TYPES,
            gating_residual=index > 0,
            gate_hidden_dim=8 * num_experts if config["moe_2layer_gate"] else None,
            logits_norm_std=config["moe_gate_norm_std"]
            if config["moe_use_logits_norm"]
            else None,
            normalize_gates="before",
            zero_gates="keep" if mixtral else "remove",
        )
        options = {"activation": "silu" if is_gated else "gelu", "gated": is_gated}
        options["use_bias"] = not is_gated
        experts = Experts(config["num_ffn"], config["intermediate"], **options)
        moes.append(MoE(router, experts, input_scale=2.0 if scaled else 1.0))
    stack = Stack(moes)
    stack.build(arrays["inputs/x"].shape)
    return arrays, config, stack


def official_values(stack, arrays, config):
    """Our variables, and what the reference's arrays of a group have for them."""
    num_ffn = config["num_ffn"]
    order = our_order(num_ffn)
    for index, moe in enumerate(stack.moes):
        router, experts = moe.router, moe.experts
        constants = moe.zero_computation_experts

        def get(name, prefix=f"layer{index}/moe"):
            return arrays[f"{prefix}/{name}"].T

        def of_experts(name, first=0, count=num_ffn, get=get):
            every = range(first, first + count)
            return np.stack([get(f"experts/experts/{i}/{name}") for i in every])

        name = "wg/2" if config["moe_2layer_gate"] else "wg"
        yield router.kernel, get(f"gate/{name}/weight")[:, order]
        if config["moe_2layer_gate"]:
            yield router.hidden_kernel, get("gate/wg/0/weight")
        if router.gating_residual:
            square = get("gate/gate_map/weight")[np.ix_(order, order)]
            yield router.residual_kernel, square
        if experts.gated:
            gate, hidden = np.split(of_experts("up_proj/weight"), 2, axis=-1)
            yield experts.gate_kernel, gate
            yield experts.hidden_kernel, hidden
            yield experts.output_kernel, of_experts("down_proj/weight")
        else:
            yield experts.hidden_kernel, of_experts("fc1/weight")
            yield experts.hidden_bias, of_experts("fc1/bias")
            yield experts.output_kernel, of_experts("fc2/weight")
            yield experts.output_bias, of_experts("fc2/bias")
        yield constants.kernel, of_experts("wg/weight", num_ffn, 2)
        yield constants.vector, of_experts("constant", num_ffn, 2)


@pytest.mark.parametrize("case", every_backend_for(OFFICIAL, "official_default"))
def test_released_code(case):
    arrays, config, stack = official(case)
    order = our_order(config["num_ffn"])
    for variable, value in official_values(
        stack, golden.part(arrays, "params/"), config
    ):
        variable.assign(value)
    final, records = stack(arrays["inputs/x"])
    for index, (outputs, routing) in enumerate(records):
        expected = golden.part(arrays, f"outputs/layer{index}/")
        selected = expected["selected"][:, order]
        logits, dispatched, combined = (
            ops.convert_to_numpy(x).reshape(selected.shape)
            for x in (routing.logits, routing.dispatched, routing.combined)
        )
        wanted = expected["logits_after_residual"][:, order]
        assert_close(logits, wanted, 1e-4, 1e-5)
        assert_same(dispatched > 0, selected)
        # A gate of the zero expert that is kept weighs nothing, and is no gate there.
        assert_close(combined, expected["gates"][:, order], 1e-4, 1e-5)
        assert_close(outputs, expected["moe_output"], 1e-4, 1e-5)
    expected = arrays["outputs/final"]
    # Sums of numbers up to 76 in float32, some of which almost cancel.
    assert_close(final, expected, 1e-4, 1e-6 * np.abs(expected).max())

    def loss(outputs):
        return ops.sum(ops.multiply(outputs[0], arrays["inputs/cotangent"]))

    gradients = training_gradients(stack, arrays["inputs/x"], loss, training=False)
    actual = {id(v): g for v, g in zip(stack.trainable_variables, gradients)}
    pairs = list(official_values(stack, golden.part(arrays, "grads/params/"), config))
    assert len(actual) == len(pairs)
    for variable, expected in pairs:
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
            PathwayAwareRouter(8, config["K"], **TYPES, gating_residual=index > 0),
            Experts(4, config["hidden"], activation="gelu"),
        )
        for index in range(LAYERS)
    ]
    stack = Stack(moes)
    tokens = arrays["inputs/x"][None].astype("float32")
    stack.build(tokens.shape)
    for index, moe in enumerate(moes):
        params = golden.part(arrays, f"params/layer{index}/")
        moe.router.kernel.assign(params["router_W"][:, order])
        if index:
            square = params["gate_residual_Wg"][np.ix_(order, order)]
            moe.router.residual_kernel.assign(square)
        moe.experts.hidden_kernel.assign(params["ffn_W1"])
        moe.experts.hidden_bias.assign(params["ffn_b1"])
        moe.experts.output_kernel.assign(params["ffn_W2"])
        moe.experts.output_bias.assign(params["ffn_b2"])
        moe.zero_computation_experts.vector.assign(params["constant_v"])
        moe.zero_computation_experts.kernel.assign(params["constant_Wc"])
    final, records = stack(tokens)
    for index, (outputs, routing) in enumerate(records):
        expected = golden.part(arrays, f"outputs/layer{index}/")
        for actual, name in ((routing.logits, "logits"), (routing.combined, "gates")):
            # Logits are of size 1, in float32.
            assert_close(actual[0], expected[name][:, order], 1e-5, 1e-6)
        assert_close(outputs[0], expected["moe_output"], 1e-5, 2e-6)
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
