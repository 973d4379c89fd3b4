"""GPT-2 with muMoE blocks against the released code."""

import re

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
        "vocabulary_size": gpt["vocab_size"], "max_length": gpt["block_size"],
        "hidden_dim": dim, "num_layers": gpt["n_layer"], "num_heads": gpt["n_head"],
        "mlp_dim": 4 * dim, "positions": "learned", "tied_embeddings": True,
        "norm": "layer", "layer_norm_epsilon": 1e-5, "use_bias": gpt["bias"],
        "gated_mlp": False, "activation": "gelu",
    }  # fmt: skip
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


# Ours on the left, the reference's within `transformer` on the right.
NAMES = [
    (r"token_embedding/", "wte/"),
    (r"text_positions/", "wpe/"),
    (r"final_norm/", "ln_f/"),
    (r"block_(\d+)/mixer_norm/", r"h/\1/ln_1/"),
    (r"block_(\d+)/feed_forward_norm/", r"h/\1/mlp/c_fc/0/"),
    (r"block_(\d+)/attention/(query|key|value)/", r"h/\1/attn/c_attn/"),
    (r"block_(\d+)/attention/attention_output/", r"h/\1/attn/c_proj/"),
    (r"block_(\d+)/mlp/hidden/", r"h/\1/mlp/c_fc/1/"),
    (r"block_(\d+)/mlp/output/", r"h/\1/mlp/c_proj/"),
    (r"block_(\d+)/moe/gate/kernel_", r"h/\1/mlp/MuMoE_layer/projs/"),
    (r"block_(\d+)/moe/input_norm/", r"h/\1/mlp/MuMoE_layer/input_ln/"),
    (r"block_(\d+)/moe/hidden/", r"h/\1/mlp/MuMoE_layer/MuMoE/factors/"),
    (r"block_(\d+)/moe/output/", r"h/\1/mlp/MuMoE_layer/MuMoE2/factors/"),
]
ENDS = {"gamma": "weight", "beta": "bias", "kernel": "weight", "embeddings": "weight"}
ENDS |= {"embedding": "weight", "expert_factor_0": "0", "input_factor": "1"}
ENDS |= {"output_factor": "2"}


def value_of(weight, arrays):
    """What the reference's arrays of a group have for one of our weights."""
    for ours, theirs in NAMES:
        match = re.fullmatch(ours + r"(\w+)", weight.path)
        if match:
            end = match.groups()[-1]
            value = arrays["transformer/" + match.expand(theirs) + ENDS.get(end, end)]
            break
    if "c_attn" in theirs:
        value = np.split(value, 3)[("query", "key", "value").index(match[2])]
    if end == "kernel":
        value = value.T
    return value.reshape(weight.shape)


def assigned(arrays, config):
    """The model with the reference's weights."""
    arguments = config_of(arrays, config)
    model = models.CausalLM(models.DecoderBackbone.from_config(arguments))
    for weight in model.trainable_weights:
        weight.assign(value_of(weight, golden.part(arrays, "params/")))
    return model


@pytest.mark.parametrize("case", CASES)
def test_released_code(case):
    arrays, config = golden.load(case)
    model = assigned(arrays, config)
    assert model.count_params() == config["num_parameters"]
    described = models.describe(model)
    assert described.parameters == config["num_parameters"]

    ids = arrays["inputs/idx"].astype("int32")
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    logits = model.predict(inputs, verbose=0)
    assert_close(logits, arrays["outputs/eval/logits"], 1e-4, 2e-5)
    last = model.backbone.logits(model.backbone(inputs))[:, -1:]
    assert_close(last, arrays["outputs/eval/logits_last"], 1e-4, 2e-5)
    targets = arrays["inputs/targets"].astype("int32")
    inputs["targets"] = targets
    loss = model.evaluate(inputs, verbose=0, return_dict=True)["loss"]
    assert_close(np.float32(loss), arrays["outputs/loss"], 1e-5)
    count = (targets >= 0).sum()
    gradients = training_gradients(model, inputs, lambda x: -ops.sum(x) / count)
    for weight, gradient in zip(model.trainable_variables, gradients, strict=True):
        expected = value_of(weight, golden.part(arrays, "grads/loss/params/"))
        # Zero gates have gradients of hundreds.
        atol = 1e-5 * max(1.0, np.abs(expected).max())
        assert_close(gradient, expected, 1e-3, atol, err_msg=weight.path)


@pytest.mark.every_backend
def test_generation_up_to_the_longest_text():
    arrays, config = golden.load("18_mumoe_gpt2/gpt_tr_n8")
    model = assigned(arrays, config)
    model.compile(sampler="greedy")
    ids = arrays["inputs/idx"].astype("int32")
    prompts = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    longest = config["gpt_config"]["block_size"]
    received = model.generate(prompts, max_length=longest)["token_ids"]
    # The reference goes on, with the last tokens only.
    assert_same(received, arrays["outputs/generate_greedy/tokens"][:, :longest])
