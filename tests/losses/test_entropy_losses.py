"""The entropy losses of LIMoE: golden data, hand computation, masks and wrappers.

Axes: G groups, S group_size, E experts, K selected experts, M modalities.
"""

import inspect
import json
import math
import warnings
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_moe import losses
from keras_moe.layers import Experts, MoE
from keras_moe.ops import Routing
from keras_moe.routers import TokenChoiceRouter
from tests import golden
from tests.gradients import gradient_and_outputs, one_program

LOG2 = math.log(2)

# Every loss as a function of (logits, modality_ids, mask), with K = 2 and M = 2.
LOSSES = {
    "local": lambda x, ids, mask=None: losses.local_entropy_loss(x, mask=mask),
    "global": lambda x, ids, mask=None: losses.global_entropy_loss(x, mask=mask),
    "threshold": lambda x, ids, mask=None: losses.global_entropy_loss(
        x, threshold=3.0, mask=mask
    ),
    "mutual": lambda x, ids, mask=None: losses.mutual_information_loss(
        x, ids, 2, mask=mask
    ),
    "target": lambda x, ids, mask=None: losses.target_entropy_loss(x, 2, mask=mask),
    "merged": lambda x, ids, mask=None: losses.merged_entropy_loss(x, 2, mask=mask),
}


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def tensor(array):
    return None if array is None else keras.ops.convert_to_tensor(array)


def numbers(fn, *arrays):
    """The result of a function of arrays, as the backend computes it."""
    return keras.ops.convert_to_numpy(one_program(fn)(*map(tensor, arrays)))


def with_gradient(loss_of, logits):
    """A loss (G,), and the gradient of its sum."""

    def program(logits):
        loss = loss_of(logits)
        return keras.ops.sum(loss), (loss,)

    (found,), (loss,) = gradient_and_outputs(program, logits)
    return loss, found


def entropy(*p):
    return -sum(x * math.log(x) for x in p if x > 0)


# Golden data

# Losses, the name of the values, and the name of the gradient of their sum.
GOLDEN = {
    "local": ("local_entropy", "sum_local_entropy"),
    "global": ("global_loss_no_threshold", "sum_global_loss_no_threshold"),
    "threshold": ("global_loss", "sum_global_loss"),
    "target": ("target_entropy_local", "sum_target_entropy_local"),
    "merged": ("merged_entropy_local", "sum_merged_entropy_local"),
    "mutual": ("neg_mutual_information", "sum_neg_mutual_information"),
    "z": ("z_loss", "sum_z_loss"),
}


def of_golden(name, logits, ids, tau, config):
    """The losses of a case, one per modality or one for all: a list of (1,)."""
    selected, num_modalities = config["K"], config["modalities"]
    if name == "mutual":
        return [losses.mutual_information_loss(logits, ids, num_modalities)]
    if name == "z":
        return [losses.z_loss(logits)]
    of_modality = {
        "local": lambda m, mask: losses.local_entropy_loss(logits, mask),
        "global": lambda m, mask: losses.global_entropy_loss(logits, mask=mask),
        "threshold": lambda m, mask: losses.global_entropy_loss(logits, tau[m], mask),
        "target": lambda m, mask: losses.target_entropy_loss(logits, selected, mask),
        "merged": lambda m, mask: losses.merged_entropy_loss(logits, selected, mask),
    }[name]
    return [of_modality(m, keras.ops.equal(ids, m)) for m in range(num_modalities)]


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("case", golden.cases("09_limoe_losses/*"))
def test_golden(case, name):
    arrays, config = golden.load(case)
    value, of_sum = GOLDEN[name]
    ids = tensor(arrays["inputs/modality"][None])

    def program(logits):
        found = of_golden(name, logits, ids, arrays["inputs/tau"], config)
        found = keras.ops.concatenate(found)
        return keras.ops.sum(found), (found,)

    (found,), (loss,) = gradient_and_outputs(
        program, arrays["inputs/logits"].astype("float32")[None]
    )
    expected = np.atleast_1d(arrays[f"outputs/{value}"])
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        found[0], arrays[f"grads/{of_sum}/logits"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("case", golden.cases("09_limoe_losses/*"))
def test_golden_merged_entropy_of_each_token(case):
    arrays, config = golden.load(case)
    logits = arrays["inputs/logits"].astype("float32")[:, None]
    found = numbers(lambda x: losses.merged_entropy_loss(x, config["K"]), logits)
    np.testing.assert_allclose(
        found, arrays["outputs/merged_entropy_per_token"], rtol=1e-5
    )


# By hand


def test_local_entropy_by_hand():
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.1, 0.2, 0.7])
    logits = np.log([[p, q], [p, p]]).astype("float32")
    loss, found = with_gradient(losses.local_entropy_loss, logits)
    h_p, h_q = entropy(*p), entropy(*q)
    np.testing.assert_allclose(loss, [(h_p + h_q) / 2, h_p], rtol=1e-6)
    # d H / d logits = -p (log p + H), and each of the two tokens counts half.
    expected = -q * (np.log(q) + h_q) / 2
    np.testing.assert_allclose(found[0, 1], expected, atol=1e-6)


