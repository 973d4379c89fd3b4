"""Arguments that the functions refuse, in one table."""

from types import SimpleNamespace

import numpy as np
import pytest

from keras_moe.analysis import (
    BlockUsage,
    ExpertUsage,
    ablate_experts,
    compute_map,
    edit_expert_logits,
    exclude_experts,
    expert_usage,
    experts_per_token,
    merged_usage,
    plots,
    prune_experts,
    routing_statistics,
    select_experts,
    steer_expert,
    token_flows,
)
from keras_moe.analysis.usage import routing_usage
from keras_moe.layers import MuMoE
from keras_moe.ops import ExpertTypes, Routing
from keras_moe.routers import TokenChoiceRouter
from tests import small_models
from tests.refusals import check_refused
from tests.small_models import ONE_BLOCK, images, with_weights

pytestmark = pytest.mark.usefixtures("op_by_op")

IMAGES = images(24, 16, 8, 2)
LABELS = np.arange(24) % 3
TYPES = ExpertTypes(ffn=3, zero=1, copy=1)
RECORD = Routing(*[np.ones((2, 3, 2))] * 6)
# Experts 2 and 3 serve no text.
TOKENS = np.array([[1.0, 5.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
USAGE = ExpertUsage(["image", "text"], {"block_1": BlockUsage(TOKENS, TOKENS)})
FEWER = ExpertUsage(USAGE.groups, {"block_1": BlockUsage(*[TOKENS[:, :1]] * 2)})


@pytest.fixture(scope="module")
def own():
    """Models of several routers and heads."""

    def classifier(head=None, **changes):
        return small_models.classifier({"head": head}, **{**ONE_BLOCK, **changes})

    router = {"router": "softmax_token_choice"}
    broken = with_weights(classifier(**router))
    broken.backbone.get_layer("block_0").feed_forward.router.kernel.assign(
        np.full((16, 4), np.nan)
    )
    types = {"num_experts": 3, "zero_experts": 1, "copy_experts": 1}
    kept = {"block_0": [1, 3, 2]}
    plain = with_weights(classifier(**router))
    return SimpleNamespace(
        plain=plain,
        broken=broken,
        dense=classifier(moe_layers=None),
        typed=with_weights(classifier(**router, **types)),
        soft=classifier(router="soft"),
        mumoe=classifier(router="mumoe", rank=4),
        head=with_weights(classifier(MuMoE(3, 4, rank=5), **router)),
        pruned=prune_experts(plain, kept, "router_pred_skip"),
        excluded=exclude_experts(plain, [1]),
    )


def statistics(*shape, mask=None):
    return routing_statistics(Routing(*[np.zeros(shape)] * 6), 1, mask)


def ablate(model, labels=LABELS, layer="head", inputs=IMAGES, **arguments):
    return ablate_experts(model, inputs, labels, layer, verbose=0, **arguments)


def ablate_block(model, **arguments):
    return ablate(model, layer="block_0", **arguments)


def usage(model, inputs=IMAGES, **arguments):
    return expert_usage(model, inputs, verbose=0, **arguments)


def select(**arguments):
    return select_experts(USAGE, **arguments)


def of_arrays(function, *arguments, **others):
    """A row's call without a model."""
    return lambda own: function(*arguments, **others)


@pytest.mark.parametrize(("call", "message"), [
    # Routing records
    (of_arrays(statistics, 2, 2), r"shape=\(2, 2\)"),
    (of_arrays(statistics, 1, 2, 2, mask=np.zeros((1, 2), bool)), "0 tokens"),
    (of_arrays(experts_per_token, RECORD, TYPES, "best"), "expert_type='best'"),
    (of_arrays(compute_map, RECORD, ExpertTypes(2), (2, 2)), "at least 4 tokens"),
    (
        of_arrays(token_flows, RECORD, Routing(*[np.ones((2, 1, 2))] * 6)),
        r"\(2, 3\) and \(2, 1\)",
    ),
    # Usage
    (of_arrays(routing_usage, RECORD, mask=np.ones((2, 2), bool)), r"\(2, 2\)"),
    (
        of_arrays(routing_usage, RECORD, contributions=np.full((2, 3, 2), np.inf)),
        "finite contributions",
    ),
    (of_arrays(merged_usage, [USAGE, USAGE._replace(groups=["image"])]), "same groups"),
    (of_arrays(merged_usage, [USAGE, FEWER]), r"\(2, 4\).*\(2, 1\)"),
    (lambda own: usage(own.plain, []), "at least one batch"),
    (lambda own: usage(own.plain, groups=np.array([0, 1])), "one length"),
    (lambda own: usage(own.plain, group_names=["a"]), "none without groups"),
    (lambda own: usage(own.plain, mask={"text": "mask"}), "records of"),
    (lambda own: usage(own.plain, modality="audio"), "modality='audio'"),
    (lambda own: usage(own.broken), "NaN"),
    (lambda own: usage(own.soft), "SoftRouter"),
    # Selections
    (of_arrays(select), "count=None, coverage=None"),
    (of_arrays(select, count=1, coverage=0.5), "either count or coverage"),
    (of_arrays(select, count=1, criterion="load"), "criterion='load'"),
    (of_arrays(select, count=1, criterion="reap"), "contributions=True"),
    (of_arrays(select, count=1, groups="text"), "served tokens .*groups='text'"),
    # Pruning
    (lambda own: prune_experts(own.plain, {"block_0": [0, 5]}), "kept_experts=5"),
    (lambda own: prune_experts(own.plain, {"block_0": [1, 1]}), "each once"),
    (lambda own: prune_experts(own.plain, {"block_0": [3]}), "selected_experts=2"),
    (lambda own: prune_experts(own.plain, {"block_0": [0, 1]}, "drop"), "method"),
    (lambda own: prune_experts(own.soft, {"block_0": [0, 1]}), "SoftRouter"),
    (lambda own: prune_experts(own.typed, {"block_0": [3, 4]}), "an FFN expert"),
    (lambda own: prune_experts(own.pruned, {"block_0": [1, 3]}), "model pruned with"),
    (lambda own: prune_experts(own.excluded, {"block_0": [2, 3]}), "excluded_e"),
    (lambda own: exclude_experts(own.pruned, [0]), "excluded_experts"),
    (lambda own: exclude_experts(own.mumoe, "ffn"), "whose routers choose experts"),
    (lambda own: exclude_experts(own.typed, [0, 5]), "experts=5"),
    (of_arrays(TokenChoiceRouter, 4, excluded_experts=(0, 1, 2)), r"\(0, 1, 2\)"),
    # Ablation
    (lambda own: ablate(own.head, LABELS[:3]), r"shape=\(3,\)"),
    (lambda own: ablate(own.head, experts=[9]), "experts=9"),
    (lambda own: ablate(own.head, inputs=np.nan * IMAGES), "NaN"),
    (lambda own: ablate(own.plain), "without head"),
    (lambda own: ablate_block(own.typed, removal="weights"), "removal='weights'"),
    (
        lambda own: ablate_block(own.typed, experts=[("ffn", "zero", "copy")]),
        "num_selected_experts=2",
    ),
    (lambda own: ablate_block(own.mumoe, removal="choice"), "removal='choice'"),
    # Edits
    (lambda own: edit_expert_logits(own.head, None, 5), "output=5"),
    (lambda own: edit_expert_logits(own.head, None, 1, np.nan), "strength=nan"),
    (lambda own: steer_expert(own.plain, "block_0", 9), "expert=9"),
    (lambda own: steer_expert(own.mumoe, "block_0", 1), "zeros"),
    # Plots
    (
        of_arrays(plots.plot_expert_views, np.zeros((2, 8, 8, 1)), RECORD, (2, 2)),
        r"grid=\(2, 2\)",
    ),
])  # fmt: skip
def test_bad_arguments(own, call, message):
    check_refused(call, {"own": own}, message)
