"""The routers by name: golden data, groups, precision, modalities and extremes."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe import losses, routers
from keras_moe.layers import Experts, MoE
from keras_moe.models import ViTBackbone
from keras_moe.ops import RaggedPlan
from keras_moe.routers import (
    ROUTERS,
    ExpertChoiceRouter,
    SinkhornAffinity,
    SparsityConstrainedAffinity,
    TokenChoiceRouter,
)
from tests import golden, gradients
from tests.backends import every_backend_for
from tests.calls import call
from tests.compare import assert_close, assert_same
from tests.refusals import refuses
from tests.small_models import SMALL
from tests.training_gradients import training_gradients

to_numpy = ops.convert_to_numpy
NAMES = list(ROUTERS)
SPARSE = [name for name in NAMES if name != "soft"]


def set_noise(monkeypatch, noise):
    """Makes the given unit noise the one that is drawn."""

    def normal(shape, stddev, **kwargs):
        assert tuple(shape) == noise.shape
        return ops.convert_to_tensor(noise) * stddev

    monkeypatch.setattr(keras.random, "normal", normal)


def transport_router(config):
    """The router of a golden case of optimal transport."""
    if config["algorithm"] == "kl":
        # Theirs runs blocks of ten iterations; their other solver is converged.
        iterations = 200 if config["use_lbfgs"] else config["maxiter"] // 10 * 10
        affinity = SinkhornAffinity(iterations)
    else:
        affinity = SparsityConstrainedAffinity(
            sparse=config["algorithm"] == "ksparse",
            solver="adam",
            iterations=config["maxiter"],
            learning_rate=config["adam_lr"],
        )
    arguments = {
        "affinity": affinity,
        "combine": "softmax" if config["use_softmax_combine_weights"] else "affinity",
        "capacity": config["actual_capacity"],
        "kernel_initializer": "identity",
        "noise_std": 0.0,
    }
    if config["side"] == "expert":
        return ExpertChoiceRouter(config["E"], evaluation="official", **arguments)
    priority = config["dispatcher"]["batch_priority"]
    priority = "max_gate" if priority else "first_come"
    return TokenChoiceRouter(config["E"], config["K"], priority=priority, **arguments)


TRANSPORT_CASES = golden.cases("04_ot_routers/*")
NOISY_CASES = [case for case in TRANSPORT_CASES if case.endswith("training_noise")]


@pytest.mark.parametrize(
    "case",
    every_backend_for(
        sorted({*TRANSPORT_CASES} - {*NOISY_CASES}), "kl_token_k1_plan_combine"
    ),
)
def test_golden_transport(case):
    """The identity kernel makes the tokens the logits."""
    arrays, config = golden.load(case)
    router = transport_router(config)
    plan, routing = call(router, arrays["inputs/logits"], training=True)
    atol = 2e-2 if config.get("use_lbfgs") else 2e-5
    assert_close(routing.affinity, arrays["outputs/plan"], 1e-4, atol)
    assert_same(plan.dense().dispatch_weights, arrays["outputs/dispatch_mask"])
    # Where the weights are the plan's own entries, these are as exact as it is.
    atol = 1e-6 if router.combine == "softmax" else 2e-5
    weights = plan.dense().combine_weights
    assert_close(weights, arrays["outputs/combine_weights"], 1e-5, atol)


@pytest.mark.every_backend
@pytest.mark.parametrize("case", NOISY_CASES)
def test_golden_transport_with_training_noise(case, monkeypatch):
    """Tokens that choose combine with the clean softmax, experts with the noisy one."""
    arrays, config = golden.load(case)
    arrays = {name: array.astype("float32") for name, array in arrays.items()}
    options = {
        "affinity": SinkhornAffinity(config["maxiter"]),
        "capacity": config["capacity"],
        "kernel_initializer": "identity",
        "noise_std": config["noise_std"],
    }
    if config["side"] == "expert":
        router = ExpertChoiceRouter(config["E"], evaluation="official", **options)
    else:
        router = TokenChoiceRouter(config["E"], config["K"], **options)
    set_noise(monkeypatch, arrays["inputs/noise_unit_normal"])
    _, routing = call(router, arrays["inputs/logits"], training=True)
    assert_close(routing.affinity, arrays["outputs/plan"], 1e-4, 2e-5)
    assert_close(routing.gates, arrays["outputs/gates_noisy"], 1e-5, 1e-6)
    selected = to_numpy(routing.dispatched)
    assert_same(selected, arrays["outputs/selected"])
    assert_close(routing.combined, arrays["outputs/combine"], 1e-5, 1e-6)
    # The other rule is what the argument asks for.
    noisy = config["side"] == "token"
    router = type(router).from_config(
        {**router.get_config(), "noisy_combine": noisy, "name": "other"}
    )
    _, routing = call(router, arrays["inputs/logits"], training=True)
    gates = arrays["outputs/gates_noisy" if noisy else "outputs/gates_clean"]
    assert_close(routing.combined, gates * selected, 1e-5, 1e-6)


@pytest.mark.parametrize("name", SPARSE)
def test_only_softmax_routers_have_noise_by_default(name):
    """Equations 7 to 9 have none."""
    router = routers.get(name, 4, seed=0)
    assert router.noise_std == (1.0 if name.startswith("softmax") else 0.0)
    _, routing = call(router, images(batch=1), training=True)
    logits, noisy_logits = to_numpy(routing.logits), to_numpy(routing.noisy_logits)
    assert (logits != noisy_logits).any() == name.startswith("softmax")
    again = type(router).from_config(router.get_config())
    assert again.noise_std == router.noise_std
    clean_by_default = name.endswith("token_choice") and router.noise_std == 0
    assert (router.noisy_combine, again.noisy_combine) == (not clean_by_default,) * 2
    for noise_std, noisy_combine in ((2.0, True), (0.5, False)):
        supplied = {"noise_std": noise_std, "noisy_combine": noisy_combine}
        config = routers.get(name, 4, **supplied).get_config()
        again = type(router).from_config(config)
        assert (again.noise_std, again.noisy_combine) == (noise_std, noisy_combine)


@pytest.mark.parametrize("combine", ["softmax", "affinity"])
@pytest.mark.parametrize("affinity", ["sinkhorn", "sparsity_constrained"])
def test_gradients_pass_through_the_plan_only_where_asked(affinity, combine):
    router = TokenChoiceRouter(3, 2, affinity=affinity, combine=combine, capacity=9)
    generator = np.random.default_rng(0)
    tokens = generator.normal(size=(1, 9, 5)).astype("float32")
    cotangent = generator.normal(size=(1, 9, 3)).astype("float32")
    router.build(tokens.shape)

    def through_the_plan(outputs):
        # With no weight on the gates, but a way to them: some backends want one.
        unused = 0.0 * ops.sum(outputs[1].gates)
        return unused + ops.sum(ops.multiply(outputs[1].affinity, cotangent))

    (actual,) = training_gradients(router, tokens, through_the_plan, training=False)
    assert (np.abs(actual).max() > 1e-3) == (combine == "affinity")


def moe(name, num_experts=4, group_size=None, dtype=None, **options):
    # Capacity by ceil: groups may be smaller than the experts are many.
    if name == "soft":
        options = {"capacity_rounding": "ceil", **options}
    router = routers.get(name, num_experts, seed=0, dtype=dtype, **options)
    experts = Experts(num_experts, mlp_dim=16, shared_initialization=False, dtype=dtype)
    return MoE(router, experts, group_size=group_size, dtype=dtype)


def images(batch=5, tokens=6, dim=8):
    return np.random.default_rng(1).normal(size=(batch, tokens, dim)).astype("float32")


def outputs_of(layer, tokens, **kwargs):
    return to_numpy(call(layer, tokens, **kwargs)[0])


@pytest.mark.parametrize("name", NAMES)
def test_an_image_is_by_itself_at_inference(name):
    # At any place in a batch. Such a capacity would drop nearly all in training.
    layer, tokens = moe(name, group_size=12, capacity_factor=0.5), images()
    together = outputs_of(layer, tokens)
    for index in (0, 4):
        alone = outputs_of(layer, tokens[index : index + 1])
        assert_close(together[index], alone[0], 1e-5, 1e-6)
    assert_same(outputs_of(layer, tokens), together)
    assert_close(outputs_of(layer, tokens[::-1])[::-1], together, 1e-5, 1e-6)


def test_expert_choice_may_choose_from_the_whole_batch():
    tokens = images(batch=4)
    plain = moe("softmax_expert_choice")
    shared = moe("softmax_expert_choice", evaluation="official")
    _, routing = call(plain, tokens)
    assert_same(to_numpy(routing.dispatched).sum(axis=1), 2.0)
    _, routing = call(shared, tokens)
    dispatched = to_numpy(routing.dispatched)
    assert_same(dispatched.sum(axis=(0, 1)), 6.0)
    assert len(np.unique(dispatched.sum(axis=(1, 2)))) > 1
    # The same kernel and experts trained in groups of two images.
    _, routing = call(
        moe("softmax_expert_choice", group_size=12), tokens, training=True
    )
    vmap_groups = to_numpy(routing.dispatched).reshape(2, 12, 4).sum(axis=1)
    assert_same(vmap_groups, 3.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [False, True])
def test_a_masked_token_changes_nothing(name, training):
    tokens = images(batch=2)
    mask = np.ones((2, 6), bool)
    mask[0, 4:] = mask[1, 0] = False
    layer = moe(name, group_size=6, noise_std=0.0)
    outputs, routing = call(layer, tokens, mask=mask, training=training)
    other = np.where(mask[..., None], tokens, 100.0).astype("float32")
    assert_close(
        outputs_of(layer, other, mask=mask, training=training), outputs, 1e-5, 1e-6
    )
    assert (to_numpy(outputs)[~mask] == 0).all()
    assert (to_numpy(routing.dispatched)[~mask] == 0).all()
    nobody = outputs_of(layer, tokens, mask=np.zeros((2, 6), bool), training=training)
    assert_same(nobody, np.zeros_like(nobody))


# Arguments, and the shape of the tokens.
EXTREMES = {
    "one expert": ({"num_experts": 1, "num_selected_experts": 1}, (2, 6, 8)),
    "all experts, one slot": (
        {
            "num_selected_experts": 4, "capacity": 1, "evaluation": "official",
            "num_slots": 1,
        },
        (2, 6, 8),
    ),
    "one token": ({}, (1, 1, 8)),
    "more experts than tokens": ({"num_experts": 9}, (1, 3, 8)),
}  # fmt: skip
VALUES = {
    "random": images,
    "equal": lambda *shape: np.ones(shape, "float32"),
    "zero": lambda *shape: np.zeros(shape, "float32"),
    "large": lambda *shape: images(*shape) * 1e4,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extremes_give_finite_outputs(name, extreme):
    options, shape = EXTREMES[extreme]
    cls, _ = ROUTERS[name]
    names = cls.__init__.__code__.co_varnames
    layer = moe(name, **{k: v for k, v in options.items() if k in names})
    for training in (False, True):
        for tokens in VALUES.values():
            outputs, routing = call(layer, tokens(*shape), training=training)
            assert np.isfinite(to_numpy(outputs)).all()
            for field in routing:
                assert np.isfinite(to_numpy(field)).all()
            assert to_numpy(routing.dispatched).sum() > 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("values", ["equal", "large"])
def test_extremes_give_finite_gradients(name, values):
    tokens = VALUES[values](2, 6, 8)
    layer = moe(name)
    layer.build(tokens.shape)
    for gradient in training_gradients(layer, tokens):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float16"])
def test_routing_is_float32_under_every_policy(name, policy):
    tokens = images()
    # The values that the half-precision layer sees.
    dtype = "float16" if policy == "float16" else "bfloat16"
    tokens = to_numpy(ops.cast(ops.cast(tokens, dtype), "float32"))
    half, full = moe(name, dtype=policy), moe(name)
    for layer in (half, full):
        layer.build(tokens.shape)
    half.router.set_weights(full.router.get_weights())
    outputs, routing = call(half, tokens)
    assert keras.backend.standardize_dtype(outputs.dtype) == dtype
    _, expected = call(full, tokens)
    for actual, wanted in zip(routing, expected):
        assert keras.backend.standardize_dtype(actual.dtype) == "float32"
        assert_close(actual, wanted, 1e-5)


@pytest.mark.parametrize(
    "name", ["softmax_token_choice", "sinkhorn_expert_choice", "soft"]
)
def test_noise_is_seeded_and_for_training_alone(name):
    options = {"noise_std": 2.0}
    first, second = moe(name, **options), moe(name, **options)
    tokens = images()
    for layer in (first, second):
        layer.build(tokens.shape)
    second.set_weights(first.get_weights())
    drawn = [
        to_numpy(call(layer, tokens, training=True)[1].noisy_logits)
        for layer in (first, second)
    ]
    assert_same(*drawn)
    again = to_numpy(call(first, tokens, training=True)[1].noisy_logits)
    assert np.abs(again - drawn[0]).max() > 0.01
    _, routing = call(first, tokens)
    assert_same(routing.logits, routing.noisy_logits)


def test_token_choice_is_dropless_at_inference_and_where_asked():
    tokens = images()
    layer = moe("softmax_token_choice", dropless=True, group_size=12)
    for training in (False, True):
        plan, _ = call(layer.router, tokens, training=training)
        assert isinstance(plan, RaggedPlan)
    _, routing = call(layer, tokens, training=True)
    assert_same(to_numpy(routing.dispatched).sum(axis=-1), 2.0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_token_choice_normalises_gates(when):
    tokens = images()
    router = TokenChoiceRouter(
        4, 2, normalize_gates=when, capacity=2, noise_std=0.0, seed=0
    )
    _, routing = call(router, tokens, training=True)
    dispatched, combined, gates = (
        to_numpy(x) for x in (routing.dispatched, routing.combined, routing.gates)
    )
    largest = np.sort(gates, axis=-1)[..., -2:].sum(axis=-1, keepdims=True)
    kept = gates * dispatched
    total = largest if when == "before" else kept.sum(axis=-1, keepdims=True)
    assert (dispatched.sum(axis=-1) == 1).any()  # some choice was dropped
    assert_close(combined, kept / np.where(total > 0, total, 1.0), 1e-5)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lone_normalised_gate_warns(when):
    moe = {"moe_layers": [0, 1], "num_experts": 4, "num_selected_experts": 1}
    with pytest.warns(UserWarning, match="only auxiliary losses train") as caught:
        ViTBackbone.from_config({**SMALL, **moe, "normalize_gates": when})
    # One line, and so shown once.
    assert {(x.filename, str(x.message)) for x in caught} == {
        (__file__, str(caught[0].message))
    }
    TokenChoiceRouter(4, 1)
    TokenChoiceRouter(4, 2, normalize_gates=when)


@pytest.mark.parametrize("cls", [TokenChoiceRouter, ExpertChoiceRouter])
def test_each_modality_has_its_own_kernel(cls):
    tokens = images(batch=1, tokens=8)
    ids = np.array([[0, 1, 1, 0, 0, 1, 0, 0]])
    router = cls(4, num_modalities=2, noise_std=0.0)
    _, routing = call(router, tokens, modality_ids=ids)
    assert tuple(router.kernel.shape) == (2, 8, 4)
    kernel = to_numpy(router.kernel)
    expected = np.stack([token @ kernel[i] for token, i in zip(tokens[0], ids[0])])
    assert_close(to_numpy(routing.logits)[0], expected, 1e-4, 1e-5)
    assert router.cost((2, 8)).parameters == 2 * 8 * 4
    refuses("modality_ids=None", router, tokens)
    again = cls.from_config(router.get_config())
    assert again.num_modalities == 2


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("training", [False, True])
def test_tokens_stay_in_the_pool_of_their_modality(name, training):
    tokens = images(batch=2, tokens=8)
    # Tokens of an unknown modality are not routed.
    ids = np.array([[0, 1, 1, 0, -1, 1, 2, 0], [0] * 8])
    pools = [[0, 2], [1, 3]]
    layer = moe(name, num_modalities=2, expert_pools=pools, group_size=8)
    outputs, routing = call(layer, tokens, modality_ids=ids, training=training)
    assert np.isfinite(to_numpy(outputs)).all()
    dispatched = to_numpy(routing.dispatched)
    for modality, pool in enumerate(pools):
        others = [expert for expert in range(4) if expert not in pool]
        assert (dispatched[ids == modality][:, others] == 0).all()
        assert dispatched[ids == modality][:, pool].sum() > 0
    assert (dispatched[(ids < 0) | (ids > 1)] == 0).all()
    assert np.isfinite(to_numpy(routing.gates)).all()
    again = type(layer.router).from_config(layer.router.get_config())
    assert again.expert_pools == pools
    if not training:
        return

    def loss(outputs):
        return ops.sum(ops.square(outputs[0]))

    for gradient in training_gradients(layer, tokens, loss, training, modality_ids=ids):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", [name for name in NAMES if "expert" in name])
def test_experts_take_no_more_because_of_padding(name):
    """Eight real tokens among eight of padding, at inference and in a last group."""
    tokens = images(batch=1, tokens=8)
    padded = np.concatenate([tokens, np.full_like(tokens, np.nan)], axis=1)
    mask = np.arange(16)[None] < 8
    layer = moe(name, noise_std=0.0)
    alone, _ = call(layer, tokens)
    outputs, routing = call(layer, padded, mask=mask)
    assert to_numpy(routing.dispatched).sum() == 8
    if "sparsity" not in name:  # whose plan is bound by the padded group's C
        assert_close(to_numpy(outputs)[:, :8], alone, 1e-4, 1e-5)
    layer = moe(name, group_size=32)
    _, routing = call(layer, images(batch=5, tokens=8), training=True)
    served_by = to_numpy(routing.dispatched).reshape(40, 4).sum(axis=1)
    assert (served_by[:32].sum(), served_by[32:].sum()) == (32, 8)


PAGE = Path(__file__).parents[2] / "docs" / "routers.md"


def test_the_page_s_own_router_changes_the_logits(tmp_path):
    [code] = re.findall(
        r"```python\n([^`]+class CosineRouter[^`]+)```", PAGE.read_text("utf-8")
    )
    names = {}
    try:
        exec(code, names)
        model = names["model"]
        router = model.backbone.get_layer("block_1").feed_forward.router
        tokens = np.random.default_rng(0).normal(size=(2, 3, 64)).astype("float32")
        kernel = to_numpy(router.kernel)
        norms = np.linalg.norm(tokens, axis=-1)[..., None]
        expected = tokens @ kernel / norms / np.linalg.norm(kernel, axis=0) / 0.2
        _, record = router(tokens)
        assert_close(record.logits, expected, atol=1e-4)
        images = np.random.default_rng(1).uniform(-1, 1, (4, 16, 16, 1))
        before = kernel.copy()
        model.compile(keras.optimizers.Adam(1e-2))
        model.fit(images, np.arange(4), verbose=0)
        assert not np.allclose(to_numpy(router.kernel), before)
        model.save_to_preset(tmp_path)
        again = names["models"].from_preset(tmp_path)
        assert_same(model.predict(images, verbose=0), again.predict(images, verbose=0))
    finally:
        ROUTERS.pop("cosine", None)


WEIGHTS = {"gshard_loss_weight": "load_balance", "load_loss_weight": "load"}
WEIGHTS["importance_loss_weight"] = "importance"


@pytest.fixture(params=golden.cases("03_router_losses/router_*"))
def case(request, monkeypatch):
    arrays, config = golden.load(request.param)
    dispatcher = config["dispatcher"]
    options = {x: dispatcher.get(x) for x in ("capacity", "capacity_factor")}
    options["capacity_multiple_of"] = None if "capacity" in dispatcher else 4
    options |= {"noise_std": config["noise_std"], "evaluation": "official"}
    if "expert_choice" in request.param:
        router = ExpertChoiceRouter(config["E"], **options)
    else:
        priority = "max_gate" if dispatcher["batch_priority"] else "first_come"
        router = TokenChoiceRouter(
            config["E"], config["K"], priority=priority, **options
        )
    router.build(arrays["inputs/x"].shape)
    router.kernel.assign(arrays["params/dense/kernel"])
    if "inputs/noise_unit_normal" in arrays:
        set_noise(monkeypatch, arrays["inputs/noise_unit_normal"])
    return router, arrays, config, not config["deterministic"]


def auxiliary_loss(routing, router, config, training):
    # Without noise the reference leaves the load loss out.
    names = [x for x in WEIGHTS if config.get(x) and (training or x[:5] != "load_")]
    chosen = losses.get({WEIGHTS[name]: config[name] for name in names})
    return sum(loss(routing, router) for loss in chosen)


@pytest.mark.every_backend
def test_plan_and_losses(case):
    router, arrays, config, training = case
    plan, routing = router(arrays["inputs/x"], training=training)
    assert_same(plan.dense().dispatch_weights, arrays["outputs/dispatch_mask"])
    assert_close(
        plan.dense().combine_weights, arrays["outputs/combine_weights"], 1e-5, 1e-6
    )
    actual = auxiliary_loss(routing, router, config, training)
    assert_close(actual, arrays["outputs/metrics/auxiliary_loss"], 1e-4, 1e-6)


@pytest.mark.every_backend
@pytest.mark.parametrize("of", ["sum_auxiliary_loss", "sum_combine_cotangent"])
def test_gradients(case, of):
    router, arrays, config, training = case
    expected = arrays.get(f"grads/{of}/params/dense/kernel")
    if expected is None:
        pytest.skip("the reference has no loss where experts choose")

    def scalar(outputs):
        plan, routing = outputs
        if of == "sum_auxiliary_loss":
            return ops.sum(auxiliary_loss(routing, router, config, training))
        cotangent = arrays["inputs/cotangent_combine"]
        return ops.sum(ops.multiply(plan.dense().combine_weights, cotangent))

    (of_kernel,) = training_gradients(router, arrays["inputs/x"], scalar, training)
    assert_close(of_kernel, expected, 1e-4, 1e-6)
    (of_x,) = gradients.gradient(
        lambda x: scalar(router(x, training=training)), arrays["inputs/x"]
    )
    assert_close(of_x, arrays[f"grads/{of}/x"], 1e-4, 1e-6)