def test_global_entropy_by_hand():
    # The tokens are sure, of different experts: p = (3/4, 1/4, 0).
    logits = 100 * np.eye(3, dtype="float32")[None, [0, 0, 1, 0]]
    h = entropy(0.75, 0.25)
    for tau, expected in [(None, -h), (1.0, 1.0 - h), (h / 2, 0.0), (0.0, 0.0)]:
        found = numbers(lambda x, t=tau: losses.global_entropy_loss(x, t), logits)
        np.testing.assert_allclose(found, [expected], rtol=1e-6)


@pytest.mark.parametrize("above", [False, True])
def test_the_threshold_ends_the_gradient(above):
    logits = normal(0, 1, 5, 4)
    _, free = with_gradient(losses.global_entropy_loss, logits)
    threshold = 0.1 if above else math.log(4)
    loss, found = with_gradient(
        lambda x: losses.global_entropy_loss(x, threshold), logits
    )
    assert (loss[0] > 0) is not above
    np.testing.assert_allclose(found, 0 * free if above else free, rtol=1e-6)
    assert np.abs(free).max() > 1e-3


def test_mutual_information_by_hand():
    # Modality 0, three tokens: p = (1, 0, 0). Modality 1, one token: (0, 1/2, 1/2).
    far = [-100.0, 0.0, 0.0]
    logits = np.array([[[100.0, 0, 0], far, [100.0, 0, 0], [100.0, 0, 0]]], "float32")
    ids = np.array([[0, 1, 0, 0]])
    found = numbers(lambda x, i: losses.mutual_information_loss(x, i, 2), logits, ids)
    # Weight 1/2 each, whatever the number of tokens.
    expected = entropy(0.5, 0.5) / 2 - entropy(0.5, 0.25, 0.25)
    np.testing.assert_allclose(found, [expected], rtol=1e-6)


def test_mutual_information_leaves_out_absent_modalities():
    logits, ids = normal(0, 3, 6, 4), np.array([[0, 1] * 3, [0, 2] * 3, [1] * 6])
    found = numbers(lambda x, i: losses.mutual_information_loss(x, i, 3), logits, ids)
    two = numbers(
        lambda x, i: losses.mutual_information_loss(x, i, 2), logits[:2], ids[:2] > 0
    )
    np.testing.assert_allclose(found[:2], two, rtol=1e-5)
    assert np.all(two < -1e-3)
    # One modality says nothing of the experts.
    np.testing.assert_allclose(found[2], 0, atol=1e-6)


