"""Dropless token choice: what capacity-limited routing gives where there is room."""

import keras
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_moe import ops
from tests.compare import assert_close, assert_same, to_numpy
from tests.gradients import gradient_and_outputs

some = settings(max_examples=30, deadline=None, derandomize=True, database=None)
# (G, S, E, Z, K), K up to E, and more experts than tokens; the last Z act in place.
SHAPES = [(2, 6, 4, 0, 2), (1, 5, 3, 0, 3), (3, 1, 6, 0, 1)]
SHAPES += [(2, 7, 6, 3, 2), (1, 9, 4, 1, 3), (2, 5, 5, 4, 2)]


@some
@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 999),
    ties=st.booleans(),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
    normalize_gates=st.sampled_from([None, "before", "after"]),
)
def test_rows_stand_by_expert_and_serve_every_choice(
    shape, seed, ties, masked, normalize_gates
):
    groups, tokens, experts, in_place, selected = shape
    generator = np.random.default_rng(seed)
    gates = generator.random((groups, tokens, experts)).astype("float32")
    if ties:
        gates = np.round(gates * 2) / 2
    mask = generator.random((groups, tokens)) >= masked
    options = {"normalize_gates": normalize_gates, "in_place_experts": in_place}
    plan = ops.dropless_token_choice(gates, gates, selected, mask, **options)
    limited = ops.token_choice(gates, gates, selected, tokens, mask=mask, **options)
    assert_close(plan.assignments(), limited.assignments(), 1e-6)
    assert isinstance(plan, ops.HeterogeneousPlan) == bool(in_place)
    # Only the first experts have rows.
    plan = ops.RaggedPlan(*map(to_numpy, plan.plan if in_place else plan))
    dispatched = to_numpy(limited.assignments()[0]).reshape(-1, experts)
    dispatched = dispatched[:, : experts - in_place]
    assert_same(plan.group_sizes, dispatched.sum(axis=0))
    num_rows = plan.group_sizes.sum()
    assert (plan.row_tokens[num_rows:] == -1).all()
    owner = np.repeat(np.arange(experts - in_place), plan.group_sizes)
    actual = sorted(zip(owner, plan.row_tokens[:num_rows]))
    assert actual == sorted(zip(*np.nonzero(dispatched.T)))
    # Each choice finds its row again.
    kept = plan.token_rows >= 0
    assert_same(kept.sum(axis=-1).ravel(), dispatched.sum(axis=1))
    token = np.arange(groups * tokens).reshape(groups, tokens, 1)
    token = np.broadcast_to(token, kept.shape)
    assert_same(plan.row_tokens[plan.token_rows[kept]], token[kept])


def test_outputs_and_gradients_are_those_of_room_for_everybody():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, 5, 3)).astype("float32")
    logits = generator.normal(size=(2, 5, 4)).astype("float32")
    cotangent = generator.normal(size=(2, 5, 3)).astype("float32")
    mask = np.arange(10).reshape(2, 5) != 7

    def layer(kind):
        def run(x, logits):
            gates = keras.ops.softmax(logits)
            if kind == "limited":
                plan = ops.token_choice(gates, gates, 2, 5, mask=mask)
            else:
                plan = ops.dropless_token_choice(gates, gates, 2, mask)
            plan = plan.dense() if kind == "dense" else plan
            # Identity experts: what is left are the gates.
            outputs = plan.combine(plan.dispatch(x))
            return keras.ops.sum(keras.ops.multiply(outputs, cotangent)), [outputs]

        return gradient_and_outputs(run, x, logits)

    for kind in ("dropless", "dense"):
        assert_close(layer(kind), layer("limited"), 1e-05, 1e-06)
    assert (layer("dropless")[1][0][1, 2] == 0).all()
