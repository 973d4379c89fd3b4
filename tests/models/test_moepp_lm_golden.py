"""MoE++ language models against the released code."""

import json
import shutil

import keras
import numpy as np
import pytest
from keras import ops
from safetensors.numpy import load_file

from keras_moe import models
from keras_moe.models.conversion._moepp import moepp_spec
from tests import golden
from tests.backends import every_backend_for
from tests.calls import compiled
from tests.compare import assert_close, assert_same, to_numpy
from tests.refusals import refuses
from tests.training_gradients import training_gradients

FOLDER = "17_moepp_lm"
pytestmark = pytest.mark.usefixtures("op_by_op")

CASES = [x for x in golden.cases(f"{FOLDER}/lm_*") if "rope_scaling" not in x]
RELEASED = ("released_tiny", "released_tiny_sharded")


class Tensors(dict):
    """Arrays under the names of a checkpoint."""

    path = "golden"

    @classmethod
    def of(cls, arrays, prefix="params/"):
        return cls(
            (name.removeprefix(prefix).replace("/", "."), value)
            for name, value in arrays.items()
            if name.startswith(prefix)
        )


def language_model(arrays, config, **overrides):
    """The model with the reference's weights, and its rules."""
    file = Tensors.of(arrays)
    spec = moepp_spec(file, config["model_config"], {})
    arguments = {**spec.arguments, **overrides}
    model = models.CausalLM(models.DecoderBackbone.from_config(arguments))
    for weight in model.trainable_weights:
        rule = spec.rules[weight.path]
        weight.assign(rule.make(file.__getitem__, tuple(weight.shape)))
    return model, spec


def expert_order(spec):
    return list(spec.rules["block_0/moe/router/kernel"].order)


def ids_of(arrays):
    return arrays["inputs/input_ids"].astype("int32")


@pytest.mark.parametrize("case", every_backend_for(CASES, "lm_gqa_mixtral_pad"))
def test_logits_states_and_routing(case):
    arrays, config = golden.load(case)
    model, spec = language_model(arrays, config)
    ids, order = ids_of(arrays), expert_order(spec)
    masks = {
        "plain": np.ones_like(ids),
        "right_pad": arrays["inputs/right_pad/attention_mask"],
        "left_pad": arrays["inputs/left_pad/attention_mask"],
        "left_pad_positions": arrays["inputs/left_pad/attention_mask"],
    }
    # All in one batch: neither padding nor other rows change a token.
    inputs = {
        "token_ids": np.tile(ids, (len(masks), 1)),
        "padding_mask": np.concatenate([*masks.values()]).astype("int32"),
    }
    backbone = model.backbone
    outputs = {
        "features": backbone.features,
        "routing": backbone.routing,
        "logits": backbone.logits(backbone.output),
    }
    received = keras.Model(backbone.input, outputs).predict(inputs, verbose=0)
    rows = np.split(np.arange(len(inputs["token_ids"])), len(masks))
    for (name, mask), own in zip(masks.items(), rows):
        expected = arrays[f"outputs/{name}/logits"]
        real = np.asarray(mask) > 0
        assert_close(received["logits"][own][real], expected[real], 1e-4, 3e-5)
        for i, (block, record) in enumerate(received["routing"].items()):
            assert block == f"block_{i}"
            selected = arrays[f"outputs/{name}/layer{i}/selected"][..., order]
            assert_same(record.dispatched[own][real] > 0, selected[real] > 0)
    num_layers, own = len(backbone.routing), rows[0]
    states = "outputs/plain/hidden_states"
    for i in range(1, num_layers):
        tokens = received["features"][f"block_{i - 1}"][own]
        assert_close(tokens, arrays[f"{states}/{i}"], 1e-4, 3e-5)
    tokens = received["features"]["tokens"][own]
    assert_close(tokens, arrays[f"{states}/{num_layers}"], 1e-4, 3e-5)
    for i, record in enumerate(received["routing"].values()):
        for actual, name in (
            (record.logits, "logits_after_residual"),
            (record.combined, "gates"),
        ):
            expected = arrays[f"outputs/plain/layer{i}/{name}"][..., order]
            assert_close(actual[own], expected, 1e-4, 3e-5)