def test_mutual_information_leaves_out_tokens_of_other_modalities():
    logits, ids = normal(0, 1, 6, 4), np.array([[0, 1, 7, 0, 1, -1]])
    both = np.isin(ids, [0, 1])
    found, expected = (
        numbers(LOSSES["mutual"], logits[:, tokens], ids[:, tokens])
        for tokens in (both[0] | True, both[0])
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert expected[0] < -1e-3


def test_target_entropy_by_hand():
    # Entropies log 4 and 0, whose mean is log 2: the target of K = 2, and no token's.
    logits = np.array([[[0, 0, 0, 0], [100, 0, 0, 0]]], "float32")
    for selected, expected in [(1, LOG2**2), (2, 0), (4, LOG2**2)]:
        found = numbers(lambda x, k=selected: losses.target_entropy_loss(x, k), logits)
        np.testing.assert_allclose(found, [expected], rtol=1e-6, atol=1e-12)


def test_merged_entropy_by_hand():
    p = np.array([[0.4, 0.1, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]])
    logits = np.log(p)[None].astype("float32")
    for selected, expected in {
        1: entropy(0.4, 0.6) + entropy(0.25, 0.75),
        2: entropy(0.7, 0.3) + entropy(0.5, 0.5),
        3: entropy(0.9, 0.1) + entropy(0.75, 0.25),
        4: 0.0,
    }.items():
        found = numbers(lambda x, k=selected: losses.merged_entropy_loss(x, k), logits)
        np.testing.assert_allclose(found, [expected / 2], rtol=1e-5, atol=1e-6)


def test_merged_entropy_of_sure_tokens_is_exact():
    # 1 - p has no correct digit in float32; the sum of the other gates has all.
    logits = np.array([[[20.0, 0.0, 0.0]]], "float32")
    rest = 2 / (math.exp(20) + 2)
    expected = -rest * math.log(rest)
    found = numbers(lambda x: losses.merged_entropy_loss(x, 1), logits)
    np.testing.assert_allclose(found, [expected], rtol=1e-4)


# What must hold for each


@pytest.mark.parametrize("name", LOSSES)
def test_one_float32_number_per_group(name):
    logits, ids = normal(0, 3, 6, 4), np.tile([0, 1, 1], (3, 2))
    loss = numbers(LOSSES[name], logits, ids)
    assert loss.shape == (3,)
    assert loss.dtype == "float32"
    for g in range(3):
        alone = numbers(LOSSES[name], logits[g : g + 1], ids[g : g + 1])
        np.testing.assert_allclose(alone, loss[g : g + 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("value", [0.0, 1e4])
def test_masked_tokens_do_not_count(name, value):
    logits, ids = normal(0, 2, 6, 4), np.tile([0, 1, 1], (2, 2))
    real = [False, False, True, True, True, False]
    without = numbers(LOSSES[name], logits[:, real], ids[:, real])
    logits[:, np.logical_not(real)] = value
    mask = tensor(np.tile(real, (2, 1)))
    loss, found = with_gradient(lambda x: LOSSES[name](x, ids, mask), logits)
    np.testing.assert_allclose(loss, without, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[:, np.logical_not(real)], 0)
    assert np.all(np.isfinite(found))
    # Tokens that do count have a gradient.
    assert np.abs(found[:, real]).max() > 1e-3


@pytest.mark.parametrize("name", LOSSES)
def test_a_group_without_real_tokens_has_no_loss(name):
    logits, ids = normal(0, 2, 4, 3), np.tile([0, 1], (2, 2))
    mask = tensor(np.array([[True] * 4, [False] * 4]))
    loss, found = with_gradient(lambda x: LOSSES[name](x, ids, mask), logits)
    assert abs(loss[0]) > 1e-3
    assert loss[1] == 0
    assert np.all(np.isfinite(found))
    np.testing.assert_array_equal(found[1], 0)


NEVER = -np.inf


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param([[1e4, 0, -1e4], [0, 1e4, 1e4], [1e4, -1e4, 9e3]], id="huge"),
        pytest.param([[0.0, NEVER, NEVER]] * 3, id="one expert may"),
        pytest.param([[0.0, NEVER, NEVER], [NEVER, 5.0, NEVER]], id="one expert each"),
        pytest.param([[1.0, 2.0, NEVER], [NEVER, 0.0, 0.0]], id="two experts may"),
        pytest.param([[0.0, -88, -95], [-104, 0.0, -120]], id="about underflow"),
        pytest.param([[0.0, 0.0, 0.0]] * 2, id="all logits equal"),
        pytest.param([[1.0, 2.0, 3.0]], id="one token"),
    ],
)
def test_extremes(name, tokens):
    logits = np.array([tokens], "float32")
    ids = np.arange(len(tokens))[None] % 2
    loss, found = with_gradient(lambda x: LOSSES[name](x, tensor(ids)), logits)
    np.testing.assert_allclose(loss, [expected_loss(name, logits[0], ids[0])], **CLOSE)
    assert np.all(np.isfinite(found))
    np.testing.assert_allclose(
        found[0], expected_gradient(name, logits[0], ids[0]), **CLOSE
    )


CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def expected_loss(name, logits, ids, kept=None):
    """A group's loss in float64, straight from the definitions.

    `kept` are the experts to merge, (S, 2): the largest of the tokens if None.
    """
    p = softmax64(logits)
    mean = entropy(*p.mean(axis=0))
    local = np.mean([entropy(*token) for token in p])
    if name == "local":
        return local
    if name in ("global", "threshold"):
        return -mean if name == "global" else max(0.0, 3.0 - mean)
    if name == "target":
        return (LOG2 - local) ** 2
    if name == "merged":
        kept = two_largest(logits) if kept is None else kept
        mass = np.take_along_axis(p, kept, axis=-1).sum(axis=-1)
        rest = p.sum(axis=-1) - mass
        merged = np.stack([mass, rest], axis=-1)
        return np.mean([entropy(*token) for token in merged])
    marginals = [p[ids == m].mean(axis=0) for m in (0, 1) if np.any(ids == m)]
    marginal_entropies = [entropy(*marginal) for marginal in marginals]
    return np.mean(marginal_entropies) - entropy(*np.mean(marginals, axis=0))


def two_largest(logits):
    # Stable, so that ties go to the lowest expert.
    return np.argsort(-logits, axis=-1, kind="stable")[:, :2]


def softmax64(logits):
    p = np.exp(logits.astype("float64") - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def expected_gradient(name, logits, ids):
    """Central differences in float64; the limit, zero, at a logit of -inf.

    Where gates tie, the experts that are merged stay: a step would exchange them.
    """
    kept = two_largest(logits)
    found = np.zeros(logits.shape)
    for place in np.ndindex(*logits.shape):
        if np.isinf(logits[place]):
            continue
        ends = []
        for step in (1e-5, -1e-5):
            moved = logits.astype("float64")
            moved[place] += step
            ends.append(expected_loss(name, moved, ids, kept))
        found[place] = (ends[0] - ends[1]) / 2e-5
    return found


@pytest.mark.filterwarnings("ignore:You are using a softmax over axis -1")
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "threshold"])
def test_one_expert_leaves_nothing_to_choose(name):
    def loss_of(x):
        if name in ("target", "merged"):
            return getattr(losses, f"{name}_entropy_loss")(x, 1)
        return LOSSES[name](x, tensor(np.zeros((2, 3), "int32")))

    loss, found = with_gradient(loss_of, normal(0, 2, 3, 1))
    np.testing.assert_allclose(loss, [0, 0], atol=1e-6)
    np.testing.assert_allclose(found, 0, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "received"),
    [
        (lambda x: losses.target_entropy_loss(x, 5), "num_selected_experts=5"),
        (lambda x: losses.merged_entropy_loss(x, 0), "num_selected_experts=0"),
        (lambda x: losses.global_entropy_loss(x, -1.0), "threshold=-1.0"),
        (lambda x: losses.global_entropy_loss(x, math.inf), "threshold=inf"),
        (lambda x: losses.global_entropy_loss(x, True), "threshold=True"),
        (
            lambda x: losses.mutual_information_loss(x, np.zeros((2, 6)), 0),
            "num_modalities=0",
        ),
        (lambda x: losses.LocalEntropyLoss(modality=-1), "modality=-1"),
        (lambda x: losses.LocalEntropyLoss(modality=0.5), "modality=0.5"),
        (lambda x: losses.LocalEntropyLoss(-2.0), "weight=-2.0"),
        (lambda x: losses.GlobalEntropyLoss(threshold="9"), "threshold='9'"),
        (lambda x: losses.MutualInformationLoss(num_modalities=0), "num_modalities=0"),
        (lambda x: losses.AggregateLoss([]), "weights=[]"),
        (lambda x: losses.AggregateLoss({"z": 0.0, "load": 0}), "weights=[0.0, 0.0]"),
        (lambda x: losses.AggregateLoss({"z": 1.0}, weight=-1), "weight=-1"),
        (lambda x: losses.AggregateLoss({"y": 1.0}), "'y'"),
    ],
)
def test_bad_input(call, received):
    with pytest.raises(ValueError, match=r"Expected (.|\n)*received: ") as caught:
        call(normal(0, 2, 6, 4))
    assert received in str(caught.value)


