"""Disjoint pools of experts: no token of a modality reaches another's (LIMoE, E.3).

Axes: G groups, S group_size, E experts.
"""

import functools

import keras
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_moe.routers import TokenChoiceRouter
from tests.calls import call

POOLS = [[0, 3], [1, 2, 4]]
OWN = np.array([[1, 0, 0, 1, 0], [0, 1, 1, 0, 1]], bool)


@functools.cache
def router_of(num_modalities):
    # A first kernel of identity makes the tokens of modality 0 their logits.
    router = TokenChoiceRouter(
        5,
        2,
        capacity=2,
        num_modalities=num_modalities,
        expert_pools=POOLS,
        priority=(1, 0),
        seed=0,
    )
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
    _, routing = call(
        router_of(num_modalities),
        tokens,
        training=training,
        mask=mask,
        modality_ids=ids,
    )
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
        np.testing.assert_array_equal(dispatched.sum(axis=-1), 2 * routed)
    assert np.isfinite(combined).all()