@pytest.mark.parametrize("case", every_backend_for(CASES, "lm_linear_gate_norm_tied"))
def test_training_loss_and_gradients(case):
    arrays, config = golden.load(case)
    # The released code has neither a capacity nor a balance loss.
    spec = moepp_spec(Tensors.of(arrays), config["model_config"], {})
    moe = spec.arguments["moe"]
    moe = {
        **moe,
        "router": {**moe["router"], "dropless": True},
        "auxiliary_losses": None,
    }
    model, spec = language_model(arrays, config, moe=moe)
    labels = arrays["inputs/labels"]
    targets = np.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    inputs = {
        "token_ids": ids_of(arrays),
        "padding_mask": arrays["inputs/train/attention_mask"].astype("int32"),
        "targets": np.where(targets < 0, -1, targets).astype("int32"),
    }
    metrics = model.evaluate(inputs, verbose=0, return_dict=True)
    assert_close(np.float32(metrics["loss"]), arrays["outputs/loss"], 1e-5)
    perplexity = np.exp(arrays["outputs/loss"])
    assert_close(np.float32(metrics["perplexity"]), perplexity, 1e-4)
    count = (inputs["targets"] >= 0).sum()
    gradients = training_gradients(model, inputs, lambda x: -ops.sum(x) / count)
    file = Tensors.of(arrays, "grads/loss/params/")
    for weight, gradient in zip(model.trainable_weights, gradients, strict=True):
        rule = spec.rules[weight.path]
        if weight.path == "block_0/moe/router/residual_kernel":
            # There is no previous layer.
            assert np.abs(gradient).max() <= 0
            continue
        expected = rule.make(file.__getitem__, tuple(weight.shape))
        if weight.path == "token_embedding/embeddings":
            pad = config["model_config"]["pad_token_id"]
            # The released embedding gives its padding row no gradient.
            kept = np.arange(len(expected)) != (-1 if pad is None else pad)
            gradient, expected = gradient[kept], expected[kept]
        assert_close(gradient, expected, 1e-3, 1e-5, err_msg=weight.path)


def test_cached_decoding():
    arrays, config = golden.load(CASES[0])
    model, _ = language_model(arrays, config)
    backbone, ids, first = model.backbone, ids_of(arrays), config["prefill"]
    call = compiled(backbone.call_with_cache)
    for name, mask in (
        ("decode", np.ones_like(ids)),
        ("decode_left_pad", arrays["inputs/left_pad/attention_mask"]),
    ):
        cache = backbone.empty_cache(mask)
        tokens, cache = call(ids[:, :first], cache, 0)
        real = mask[:, :first] > 0
        received = to_numpy(backbone.logits(tokens))
        expected = arrays[f"outputs/{name}/prefill_logits"]
        assert_close(received[real], expected[real], 1e-4, 3e-5)
        for step, expected in enumerate(arrays[f"outputs/{name}/step_logits"], first):
            one = ids[:, step : step + 1]
            tokens, cache = call(one, cache, step)
            assert_close(backbone.logits(tokens)[:, 0], expected, 1e-4, 3e-5)
        if name == "decode":
            for i in range(config["model_config"]["num_hidden_layers"]):
                for part, value in zip(("key", "value"), cache[f"block_{i}"]):
                    expected = arrays[f"outputs/decode/cache/layer{i}/{part}"]
                    value = to_numpy(value).transpose(0, 2, 1, 3)
                    assert_close(value, expected, 1e-4, 3e-5)


@pytest.mark.every_backend
def test_greedy_generation():
    arrays, config = golden.load(CASES[1])
    model, _ = language_model(arrays, config)
    model.compile(sampler="greedy")
    ids = ids_of(arrays)
    left = arrays["inputs/left_pad/attention_mask"]
    prompts = {
        "token_ids": np.concatenate([ids, ids]),
        "padding_mask": np.concatenate([np.ones_like(ids), left]),
    }
    names = ("generate", "generate_left_pad")
    expected = np.concatenate([arrays[f"outputs/{name}/tokens"] for name in names])
    received = model.generate(prompts, max_length=expected.shape[1])
    assert_same(received["token_ids"], expected)


def test_scaled_rotary_positions():
    arrays, config = golden.load(f"{FOLDER}/lm_rope_scaling")
    ids = ids_of(arrays)
    for name, scaling in config["rope_scaling_by_run"].items():
        own = {**config["model_config"], "rope_scaling": scaling}
        if name == "dynamic":
            with pytest.raises(ValueError, match=r"'linear' or 'ntk'.*dynamic"):
                moepp_spec(Tensors.of(arrays), own, {})
            continue
        if scaling:
            own["rope_scaling"] = {**scaling, "rope_type": scaling["type"]}
            own["rope_scaling"].pop("type")
        # The reference's table grows past its longest text.
        model, _ = language_model(arrays, {"model_config": own}, max_length=11)
        inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
        expected = arrays[f"outputs/{name}/plain/logits"]
        assert_close(model.predict(inputs, verbose=0), expected, 1e-4, 3e-5)