# As objects


def routing_of(logits):
    """A record of which only the clean logits may be read."""
    return Routing(**{**dict.fromkeys(Routing._fields), "logits": logits})


ROUTER = SimpleNamespace(num_selected_experts=2, num_experts=4, noise_std=1.0)

WRAPPED = {
    "local": losses.LocalEntropyLoss,
    "global": losses.GlobalEntropyLoss,
    "threshold": lambda weight, modality=None: losses.GlobalEntropyLoss(
        weight, 3.0, modality
    ),
    "target": losses.TargetEntropyLoss,
    "merged": losses.MergedEntropyLoss,
}
MUTUAL_INFORMATION = losses.MutualInformationLoss(1.0, num_modalities=3)
IDS = np.array([[0, 1, 0, 2, 1, 0], [1, 1, 1, 0, 0, 1], [0] * 6])
MASK = np.array([[True] * 6, [True, False, True, True, True, False], [True] * 6])


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("masked", [False, True])
def test_a_modality_is_the_loss_of_its_tokens(name, masked):
    logits, mask = normal(0, 3, 6, 4), MASK if masked else np.ones_like(MASK)
    loss = WRAPPED[name](2.5, modality=1)
    found = numbers(
        lambda x, m, ids: loss(routing_of(x), ROUTER, m if masked else None, ids),
        *(logits, mask, IDS),
    )
    groups = []
    for g in range(2):
        chosen = mask[g] & (IDS[g] == 1)
        alone = numbers(LOSSES[name], logits[g : g + 1, chosen], IDS[g : g + 1, chosen])
        # Two of three groups have a token of the modality.
        np.testing.assert_allclose(found[g : g + 1], 2.5 * alone * 3 / 2, rtol=1e-5)
        assert abs(found[g]) > 1e-3
        groups.append(alone)
    # The last group has none, and does not dilute the mean of the others.
    assert found[2] == 0
    np.testing.assert_allclose(found.mean(), 2.5 * np.mean(groups), rtol=1e-5)


