"""The entropy losses of LIMoE: golden data, hand computation and masks."""

import math

import keras
import numpy as np
import pytest

from keras_moe import losses
from tests import golden
from tests.compare import assert_close, assert_same
from tests.gradients import gradient_and_outputs
from tests.losses.loss_table import (
    LOSSES,
    LOSSES_OF_TOKENS,
    normal,
    numbers,
    tensor,
    with_gradient,
)

# Thresholds that no entropy reaches leave the losses above 0.
pytestmark = pytest.mark.filterwarnings("ignore:Expected threshold")

LOG2 = math.log(2)


def entropy(*p):
    return -sum(x * math.log(x) for x in p if x > 0)


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
        return [losses.router_z_loss(logits)]
    of_modality = {
        "local": lambda m, mask: losses.local_entropy_loss(logits, mask),
        "global": lambda m, mask: losses.global_entropy_loss(logits, mask=mask),
        "threshold": lambda m, mask: losses.global_entropy_loss(logits, tau[m], mask),
        "target": lambda m, mask: losses.target_entropy_loss(logits, selected, mask),
        "merged": lambda m, mask: losses.merged_entropy_loss(logits, selected, mask),
    }[name]
    return [of_modality(m, keras.ops.equal(ids, m)) for m in range(num_modalities)]


@pytest.mark.every_backend
@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("case", golden.cases("09_limoe_losses/*"))
def test_golden(case, name):
    arrays, config = golden.load(case)
    value, of_sum = GOLDEN[name]
    ids = tensor(arrays["inputs/modality"][None])

    def program(logits):
        losses_of_groups = of_golden(name, logits, ids, arrays["inputs/tau"], config)
        losses_of_groups = keras.ops.concatenate(losses_of_groups)
        return keras.ops.sum(losses_of_groups), (losses_of_groups,)

    (actual,), (loss,) = gradient_and_outputs(
        program, arrays["inputs/logits"].astype("float32")[None]
    )
    expected = np.atleast_1d(arrays[f"outputs/{value}"])
    assert_close(loss, expected, 1e-5, 1e-6)
    assert_close(actual[0], arrays[f"grads/{of_sum}/logits"], 1e-5, 1e-6)


@pytest.mark.parametrize("above", [False, True])
def test_the_threshold_ends_the_gradient(above):
    logits = normal(0, 1, 5, 4)
    _, free = with_gradient(losses.global_entropy_loss, logits)
    threshold = 0.1 if above else math.log(4)
    loss, actual = with_gradient(
        lambda x: losses.global_entropy_loss(x, threshold), logits
    )
    assert (loss[0] > 0) is not above
    assert_close(actual, 0 * free if above else free, 1e-6)
    assert np.abs(free).max() > 1e-3


def test_mutual_information_leaves_out_other_modalities():
    logits, ids = normal(0, 3, 6, 4), np.array([[0, 1] * 3, [0, 2] * 3, [1] * 6])
    actual = numbers(lambda x, i: losses.mutual_information_loss(x, i, 3), logits, ids)
    two = numbers(
        lambda x, i: losses.mutual_information_loss(x, i, 2), logits[:2], ids[:2] > 0
    )
    assert_close(actual[:2], two, 1e-5)
    assert np.all(two < -1e-3)
    # One modality says nothing of the experts.
    assert_close(actual[2], 0, atol=1e-6)
    logits, ids = normal(0, 1, 6, 4), np.array([[0, 1, 7, 0, 1, -1]])
    both = np.isin(ids, [0, 1])
    actual, expected = (
        numbers(LOSSES["mutual"], logits[:, tokens], ids[:, tokens])
        for tokens in (both[0] | True, both[0])
    )
    assert_close(actual, expected, 1e-5)
    assert expected[0] < -1e-3


def test_merged_entropy_of_sure_tokens_is_exact():
    # 1 - p has no correct digit in float32; the sum of the other gates has all.
    logits = np.array([[[20.0, 0.0, 0.0]]], "float32")
    rest = 2 / (math.exp(20) + 2)
    expected = -rest * math.log(rest)
    actual = numbers(lambda x: losses.merged_entropy_loss(x, 1), logits)
    assert_close(actual, [expected], 1e-4)


ALL = {**LOSSES, **LOSSES_OF_TOKENS}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [0.0, 1e4])
def test_masked_tokens_do_not_count(name, value):
    logits, ids = normal(0, 3, 6, 4), np.tile([0, 1, 1], (3, 2))
    real = [False, False, True, True, True, False]
    # The last group has no real tokens.
    mask = np.array([real, real, [False] * 6])
    without = numbers(ALL[name], logits[:2, real], ids[:2, real])
    logits[~mask] = value
    loss, actual = with_gradient(lambda x: ALL[name](x, ids, tensor(mask)), logits)
    assert_close(loss, [*without, 0.0], 1e-5, 1e-6)
    assert_same(actual[~mask], 0)
    assert np.all(np.isfinite(actual))
    # Tokens that do count have a gradient.
    assert np.abs(actual[mask]).max() > 1e-3


NEVER = -np.inf


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tokens", [
    pytest.param([[1e4, 0, -1e4], [0, 1e4, 1e4], [1e4, -1e4, 9e3]], id="huge"),
    pytest.param([[0.0, NEVER, NEVER], [NEVER, 5.0, NEVER]], id="one expert each"),
    pytest.param([[1.0, 2.0, NEVER], [NEVER, 0.0, 0.0]], id="two experts may"),
    pytest.param([[0.0, -88, -95], [-104, 0.0, -120]], id="about underflow"),
    pytest.param([[0.0, 0.0, 0.0]] * 2, id="all logits equal"),
])  # fmt: skip
def test_extremes(name, tokens):
    logits = np.array([tokens], "float32")
    ids = np.arange(len(tokens))[None] % 2
    loss, actual = with_gradient(lambda x: LOSSES[name](x, tensor(ids)), logits)
    assert_close(loss, [expected_loss(name, logits[0], ids[0])], 1e-5, 1e-6)
    assert np.all(np.isfinite(actual))
    assert_same(actual[np.isinf(logits)], 0)


def expected_loss(name, logits, ids):
    """A group's loss in float64, straight from the definitions."""
    p = np.exp(logits.astype("float64") - logits.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    mean = entropy(*p.mean(axis=0))
    local = np.mean([entropy(*token) for token in p])
    if name == "local":
        return local
    if name in ("global", "threshold"):
        return -mean if name == "global" else max(0.0, 3.0 - mean)
    if name == "target":
        return (LOG2 - local) ** 2
    if name == "merged":
        rest = np.sort(p, axis=-1)[:, :-2].sum(axis=-1)
        return np.mean([entropy(1 - x, x) for x in rest])
    marginals = [p[ids == m].mean(axis=0) for m in (0, 1) if np.any(ids == m)]
    marginal_entropies = [entropy(*marginal) for marginal in marginals]
    return np.mean(marginal_entropies) - entropy(*np.mean(marginals, axis=0))
