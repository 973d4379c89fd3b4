"""Modalities: who is served first, and disjoint pools of experts (LIMoE, E.3)."""

import functools
import json

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_moe.layers import Attention, Experts, MoE, MoEConfig, TowerSpec
from keras_moe.ops import token_choice
from keras_moe.routers import PathwayAwareRouter, TokenChoiceRouter
from tests.calls import call
from tests.compare import assert_close, assert_same

to_numpy = ops.convert_to_numpy
IMAGE_FIRST, TEXT_FIRST = (0, 1), (1, 0)
# Every token wants expert 0, which has room for two.
LOGITS = np.array([[[3.0, 0.0]] * 5], "float32")
IDS = np.array([[0, 1, 0, 1, 1]])


def router_of(priority, **arguments):
    arguments = {"capacity": 2, "noise_std": 0.0, "seed": 0, **arguments}
    arguments.setdefault("kernel_initializer", "identity")
    return TokenChoiceRouter(2, 1, priority=priority, **arguments)


def served(router, logits=LOGITS, ids=IDS, mask=None, training=True):
    """The tokens that got their first choice."""
    arguments = {"modality_ids": ids}
    if mask is not None:
        arguments["mask"] = mask
    _, routing = call(router, logits, training=training, **arguments)
    return np.flatnonzero(to_numpy(routing.dispatched)[0, :, 0]).tolist()


@pytest.mark.parametrize(
    ("priority", "expected"),
    [("first_come", [0, 1]), (IMAGE_FIRST, [0, 2]), (TEXT_FIRST, [1, 3])],
)
def test_orders_by_hand(priority, expected):
    router = router_of(priority)
    assert served(router) == expected
    # Padding takes no place.
    mask = np.array([[True, False, True, True, True]])
    without = {"first_come": [0, 2], IMAGE_FIRST: [0, 2], TEXT_FIRST: [3, 4]}
    assert served(router, mask=mask) == without[priority]
    # At inference every token is served.
    assert served(router, training=False) == [0, 1, 2, 3, 4]


def test_orders_hold_at_inference_where_it_has_a_capacity():
    for priority, expected in ((TEXT_FIRST, [1, 3]), ("shuffled", [0, 1])):
        router = router_of(priority, eval_capacity=2, evaluation="official")
        assert served(router, training=False) == expected


def test_shuffled_tokens_are_drawn_anew_and_repeat_with_the_seed():
    logits = np.tile(LOGITS[:, :1], (1, 16, 1))
    router, again = (router_of("shuffled", seed=3) for _ in range(2))
    draws = [served(router, logits, IDS[:, :1].repeat(16, 1)) for _ in range(3)]
    assert all(len(draw) == 2 for draw in draws)
    assert len(set(map(tuple, draws))) > 1
    repeated = [served(again, logits, IDS[:, :1].repeat(16, 1)) for _ in range(3)]
    assert repeated == draws


def test_every_token_has_the_same_chance_when_shuffled():
    # 400 groups of four tokens, of which two are served.
    logits = np.tile(LOGITS[:, :4], (400, 1, 1))
    _, routing = call(router_of("shuffled"), logits, training=True)
    share = to_numpy(routing.dispatched)[..., 0].mean(axis=0)
    # Five standard deviations of a mean of 400 draws.
    assert_close(share, 0.5, atol=5 * 0.5 / 20)


def test_moe_layers_of_any_group_size_and_experts_of_several_kinds():
    # Groups of 4 cut the images of 3 tokens, and the last is padded. All tokens want
    # expert 0.
    options = {"priority": TEXT_FIRST, "noise_std": 0.0, "kernel_initializer": "zeros"}
    router = TokenChoiceRouter(2, 1, capacity=1, **options)
    ids = np.array([[0, 0, 1]] * 3)
    tokens = np.ones((3, 3, 8), "float32")
    moe = MoE(router, Experts(2, 8), group_size=4)
    _, routing = call(moe, tokens, training=True, modality_ids=ids)
    expected = [0, 0, 1, 0, 0, 1, 0, 0, 1]
    dispatched = to_numpy(routing.dispatched)
    assert_same(dispatched[..., 0].ravel(), expected)
    # Equation 8: C = ceil(1.1 x 0.75 x 3 / 1.75) = 2.
    aware = PathwayAwareRouter(2, 1, zero_experts=1, **options)
    _, routing = call(aware, tokens[:1], training=True, modality_ids=ids[:1])
    assert_same(to_numpy(routing.dispatched)[0, :, 0], [1, 0, 1])


def named(**arguments):
    return {"name": "softmax_token_choice", **arguments}