@pytest.mark.parametrize(
    "loss",
    [*(make(1.0, modality=2) for make in WRAPPED.values()), MUTUAL_INFORMATION],
    ids=[*WRAPPED, "mutual_information"],
)
def test_a_modality_that_no_group_has_costs_nothing(loss):
    logits, ids = normal(0, 2, 6, 4), np.zeros((2, 6), "int32")
    found = numbers(lambda x, i: loss(routing_of(x), ROUTER, None, i), logits, ids)
    np.testing.assert_array_equal(found, 0.0)


def test_groups_of_padding_do_not_dilute_either():
    logits, loss = normal(0, 2, 6, 4), losses.LocalEntropyLoss()
    mask = np.array([[True] * 6, [False] * 6])
    found = numbers(lambda x, m: loss(routing_of(x), ROUTER, m), logits, mask)
    expected = numbers(LOSSES["local"], logits[:1], IDS[:1])
    np.testing.assert_allclose(found.mean(), expected[0], rtol=1e-5)


@pytest.mark.parametrize("name", WRAPPED)
def test_without_a_modality_all_tokens_count(name):
    logits = normal(0, 3, 6, 4)
    loss = WRAPPED[name](0.5)
    expected = 0.5 * numbers(LOSSES[name], logits, IDS)
    for ids in (None, tensor(IDS)):
        found = numbers(lambda x, i=ids: loss(routing_of(x), ROUTER, None, i), logits)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    masked = numbers(lambda x, m: loss(routing_of(x), ROUTER, m), logits, MASK)
    by_function = numbers(lambda x, m: LOSSES[name](x, None, m), logits, MASK)
    np.testing.assert_allclose(masked, 0.5 * by_function, rtol=1e-5)
    assert abs(masked - expected)[1] > 1e-4


