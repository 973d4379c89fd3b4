"""GPT-2 with muMoE blocks against the released code."""

import numpy as np
import pytest
from keras import ops

from keras_moe import models
from tests import golden
from tests.backends import every_backend_for
from tests.compare import assert_close, assert_same
from tests.training_gradients import training_gradients

pytestmark = pytest.mark.usefixtures("op_by_op")

CASES = every_backend_for(golden.cases("18_mumoe_gpt2/gpt_*"), "gpt_tr_n8")


def config_of(arrays, config):
    """Arguments of the backbone."""
    gpt = config["gpt_config"]
    dim = gpt["n_embd"]
    arguments = {
        "vocabulary_size": gpt["vocab_size"],
        "max_length": gpt["block_size"],
        "hidden_dim": dim,
        "num_layers": gpt["n_layer"],
        "num_heads": gpt["n_head"],
        "mlp_dim": 4 * dim,
        "positions": "learned",
        "tied_embeddings": True,
        "norm": "layer",
        "layer_norm_epsilon": 1e-5,
        "use_bias": gpt["bias"],
        "gated_mlp": False,
        "activation": "gelu",
    }
    prefix = "params/transformer/h/0/mlp/MuMoE_layer/MuMoE/factors"
    if f"{prefix}/0" not in arrays:
        return arguments
    factors = [arrays[f"{prefix}/{i}"] for i in range(3)]
    is_cp = factors[0].ndim == 2
    moe = {
        "router": "mumoe",
        "num_experts": factors[0].shape[0 if is_cp else 1],
        "factorization": "cp" if is_cp else "tr",
        "rank": factors[0].shape[1] if is_cp else [x.shape[0] for x in factors],
        "input_norm": True,
        "block_norm": False,
        "gate_normalization": "layer",
    }
    return {**arguments, "moe": moe}


def pairs_of(model, is_mumoe):
    """`(variable, function from the reference's arrays of a group)`."""
    backbone = model.backbone
    heads = backbone.config.num_heads
    top = "transformer"

    def named(name):
        return lambda a: a(name)

    def kernel(name, part=0, parts=1):
        return lambda a: np.split(a(name), parts)[part].T

    yield backbone.token_embedding.embeddings, named(f"{top}/wte/weight")
    positions = backbone.get_layer("text_positions").embedding
    yield positions, lambda a: a(f"{top}/wpe/weight")[None]
    yield from norm_pairs(backbone.get_layer("final_norm"), f"{top}/ln_f")
    for i, name in enumerate(backbone.block_names):
        block, prefix = backbone.get_layer(name), f"{top}/h/{i}"
        yield from norm_pairs(block.mixer_norm, f"{prefix}/ln_1")
        attention = block.token_mixer
        denses = (attention.query_dense, attention.key_dense, attention.value_dense)
        for part, dense in enumerate(denses):

            def split(name, part=part, is_bias=False):
                def of(a):
                    value = np.split(a(name), 3)[part]
                    shape = (heads, -1) if is_bias else (value.shape[1], heads, -1)
                    return value.T.reshape(shape)

                return of

            yield dense.kernel, split(f"{prefix}/attn/c_attn/weight")
            if dense.bias is not None:
                yield dense.bias, split(f"{prefix}/attn/c_attn/bias", is_bias=True)
        dense = attention.output_dense
        name = f"{prefix}/attn/c_proj"
        yield (
            dense.kernel,
            lambda a, name=name: a(f"{name}/weight").T.reshape(
                heads, -1, a(f"{name}/weight").shape[0]
            ),
        )
        if dense.bias is not None:
            yield dense.bias, named(f"{name}/bias")
        layer = block.feed_forward
        if not is_mumoe:
            yield from norm_pairs(block.feed_forward_norm, f"{prefix}/mlp/c_fc/0")
            for dense, name in (
                (layer.hidden, "c_fc/1"),
                (layer.output_dense, "c_proj"),
            ):
                yield dense.kernel, kernel(f"{prefix}/mlp/{name}/weight")
                yield dense.bias, named(f"{prefix}/mlp/{name}/bias")
            continue
        prefix = f"{prefix}/mlp/MuMoE_layer"
        yield layer.gate.kernels[0], named(f"{prefix}/projs/0")
        yield layer.norm.gamma, named(f"{prefix}/input_ln/weight")
        yield layer.norm.beta, named(f"{prefix}/input_ln/bias")
        for name, experts in (
            ("MuMoE", layer.hidden),
            ("MuMoE2", layer.output_experts),
        ):
            for j, factor in enumerate(experts.factors):
                yield factor, named(f"{prefix}/{name}/factors/{j}")


def norm_pairs(norm, name):
    yield norm.gamma, lambda a: a(f"{name}/weight")
    if norm.beta is not None:
        yield norm.beta, lambda a: a(f"{name}/bias")


@pytest.mark.parametrize("case", CASES)
def test_released_code(case):
    arrays, config = golden.load(case)
    arguments = config_of(arrays, config)
    model = models.CausalLM(models.DecoderBackbone.from_config(arguments))
    pairs = list(pairs_of(model, "moe" in arguments))
    assert len(pairs) == len(model.trainable_weights)
    for variable, of in pairs:
        variable.assign(of(lambda name: arrays[f"params/{name}"]))
    assert model.count_params() == config["num_parameters"]
    described = models.describe(model)
    assert described.parameters == config["num_parameters"]

    ids = arrays["inputs/idx"].astype("int32")
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    logits = model.predict(inputs, verbose=0)
    assert_close(logits, arrays["outputs/eval/logits"], 1e-4, 2e-5)
    tokens = model.backbone(inputs)
    assert_close(
        model.backbone.logits(tokens)[:, -1:],
        arrays["outputs/eval/logits_last"],
        1e-4,
        2e-5,
    )
    targets = arrays["inputs/targets"].astype("int32")
    inputs["targets"] = targets
    loss = model.evaluate(inputs, verbose=0, return_dict=True)["loss"]
    assert_close(np.float32(loss), arrays["outputs/loss"], 1e-5)
    count = (targets >= 0).sum()
    gradients = training_gradients(model, inputs, lambda x: -ops.sum(x) / count)
    by_id = {id(v): g for v, g in zip(model.trainable_variables, gradients)}
    for variable, of in pairs:
        expected = of(lambda name: arrays[f"grads/loss/params/{name}"])
        received = by_id[id(variable)]
        # Zero gates have gradients of hundreds.
        atol = 1e-5 * max(1.0, np.abs(expected).max())
        assert_close(received, expected, 1e-3, atol, err_msg=variable.path)


@pytest.mark.every_backend
def test_generation_up_to_the_longest_text():
    arrays, config = golden.load("18_mumoe_gpt2/gpt_tr_n8")
    model = models.CausalLM(
        models.DecoderBackbone.from_config(config_of(arrays, config))
    )
    for variable, of in pairs_of(model, True):
        variable.assign(of(lambda name: arrays[f"params/{name}"]))
    model.compile(sampler="greedy")
    ids = arrays["inputs/idx"].astype("int32")
    prompts = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    longest = config["gpt_config"]["block_size"]
    received = model.generate(prompts, max_length=longest)["token_ids"]
    # The reference goes on, with the last tokens only.
    assert_same(received, arrays["outputs/generate_greedy/tokens"][:, :longest])