def test_a_config_takes_them_to_each_block():
    for priority, expected in (
        (TEXT_FIRST, [1, 0]),
        (np.array(IMAGE_FIRST), [0, 1]),
        ("shuffled", "shuffled"),
    ):
        moe = MoEConfig(moe_layers=[0], num_experts=4, router=named(priority=priority))
        plain = json.loads(json.dumps(moe.to_dict()))
        assert plain["router"]["priority"] == expected
        moe = MoEConfig.from_dict(plain)
        assert moe.modality_count == (None if isinstance(priority, str) else 2)
        spec = TowerSpec(num_layers=1, num_tokens=4, mlp_dim=8, moe=moe)
        (block,) = spec.blocks(lambda _: Attention(2, 4))
        router = block.feed_forward.router
        again = TokenChoiceRouter.from_config(router.get_config())
        assert router.priority == again.priority == expected
    pools = named(num_selected_experts=1, expert_pools=[[0], [1]])
    assert MoEConfig(router=pools).modality_count == 2
    assert MoEConfig(router=named(num_modalities=3)).modality_count == 3
    own = TokenChoiceRouter(4, priority=TEXT_FIRST)
    assert MoEConfig(router=own).modality_count == 2
    assert MoEConfig().modality_count is None


@pytest.mark.parametrize(("make", "received"), [
    (lambda: router_of((1, 1)), r"priority=\(1, 1\)"),
    (lambda: router_of((0, 1), num_modalities=3), "the 3 modality ids"),
    (lambda: router_of("text_first"), "'shuffled'.*priority='text_first'"),
    (lambda: router_of(TEXT_FIRST)(LOGITS, training=True),
     "Expected modality_ids .groups, tokens."),
    (lambda: token_choice(LOGITS, LOGITS, 1, 2, "shuffled"), "priority='shuffled'"),
])  # fmt: skip
def test_bad_orders_are_refused(make, received):
    with pytest.raises(ValueError, match=received):
        make()


@pytest.mark.parametrize("priority", [TEXT_FIRST, "shuffled"])
def test_a_model_of_unknown_batch_size_trains(priority):
    tokens, ids = keras.Input((5, 2)), keras.Input((5,), dtype="int32")
    router = router_of(priority, kernel_initializer="ones")
    moe = MoE(router, Experts(2, 4), group_size=4)
    model = keras.Model((tokens, ids), moe(tokens, modality_ids=ids)[0])
    model.compile("sgd", "mse")
    before = to_numpy(router.kernel)
    model.fit((LOGITS, IDS), LOGITS, verbose=0)
    assert np.abs(to_numpy(router.kernel) - before).max() > 0


POOLS = [[0, 3], [1, 2, 4]]
OWN = np.array([[1, 0, 0, 1, 0], [0, 1, 1, 0, 1]], bool)


@functools.cache
def pooled_router(num_modalities):
    # A first kernel of identity makes the tokens of modality 0 their logits.
    router = TokenChoiceRouter(
        5, 2, capacity=2, num_modalities=num_modalities, expert_pools=POOLS,
        priority=(1, 0), seed=0,
    )  # fmt: skip
    router.build((None, 8, 5))
    eye = np.eye(5, dtype="float32")
    router.kernel.assign(np.stack([eye, -eye]) if num_modalities else eye)
    return router


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    st.integers(0, 2**16),
    st.sampled_from([1e-3, 1.0, 1e4]),
    st.sampled_from([None, 2]),
    st.booleans(),
)
def test_no_token_reaches_the_experts_of_another_modality(
    seed, scale, num_modalities, training
):
    generator = np.random.default_rng(seed)
    tokens = scale * generator.normal(size=(2, 8, 5)).astype("float32")
    # Some ids are of no modality, and some tokens are padding.
    ids = generator.integers(-1, 3, (2, 8)).astype("int32")
    mask = generator.random((2, 8)) < 0.8
    router, inputs = pooled_router(num_modalities), {"mask": mask, "modality_ids": ids}
    _, routing = call(router, tokens, training=training, **inputs)
    dispatched, combined = (
        keras.ops.convert_to_numpy(x) for x in (routing.dispatched, routing.combined)
    )
    routed = mask & (ids >= 0) & (ids < 2)
    allowed = OWN[np.clip(ids, 0, 1)] & routed[..., None]
    assert not dispatched[~allowed].any()
    assert not combined[~allowed].any()
    if training:
        # All routed tokens want two of two or three experts with two slots each.
        assert dispatched.sum(axis=1).max() <= 2
    else:
        assert_same(dispatched.sum(axis=-1), 2 * routed)
    assert np.isfinite(combined).all()