@pytest.mark.parametrize(("changes", "message"), [
    ({"rope_scaling": {"factor": 2.0}}, r"'linear' or 'ntk'.*'factor': 2.0"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
])  # fmt: skip
def test_configs_of_other_models_are_refused(changes, message):
    arrays, config = golden.load(f"{FOLDER}/lm_rope_scaling")
    with pytest.raises(ValueError, match=message):
        moepp_spec(Tensors.of(arrays), {**config["model_config"], **changes}, {})


@pytest.mark.parametrize("name", RELEASED)
def test_released_folders_load_and_go_back(name, tmp_path):
    folder = golden.FOLDER / FOLDER / name
    arrays, _ = golden.load(f"{FOLDER}/{name}/expected")
    source = tmp_path / "source"
    source.mkdir()
    for path in folder.iterdir():
        # The numbers to compare with are no part of the release.
        if path.suffix != ".npz":
            shutil.copy(path, source)
    model, report = models.convert(str(source))
    assert isinstance(model, models.CausalLM)
    assert not report.ignored
    ids = ids_of(arrays)
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    expected = arrays["outputs/plain/logits"]
    assert_close(model.predict(inputs, verbose=0), expected, 1e-4, 3e-5)
    wanted = {}
    for path in sorted(source.glob("*.safetensors")):
        wanted |= load_file(path)
    parameters = sum(value.size for value in wanted.values())
    assert models.describe(str(source)).parameters == parameters
    models.export_weights(model, "moe_plus_plus", tmp_path / "exported")
    received = load_file(tmp_path / "exported" / "model.safetensors")
    assert set(received) == set(wanted)
    for key, value in wanted.items():
        assert_same(received[key], value)
    configs = [
        json.loads((path / "config.json").read_text())
        for path in (source, tmp_path / "exported")
    ]
    for key in set(configs[0]) & set(configs[1]):
        assert configs[0][key] == configs[1][key], key


def test_large_exports_are_split(tmp_path, monkeypatch):
    from keras_moe.models import export

    model = models.from_preset(released(tmp_path))
    monkeypatch.setattr(export, "_SHARD", 50_000)
    models.export_weights(model, "moe_plus_plus", tmp_path / "exported")
    assert len(list((tmp_path / "exported").glob("model-*.safetensors"))) > 1
    again = models.from_preset(str(tmp_path / "exported"))
    assert_same(model.weights, again.weights)


def released(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(golden.FOLDER / FOLDER / "released_tiny", source)
    (source / "expected.npz").unlink()
    return str(source)


@pytest.mark.parametrize(("changes", "message"), [
    ({"moe_expert_interval": 2}, "moe_expert_interval=2"),
    ({"num_experts": [9]}, r"num_experts=\[9\]"),
    ({"hidden_size": 64}, "hidden_size=64"),
])  # fmt: skip
def test_configs_of_other_weights_are_refused(changes, message, tmp_path):
    source = released(tmp_path)
    path = tmp_path / "source" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    refuses(message, models.from_preset, source)


@pytest.mark.parametrize(("overrides", "message"), [
    ({"gate_hidden_dim": 5}, "gate_hidden_dim=5"),
    ({"constant_experts": 1}, "constant_experts=1"),
    ({"input_scale": 3.0}, "input_scale=3.0"),
    ({"norm": "layer"}, "norm='layer'"),
    ({"tau": 1.0, "normalize_gates": None}, "normalize_gates=None"),
])  # fmt: skip
def test_other_models_are_not_exported(overrides, message, tmp_path):
    model = models.from_preset(
        "moepp_lm_0.6b", hidden_dim=16, num_layers=1, num_heads=2, mlp_dim=8,
        vocabulary_size=20, normalize_gates=overrides.pop("normalize_gates", "before"),
        **overrides,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        models.export_weights(model, "moe_plus_plus", tmp_path / "exported")
    with pytest.raises(ValueError, match=r"dense tower for GPT-2.*received: moe="):
        models.export_weights(model, "transformers", tmp_path / "exported")
