"""Auxiliary losses as objects: names, options, modalities and configs."""

import json
import math
import warnings
from functools import partial
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_moe import losses
from keras_moe.losses import AuxiliaryLoss
from keras_moe.losses.auxiliary import FUNCTIONS
from keras_moe.ops import ExpertTypes, Routing
from keras_moe.routers import ExpertChoiceRouter, SoftRouter, TokenChoiceRouter
from tests.compare import assert_close, assert_same
from tests.losses.loss_table import LOSSES, ROUTER, normal, numbers, routing_of, tensor
from tests.refusals import refuses

# Thresholds that no entropy reaches leave the losses above 0.
pytestmark = pytest.mark.filterwarnings("ignore:Expected threshold")

WRAPPED = {
    "local": partial(AuxiliaryLoss, "local_entropy"),
    "global": partial(AuxiliaryLoss, "global_entropy"),
    "threshold": lambda weight, modality=None: AuxiliaryLoss(
        "global_entropy", weight, threshold=3.0, modality=modality
    ),
    "target": partial(AuxiliaryLoss, "target_entropy"),
    "merged": partial(AuxiliaryLoss, "merged_entropy"),
}
IDS = np.array([[0, 1, 0, 2, 1, 0], [1, 1, 1, 0, 0, 1], [0] * 6])
MASK = np.array([[True] * 6, [True, False, True, True, True, False], [True] * 6])


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("masked", [False, True])
def test_a_modality_is_the_loss_of_its_tokens(name, masked):
    logits, mask = normal(0, 3, 6, 4), MASK if masked else np.ones_like(MASK)
    loss = WRAPPED[name](2.5, modality=1)

    def program(x, m, ids):
        return loss(routing_of(x), ROUTER, m if masked else None, ids)

    # No group has a token of the modality.
    assert_same(numbers(program, logits, mask, 0 * IDS), 0.0)
    actual = numbers(program, logits, mask, IDS)
    groups = []
    for g in range(2):
        chosen = mask[g] & (IDS[g] == 1)
        alone = numbers(LOSSES[name], logits[g : g + 1, chosen], IDS[g : g + 1, chosen])
        # Two of three groups have a token of the modality.
        assert_close(actual[g : g + 1], 2.5 * alone * 3 / 2, 1e-5)
        assert abs(actual[g]) > 1e-3
        groups.append(alone)
    # The last group has none, and does not dilute the mean of the others.
    assert actual[2] == 0
    assert_close(actual.mean(), 2.5 * np.mean(groups), 1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_groups_of_padding_do_not_dilute_either(name):
    logits, loss = normal(0, 3, 6, 4), AuxiliaryLoss(name)
    noisy, mask = logits + 0.1 * normal(1, 3, 6, 4), np.ones((3, 6), bool)
    mask[1] = mask[2, 2] = False
    router = SimpleNamespace(**vars(ROUTER), expert_types=ExpertTypes(4), tau=1.0)

    def losses_of(x, noisy, mask, ids):
        gates = keras.ops.softmax(noisy, axis=-1)
        routing = Routing(x, noisy, gates, gates, None, None)
        return loss(routing, router, mask, ids)

    def values(groups):
        arrays = (logits[groups], noisy[groups], mask[groups], IDS[[0, 1, 0]][groups])
        return numbers(losses_of, *arrays)

    whole = values([0, 1, 2])
    assert whole[1] == 0
    assert abs(whole[0]) > 1e-3
    assert_close(whole.mean(), values([0, 2]).mean(), 1e-5)
    nothing = numbers(losses_of, logits, noisy, np.zeros_like(mask), IDS)
    assert_same(nothing, 0.0)


@pytest.mark.parametrize("name", WRAPPED)
def test_without_a_modality_all_tokens_count(name):
    logits = normal(0, 3, 6, 4)
    loss = WRAPPED[name](0.5)
    expected = 0.5 * numbers(LOSSES[name], logits, IDS)
    for ids in (None, tensor(IDS)):
        actual = numbers(lambda x, i=ids: loss(routing_of(x), ROUTER, None, i), logits)
        assert_close(actual, expected, 1e-5)
    masked = numbers(lambda x, m: loss(routing_of(x), ROUTER, m), logits, MASK)
    by_function = numbers(lambda x, m: LOSSES[name](x, None, m), logits, MASK)
    assert_close(masked, 0.5 * by_function, 1e-5)
    assert abs(masked - expected)[1] > 1e-4


def test_mutual_information_loss_is_its_function():
    logits = normal(0, 3, 6, 4)
    loss = AuxiliaryLoss("mutual_information", 0.5, num_modalities=3)

    def program(x, m, ids):
        return loss(routing_of(x), ROUTER, m, ids)

    actual = numbers(program, logits, MASK, IDS)
    expected = 0.5 * numbers(
        lambda x, m, i: losses.mutual_information_loss(x, i, 3, m), logits, MASK, IDS
    )
    # The last group has one modality alone, and does not count.
    assert_close(actual, expected * 3 / 2, 1e-5, 1e-7)
    assert_close(actual.mean(), expected[:2].mean(), 1e-5)
    assert actual[0] < -1e-3
    nothing = numbers(lambda x, i: program(x, None, i), logits, 0 * IDS)
    assert_same(nothing, 0.0)


@pytest.mark.parametrize("loss", [
    AuxiliaryLoss("local_entropy", modality=0),
    AuxiliaryLoss("global_entropy", modality=1),
    AuxiliaryLoss("target_entropy", modality=1),
    AuxiliaryLoss("merged_entropy", modality=1),
    AuxiliaryLoss("mutual_information"),
], ids=lambda loss: loss.name)  # fmt: skip
def test_a_modality_needs_modality_ids(loss):
    routing = routing_of(tensor(normal(0, 1, 6, 4)))
    refuses(
        r"Expected modality_ids.*received: modality_ids=None", loss, routing, ROUTER
    )


@pytest.mark.parametrize("loss", [
    AuxiliaryLoss("local_entropy", weight=0.3, modality=1),
    AuxiliaryLoss("global_entropy", weight=0.2, threshold=1.5, modality=0),
    AuxiliaryLoss("mutual_information", weight=0.1, num_modalities=3),
    AuxiliaryLoss("target_entropy", weight=0.4, modality=2),
    AuxiliaryLoss("merged_entropy", weight=0.6, modality=1),
], ids=lambda loss: loss.name)  # fmt: skip
def test_config_round_trip(loss):
    config = loss.get_config()
    # Every argument is there, and none at its default.
    defaults = AuxiliaryLoss(loss.function).get_config()
    assert config.keys() == defaults.keys()
    assert all(config[name] != defaults[name] for name in config if name != "function")
    stored = json.loads(json.dumps(losses.serialize([loss])))
    by_keras = json.loads(json.dumps(keras.saving.serialize_keras_object(loss)))
    for again in (
        *losses.get(stored),
        keras.saving.deserialize_keras_object(by_keras),
        AuxiliaryLoss.from_config(json.loads(json.dumps(config))),
    ):
        assert again.get_config() == config


def test_losses_by_name():
    weights = {name: 0.1 * (i + 1) for i, name in enumerate(FUNCTIONS)}
    made = losses.get(weights)
    assert len(made) == 10
    config = {"function": "router_z", "weight": 0.5}
    assert losses.get({"router_z": 0.5})[0].get_config() == config
    assert {loss.name: loss.weight for loss in made} == weights
    assert {loss.function for loss in made} == set(weights)


@keras.saving.register_keras_serializable("tests")
def largest_logit(routing, router, mask, modality_ids, power=1.0):
    return keras.ops.max(routing.logits, axis=(1, 2)) ** power


def test_a_function_of_ones_own():
    loss = AuxiliaryLoss(largest_logit, 0.5, power=2.0)
    stored = json.loads(json.dumps(losses.serialize([loss])))
    logits = normal(0, 2, 6, 4)
    for made in (loss, *losses.get(stored)):
        assert (made.name, made.options) == ("largest_logit", {"power": 2.0})
        made.check_router(SimpleNamespace(has_expert_logits=False))
        values = numbers(lambda x, made=made: made(routing_of(x), ROUTER), logits)
        assert_close(values, 0.5 * logits.max((1, 2)) ** 2, 1e-6)


def test_thresholds_warn_above_the_largest_entropy_alone():
    """log 8 for 4 experts: the loss is at least log 2."""
    logits = tensor(np.zeros((1, 3, 4), "float32"))
    received = r"received: threshold=2\.0794\..*at least 0\.6931"
    with pytest.warns(UserWarning, match=received):
        actual = losses.global_entropy_loss(logits, threshold=math.log(8))
    assert_close(actual, math.log(2), 1e-5)
    loss = AuxiliaryLoss("global_entropy", threshold=math.log(8), modality=1)
    router = TokenChoiceRouter(num_experts=4, num_modalities=2)
    with pytest.warns(UserWarning, match=received):
        loss.check_router(router)
    # Modality 1 has a pool of 2.
    router = TokenChoiceRouter(num_experts=4, expert_pools=[[0, 1], [2, 3]])
    loss = AuxiliaryLoss("global_entropy", threshold=math.log(4), modality=1)
    with pytest.warns(UserWarning, match="entropy of 2 experts.*at least 0.6931"):
        loss.check_router(router)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = tensor(np.zeros((1, 3, 4), "float32"))
        for threshold in (None, 0.0, math.log(4), float(np.float32(math.log(4)))):
            losses.global_entropy_loss(logits, threshold)
            loss = AuxiliaryLoss("global_entropy", threshold=threshold)
            loss.check_router(TokenChoiceRouter(num_experts=4))
            loss(routing_of(logits), ROUTER)
        unused = AuxiliaryLoss("global_entropy", 0.0, threshold=9.0)
        unused.check_router(TokenChoiceRouter(num_experts=4))


SOFT, EXPERT_CHOICE = SoftRouter(4), ExpertChoiceRouter(4, noise_std=1.0)
NEED_K = ("load", "heterogeneous_balance", "target_entropy", "merged_entropy")
EVERY = {name: AuxiliaryLoss(name) for name in FUNCTIONS}
EVERY["load_balance with K"] = AuxiliaryLoss("load_balance", choices="all")


@pytest.mark.parametrize("name", EVERY)
def test_losses_refuse_routers_without_what_they_read(name):
    loss = EVERY[name]
    loss.check_router(TokenChoiceRouter(num_experts=4))
    refuses("one logit per expert; received: router=Soft", loss.check_router, SOFT)
    if name in NEED_K or "with K" in name:
        message = "num_selected_experts; received: router=ExpertChoice"
        refuses(message, loss.check_router, EXPERT_CHOICE)
    else:
        loss.check_router(EXPERT_CHOICE)


def test_load_needs_noise_and_losses_of_weight_zero_nothing():
    with pytest.raises(ValueError, match="noise_std > 0"):
        AuxiliaryLoss("load").check_router(TokenChoiceRouter(4, noise_std=0.0))
    for name in FUNCTIONS:
        AuxiliaryLoss(name, 0.0).check_router(SOFT)