def test_mutual_information_loss_is_its_function():
    logits = normal(0, 3, 6, 4)
    loss = losses.MutualInformationLoss(0.5, num_modalities=3)
    found = numbers(
        lambda x, m, i: loss(routing_of(x), ROUTER, m, i), logits, MASK, IDS
    )
    expected = 0.5 * numbers(
        lambda x, m, i: losses.mutual_information_loss(x, i, 3, m), logits, MASK, IDS
    )
    # The last group has one modality alone, and does not count.
    np.testing.assert_allclose(found, expected * 3 / 2, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.mean(), expected[:2].mean(), rtol=1e-5)
    assert found[0] < -1e-3


@pytest.mark.parametrize(
    "loss",
    [
        losses.LocalEntropyLoss(modality=0),
        losses.GlobalEntropyLoss(modality=1),
        losses.TargetEntropyLoss(modality=1),
        losses.MergedEntropyLoss(modality=1),
        losses.MutualInformationLoss(),
        losses.AggregateLoss([losses.ZLoss(), losses.LocalEntropyLoss(modality=1)]),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_a_modality_needs_modality_ids(loss):
    routing = routing_of(tensor(normal(0, 1, 6, 4)))
    with pytest.raises(
        ValueError, match=r"Expected modality_ids.*received: modality_ids=None"
    ):
        loss(routing, ROUTER)


PARTS = (
    losses.ImportanceLoss(),
    losses.ZLoss(),
    losses.LocalEntropyLoss(modality=1),
    losses.GlobalEntropyLoss(threshold=1.3, modality=1),
    losses.MutualInformationLoss(),
)


def test_the_aggregate_of_equal_weights_is_the_mean_times_0_04():
    logits, ids = normal(0, 3, 6, 4), tensor(IDS)

    def program(x):
        found = [part(routing_of(x), ROUTER, None, ids) for part in PARTS]
        whole = losses.AggregateLoss(PARTS)(routing_of(x), ROUTER, None, ids)
        return keras.ops.stack([whole, *found])

    whole, *found = numbers(program, logits)
    np.testing.assert_allclose(whole, 0.04 * np.mean(found, axis=0), rtol=1e-5)
    assert np.abs(whole).min() > 1e-4


def test_the_aggregate_of_other_weights_is_their_weighted_mean():
    logits, mask = normal(0, 3, 6, 4), tensor(MASK)
    weights = (3.0, 0.5, 0.0)
    functions = (
        losses.z_loss,
        losses.local_entropy_loss,
        # Not defined without noisy logits, and not computed.
        lambda x, mask: keras.ops.zeros((3,)),
    )

    def program(x):
        whole = losses.AggregateLoss(
            {"z": 3.0, "local_entropy": 0.5, "load": 0.0}, weight=0.2
        )(routing_of(x), ROUTER, mask)
        return keras.ops.stack([whole, *(fn(x, mask) for fn in functions)])

    whole, *found = numbers(program, logits)
    expected = 0.2 * np.average(found, axis=0, weights=weights)
    np.testing.assert_allclose(whole, expected, rtol=1e-5)


def test_an_aggregate_may_hold_an_aggregate():
    inner = losses.AggregateLoss({"z": 1.0, "local_entropy": 1.0}, weight=2.0)
    outer = losses.AggregateLoss([inner, losses.ImportanceLoss(6.0)], weight=0.5)

    def program(x):
        return keras.ops.stack(
            [
                outer(routing_of(x), ROUTER),
                losses.z_loss(x),
                losses.local_entropy_loss(x),
                losses.importance_loss(x),
            ]
        )

    whole, z, local, importance = numbers(program, normal(0, 2, 6, 4))
    expected = 0.5 * (2 * (z + local) / 2 + 6 * importance) / 8
    np.testing.assert_allclose(whole, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        losses.LocalEntropyLoss(weight=0.3, modality=1),
        losses.GlobalEntropyLoss(weight=0.2, threshold=1.5, modality=0),
        losses.MutualInformationLoss(weight=0.1, num_modalities=3),
        losses.TargetEntropyLoss(weight=0.4, modality=2),
        losses.MergedEntropyLoss(weight=0.6, modality=1),
        losses.AggregateLoss(
            [
                losses.GlobalEntropyLoss(weight=0.5, threshold=0.0, modality=1),
                losses.AggregateLoss({"mutual_information": 0.7}, weight=3.0),
            ],
            weight=0.05,
        ),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_config_round_trip(loss):
    config = loss.get_config()
    # Every argument is there, and none at its default.
    defaults = type(loss)(**({"losses": {"z": 1}} if "losses" in config else {}))
    assert config.keys() == inspect.signature(type(loss)).parameters.keys()
    assert all(config[name] != defaults.get_config()[name] for name in config)
    stored = json.loads(json.dumps(losses.serialize([loss])))
    by_keras = json.loads(json.dumps(keras.saving.serialize_keras_object(loss)))
    for again in (
        *losses.get(stored),
        keras.saving.deserialize_keras_object(by_keras),
        type(loss).from_config(json.loads(json.dumps(config))),
    ):
        assert type(again) is type(loss)
        assert again.get_config() == config


def test_losses_by_name():
    classes = {
        "local_entropy": losses.LocalEntropyLoss,
        "global_entropy": losses.GlobalEntropyLoss,
        "mutual_information": losses.MutualInformationLoss,
        "target_entropy": losses.TargetEntropyLoss,
        "merged_entropy": losses.MergedEntropyLoss,
    }
    found = losses.get({name: 0.1 * (i + 1) for i, name in enumerate(classes)})
    assert [type(loss) for loss in found] == list(classes.values())
    assert [loss.weight for loss in found] == [0.1 * (i + 1) for i in range(5)]


# Thresholds


def test_thresholds_above_the_largest_entropy_warn():
    """log 8 for 4 experts: the loss is at least log 2."""
    logits = tensor(np.zeros((1, 3, 4), "float32"))
    received = r"received: threshold=2\.0794\..*at least 0\.6931"
    with pytest.warns(UserWarning, match=received):
        found = losses.global_entropy_loss(logits, threshold=math.log(8))
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(found), math.log(2), rtol=1e-5
    )
    loss = losses.GlobalEntropyLoss(threshold=math.log(8), modality=1)
    router = TokenChoiceRouter(num_experts=4, num_modalities=2)
    with pytest.warns(UserWarning, match=received):
        loss.check_router(router)
    with pytest.warns(UserWarning, match=received):
        losses.AggregateLoss([losses.ZLoss(), loss]).check_router(router)
    # Modality 1 has a pool of 2.
    pools = [[0, 1, 2, 3], [0, 1]]
    router = TokenChoiceRouter(num_experts=4, expert_pools=pools)
    with pytest.warns(UserWarning, match="entropy of 2 experts.*at least 0.6931"):
        losses.GlobalEntropyLoss(threshold=math.log(4), modality=1).check_router(router)


def test_thresholds_up_to_the_largest_entropy_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = tensor(np.zeros((1, 3, 4), "float32"))
        for threshold in (None, 0.0, math.log(4), float(np.float32(math.log(4)))):
            losses.global_entropy_loss(logits, threshold)
            loss = losses.GlobalEntropyLoss(threshold=threshold)
            loss.check_router(TokenChoiceRouter(num_experts=4))
            loss(routing_of(logits), ROUTER)
        unused = losses.GlobalEntropyLoss(0.0, threshold=9.0)
        unused.check_router(TokenChoiceRouter(num_experts=4))


# Routers


class SoftRouter:
    """Stands for a router whose logits are by slot."""

    has_expert_logits = False
    noise_std = 1.0


class ExpertChoiceRouter:
    """Stands for a router without K."""

    noise_std = 1.0


EVERY = {name: loss(1.0) for name, loss in losses.auxiliary.BY_NAME.items()}
EVERY["aggregate"] = losses.AggregateLoss({"z": 1.0})


@pytest.mark.parametrize("name", EVERY)
def test_no_loss_fits_routers_with_logits_by_slot(name):
    EVERY[name].check_router(TokenChoiceRouter(num_experts=4))
    expected = (
        "Expected a router with one logit per expert; received: router=SoftRouter"
    )
    with pytest.raises(ValueError, match=expected):
        EVERY[name].check_router(SoftRouter())


EVERY["all_choices"] = losses.LoadBalanceLoss(choices="all")
NEED_K = (
    "all_choices",
    "load",
    "heterogeneous_balance",
    "target_entropy",
    "merged_entropy",
)


@pytest.mark.parametrize("name", [*NEED_K, "aggregate"])
def test_some_losses_need_the_number_of_selected_experts(name):
    loss = EVERY[name]
    if name == "aggregate":
        loss = losses.AggregateLoss({"z": 1.0, "target_entropy": 1.0})
    loss.check_router(TokenChoiceRouter(num_experts=4))
    with pytest.raises(
        ValueError, match="num_selected_experts; received: router=ExpertChoiceRouter"
    ):
        loss.check_router(ExpertChoiceRouter())


@pytest.mark.parametrize(
    "name",
    [name for name in EVERY if name not in NEED_K],
)
def test_the_others_do_not(name):
    EVERY[name].check_router(ExpertChoiceRouter())


def test_the_aggregate_checks_its_load_loss():
    loss = losses.AggregateLoss({"load": 1.0})
    with pytest.raises(ValueError, match=r"received: noise_std=0\.0"):
        loss.check_router(TokenChoiceRouter(num_experts=4, noise_std=0.0))


def test_losses_of_weight_zero_fit_every_router():
    for name, cls in losses.auxiliary.BY_NAME.items():
        cls(0.0).check_router(SoftRouter())
        losses.AggregateLoss({name: 1.0}, weight=0).check_router(SoftRouter())
    losses.AggregateLoss({"load": 0.0, "z": 1.0}).check_router(ExpertChoiceRouter())


def test_an_moe_layer_adds_them():
    parts = ("local_entropy", "global_entropy", "target_entropy", "merged_entropy")
    layer = MoE(
        router=TokenChoiceRouter(num_experts=4, num_selected_experts=2, seed=0),
        experts=Experts(num_experts=4, mlp_dim=8),
        auxiliary_losses=[
            *losses.get(dict.fromkeys(parts, 1.0)),
            losses.AggregateLoss(dict.fromkeys(parts, 2.0)),
        ],
    )
    _, routing = layer(normal(0, 3, 5, 8), training=True)
    # One group of the whole batch.
    logits = keras.ops.reshape(routing.logits, (1, 15, 4))
    expected = [
        keras.ops.convert_to_numpy(LOSSES[name](logits, None))[0]
        for name in ("local", "global", "target", "merged")
    ]
    found = [keras.ops.convert_to_numpy(loss) for loss in layer.losses]
    np.testing.assert_allclose(
        found, [*expected, 0.04 * np.mean(expected)], rtol=1e-5, atol=1e-7
    )
