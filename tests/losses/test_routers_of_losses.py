"""Routers for which auxiliary losses are defined, and thresholds that they reach."""

import math
import warnings

import keras
import numpy as np
import pytest

from keras_moe import losses
from keras_moe.losses import AggregateLoss, AuxiliaryLoss
from keras_moe.losses._auxiliary_functions import FUNCTIONS
from keras_moe.routers import TokenChoiceRouter
from tests.losses.entropies import ROUTER, routing_of, tensor

# Thresholds


def test_thresholds_above_the_largest_entropy_warn():
    """log 8 for 4 experts: the loss is at least log 2."""
    logits = tensor(np.zeros((1, 3, 4), "float32"))
    received = r"received: threshold=2\.0794\..*at least 0\.6931"
    with pytest.warns(UserWarning, match=received):
        actual = losses.global_entropy_loss(logits, threshold=math.log(8))
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(actual), math.log(2), rtol=1e-5
    )
    loss = AuxiliaryLoss("global_entropy", threshold=math.log(8), modality=1)
    router = TokenChoiceRouter(num_experts=4, num_modalities=2)
    with pytest.warns(UserWarning, match=received):
        loss.check_router(router)
    with pytest.warns(UserWarning, match=received):
        AggregateLoss([AuxiliaryLoss("router_z"), loss]).check_router(router)
    # Modality 1 has a pool of 2.
    router = TokenChoiceRouter(num_experts=4, expert_pools=[[0, 1], [2, 3]])
    with pytest.warns(UserWarning, match="entropy of 2 experts.*at least 0.6931"):
        AuxiliaryLoss("global_entropy", threshold=math.log(4), modality=1).check_router(
            router
        )


def test_thresholds_up_to_the_largest_entropy_do_not_warn():
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


# Routers


class SoftRouter:
    """Stands for a router whose logits are by slot."""

    has_expert_logits = False
    noise_std = 1.0


class ExpertChoiceRouter:
    """Stands for a router without K."""

    noise_std = 1.0


EVERY = {name: AuxiliaryLoss(name) for name in FUNCTIONS}
EVERY["aggregate"] = AggregateLoss({"router_z": 1.0})


@pytest.mark.backend_free
@pytest.mark.parametrize("name", EVERY)
def test_no_loss_fits_routers_with_logits_by_slot(name):
    EVERY[name].check_router(TokenChoiceRouter(num_experts=4))
    expected = (
        "Expected a router with one logit per expert; received: router=SoftRouter"
    )
    with pytest.raises(ValueError, match=expected):
        EVERY[name].check_router(SoftRouter())


EVERY["all_choices"] = AuxiliaryLoss("load_balance", choices="all")
NEED_K = (
    "all_choices",
    "load",
    "heterogeneous_balance",
    "target_entropy",
    "merged_entropy",
)


@pytest.mark.backend_free
@pytest.mark.parametrize("name", [*NEED_K, "aggregate"])
def test_some_losses_need_the_number_of_selected_experts(name):
    loss = EVERY[name]
    if name == "aggregate":
        loss = AggregateLoss({"router_z": 1.0, "target_entropy": 1.0})
    loss.check_router(TokenChoiceRouter(num_experts=4))
    with pytest.raises(
        ValueError, match="num_selected_experts; received: router=ExpertChoiceRouter"
    ):
        loss.check_router(ExpertChoiceRouter())


@pytest.mark.backend_free
@pytest.mark.parametrize(
    "name",
    [name for name in EVERY if name not in NEED_K],
)
def test_the_others_do_not(name):
    EVERY[name].check_router(ExpertChoiceRouter())


@pytest.mark.backend_free
def test_the_aggregate_checks_its_load_loss():
    loss = AggregateLoss({"load": 1.0})
    with pytest.raises(ValueError, match=r"received: noise_std=0\.0"):
        loss.check_router(TokenChoiceRouter(num_experts=4, noise_std=0.0))


@pytest.mark.backend_free
def test_losses_of_weight_zero_fit_every_router():
    for name in FUNCTIONS:
        AuxiliaryLoss(name, 0.0).check_router(SoftRouter())
        AggregateLoss({name: 1.0}, weight=0).check_router(SoftRouter())
    AggregateLoss({"load": 0.0, "router_z": 1.0}).check_router(ExpertChoiceRouter())
