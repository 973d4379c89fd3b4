"""The report's sections on queues, transitions and top tokens, from records by hand."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from keras_moe import routers
from keras_moe.analysis.plots._figure import figure_svg
from keras_moe.analysis.routing import served_at
from keras_moe.report import Figure, Html, Options, Table
from keras_moe.report import _queues as queues
from keras_moe.report._markup import patch_tile
from keras_moe.report._queues import queues_of_layers
from keras_moe.report.sections import _transitions
from keras_moe.report.sections._capacity import DroppedPatches, Priorities
from keras_moe.report.sections._top_tokens import BestPatches, BestWords, TopTokens
from keras_moe.routers._pruned import PrunedTokenChoiceRouter
from tests.report_records import batch as batch_of
from tests.report_records import block, record, reported

HOSTILE = "</svg><script>alert(1)</script>$x^2$"
SECTIONS = (Priorities, DroppedPatches, _transitions.ExpertTransitions, TopTokens)
# A class token, then two patches.
GATES = np.array([[[0.6, 0.4], [0.9, 0.1], [0.7, 0.3]]], "float32")


def subject(router, keys, grid, group_size=None, kind="token_choice"):
    """A model whose layers have one router."""
    counts = router.expert_types._asdict()
    types = [name for name, count in counts.items() for _ in range(count)]
    facts = {"kind": kind, "capacity_factor": None, "group_size": group_size}
    facts["num_selected_experts"] = getattr(router, "num_selected_experts", None)
    blocks = [block(x, types, block=x.rpartition("/")[2], **facts) for x in keys]
    layer = SimpleNamespace(router=router, group_size=group_size)
    model = SimpleNamespace(get_layer=lambda name: SimpleNamespace(feed_forward=layer))
    return reported(*blocks, grid=grid, keras_model=model, name=HOSTILE)


def batch(routing, grid=None, words=None, masks=None, start=0):
    count, images = len(next(iter(routing.values())).gates), None
    if grid is not None:
        shape = (count, 4 * grid[0], 4 * grid[1], 1)
        images = np.linspace(-1, 1, int(np.prod(shape)), dtype="float32")
        images = images.reshape(shape)
    facts = {"images": images, "words": words, "masks": masks or {}}
    return batch_of(routing, start=start, **facts)


def contents(about, *batches):
    """The content of every section that fits, checked for what holds of each."""
    made = {}
    for section in SECTIONS:
        if not section.fits(about):
            continue
        own = section(about, Options())
        for each in batches:
            own.update(each)
            own.update_queues(each)
        made[section] = content = own.finish()
        json.dumps(content.data, allow_nan=False)
        names = [item.name for item in content.body if isinstance(item, Figure)]
        assert len(set(names)) == len(names)
        for item in content.body:
            if isinstance(item, Figure):
                assert item.alt
                assert item.caption
                assert "<script" not in figure_svg(item.drawing)
            elif isinstance(item, Html):
                assert "<script" not in item.markup
                is_picture = "<article" not in item.markup
                assert not is_picture or ' alt="' in item.markup
            elif isinstance(item, Table):
                assert {len(row) for row in item.rows} <= {len(item.head)}
    return made


def test_queues_by_hand():
    # All three prefer expert 0, which serves ceil(3 / 2) = 2.
    router = routers.TokenChoiceRouter(2, 1, capacity_factor=1.0, priority="max_gate")
    about = subject(router, ["block_1"], (1, 2))
    content = contents(about, batch({"block_1": record(GATES)}, (1, 2)))[Priorities]
    layer = content.data["layers"][0]
    assert layer["cut_by_expert"] == [pytest.approx(1 / 3), 0.0]
    table = content.body[-1]
    # The class token has the smallest gate, and is dropped.
    assert [row[1:4] for row in table.rows] == [
        ["image patches", "0.0%", "0.0%"],
        ["class token", "100.0%", "100.0%"],
    ]
    assert table.rows[0][4:] == ["0.80", None]
    assert table.rows[1][4:] == [None, "0.60"]
    assert sum(layer["queues"]["class token"][:8]) == 0
    assert sum(layer["queues"]["image patches"][:8]) == 2
    assert content.findings[0].level == "notice"
    # The third token stands at 2.5 of 2 slots: below 1.375 capacities, or 1.4 rounded.
    text = content.findings[0].text
    assert text.startswith("block_1: with capacity_factor=1, as in training, 33% of")
    assert "capacity_factor=1.4 to drop less than 5%, or ignore it" in text


def test_modalities_of_a_shared_layer_compete():
    router = routers.TokenChoiceRouter(
        2, 1, capacity_factor=1.0, num_modalities=2, priority=(1, 0)
    )
    keys = ["image/block_1", "text/block_1"]
    about = subject(router, keys, (1, 2))
    text = np.array([[[0.8, 0.2], [0.8, 0.2]]], "float32")
    # Padding does not queue.
    masks = {"text": np.array([[True, False]])}
    routing = {keys[0]: record(GATES[:, 1:]), keys[1]: record(text)}
    (layer,) = queues_of_layers(about, ("token_choice",))
    queues = layer.read(batch(routing, (1, 2), masks=masks))
    # Texts go first.
    assert queues.positions[0, :, 0].tolist() == [1, 2, 0, -1]
    assert queues.group_tokens == 4
    assert layer.capacities(4).tolist() == [2, 2]
    words = [["<b>cat</b>", ""]]
    content = contents(about, batch(routing, (1, 2), words, masks))
    rows = content[Priorities].body[-1].rows
    assert [row[1:3] for row in rows] == [
        ["image patches", "50.0%"],
        ["text tokens", "0.0%"],
    ]
    (layer,) = content[Priorities].data["layers"]
    assert layer["capacity"] == [2, 2]
    assert layer["by_modality"] == {
        "image": {"choices": [2, 0], "cut": [1, 0]},
        "text": {"choices": [1, 0], "cut": [0, 0]},
    }
    best = content[TopTokens].data["text/block_1"][0]["by_weight"]
    assert [word["context"] for word in best] == ["[<b>cat</b>]"]


def test_groups_are_drawn_from_data_that_come_class_by_class():
    router = routers.TokenChoiceRouter(2, 1, capacity_factor=1.0)
    about = subject(router, ["block_1"], None, group_size=8)
    # Examples of one token: the first half chooses expert 0, the others expert 1.
    gates = np.array([[[0.9, 0.1]], [[0.1, 0.9]]], "float32").repeat(32, axis=0)
    parts = [batch({"block_1": record(gates[i : i + 8])}) for i in range(0, 64, 8)]
    in_order = contents(about, *parts)[Priorities].data["layers"][0]
    assert in_order["cut_by_expert"] == [0.5, 0.5]

    def drawn(seed):
        shuffled = queues.ShuffledBatches(about, 8, seed)
        early = [x for part in parts for x in shuffled.add(part)]
        return [*early, *shuffled.rest()]

    batches = drawn(0)
    assert [x.size for x in batches] == [8] * 8
    seen = np.concatenate([x.routing["block_1"].affinity for x in batches])
    assert seen.shape == gates.shape
    np.testing.assert_array_equal(np.sort(seen, axis=0), np.sort(gates, axis=0))
    again = np.concatenate([x.routing["block_1"].affinity for x in drawn(0)])
    np.testing.assert_array_equal(seen, again)
    section = Priorities(about, Options())
    for each in batches:
        section.update_queues(each)
    cut = section.finish().data["layers"][0]["cut_by_expert"]
    assert max(cut) < 0.3


def test_images_fill_groups_and_the_rest_is_left_out():
    router = routers.TokenChoiceRouter(2, 1, capacity_factor=1.0)
    about = subject(router, ["block_1"], (1, 3), group_size=7)
    (layer,) = queues_of_layers(about, ("token_choice",))
    queues = layer.read(batch({"block_1": record(np.repeat(GATES, 5, axis=0))}))
    # Two images of three tokens in a group of seven.
    assert queues.group_tokens == 6
    assert queues.positions.shape == (4, 3, 2)
    assert queues.positions[:, :, 0].ravel().tolist() == [*range(6), *range(6)]
    assert queues.left_out == 1
    # A last batch that is smaller than a group is left out, and a first one is a group.
    queues = layer.read(batch({"block_1": record(GATES)}))
    assert (len(queues.positions), queues.left_out) == (0, 1)
    (layer,) = queues_of_layers(about, ("token_choice",))
    assert layer.read(batch({"block_1": record(GATES)})).group_tokens == 3


def test_kinds_of_experts_have_capacities_of_their_own():
    router = routers.PathwayAwareRouter(
        12, 2, zero_experts=1, copy_experts=1, constant_experts=2, tau=0.75
    )
    about = subject(router, ["block_1"], None, 136)
    (layer,) = queues_of_layers(about, ("token_choice",))
    ffn, in_place = router.capacities(136, training=True)
    assert layer.capacities(136).tolist() == [ffn] * 8 + [in_place] * 4
    fixed = routers.TokenChoiceRouter(2, 1, capacity=3)
    (layer,) = queues_of_layers(subject(fixed, ["b"], None), ("token_choice",))
    assert layer.capacities(100).tolist() == [3, 3]


@pytest.mark.parametrize("method", ["router_drop", "router_pred_skip", "router_pred"])
def test_pruned_experts_serve_nobody(method):
    router = PrunedTokenChoiceRouter(
        2, [1], method, removed=True, num_selected_experts=1, capacity_factor=2.0
    )
    (layer,) = queues_of_layers(subject(router, ["block_1"], None), ("token_choice",))
    kept = np.array([[[0.0, 1.0]] * 3], "float32")
    gates = kept if method == "router_drop" else GATES
    queues = layer.read(batch({"block_1": record(gates)}))
    served = served_at(queues.positions, layer.capacities(3)).sum(axis=(0, 1))
    # Choices of the pruned expert are lost, or go to the kept one.
    assert served.tolist() == [0, 0 if method == "router_pred_skip" else 3]


def test_drops_fall_with_capacity():
    router = routers.ExpertChoiceRouter(2, capacity_factor=1.0)
    about = subject(router, ["block_1"], (1, 2), kind="expert_choice")
    routing = {"block_1": record(GATES)}
    made = contents(about, batch(routing, (1, 2)))
    assert Priorities not in made
    data = made[DroppedPatches].data
    shares = data["dropped_tokens"]["block_1"]
    # Experts take two tokens each at 1: the class token and the best of the others.
    at = dict(zip(data["capacity_factors"], shares))
    assert at[2.0] == 0.0
    assert sorted(shares, reverse=True) == shares
    assert at[0.25] == pytest.approx(1 / 3)


@pytest.mark.parametrize("affinity", ["sparsity_constrained", "sinkhorn"])
def test_a_page_says_which_drops_are_approximate(affinity):
    router = routers.ExpertChoiceRouter(2, affinity=affinity)
    about = subject(router, ["block_1"], (1, 2), kind="expert_choice")
    # Records of inference, where each image is a group.
    blocks = {key: x._replace(group_size=None) for key, x in about.blocks.items()}
    routing = {"block_1": record(GATES)}
    made = contents(about._replace(blocks=blocks), batch(routing, (1, 2)))
    for section in {*made} & {Priorities, DroppedPatches}:
        (text,) = [x for x in made[section].body if isinstance(x, str)]
        assert text.startswith("Examples per group: 1")
        is_bound = affinity == "sparsity_constrained"
        assert ("Drops are approximate" in text) == is_bound


def test_sections_fit_their_models():
    soft = subject(routers.SoftRouter(4), ["block_1", "block_3"], (1, 2), kind="soft")
    assert [section.fits(soft) for section in SECTIONS] == [False, False, False, True]
    router = routers.TokenChoiceRouter(2, 1)
    one_layer = subject(router, ["block_1"], (1, 2))
    assert not _transitions.ExpertTransitions.fits(one_layer)
    texts = subject(router, ["text/block_1", "text/block_3"], None)
    assert [s.fits(texts) for s in SECTIONS] == [True, False, True, True]
    head = subject(router, ["head"], (1, 2), kind="mumoe")
    assert [section.fits(head) for section in SECTIONS] == [False] * 4


def test_padding_does_not_flow():
    router = routers.TokenChoiceRouter(2, 1)
    keys = ["text/block_1", "text/block_3"]
    about = subject(router, keys, None)
    routing = {key: record(GATES) for key in keys}
    masks = {"text": np.array([[True, True, False]])}
    made = contents(about, batch(routing, words=[["a", "b", ""]], masks=masks))
    assert np.sum(made[_transitions.ExpertTransitions].data["text"][0]["tokens"]) == 2


def test_best_patches_are_of_different_images():
    patches = BestPatches((1, 2), count=2, size=8, most=1)
    images = np.linspace(-1, 1, 3 * 32).reshape(3, 4, 8, 1)
    weights = np.zeros((3, 3, 2))
    # The class token does not count; the second expert works less.
    weights[0, 0, 0] = 1.0
    weights[0, 1:, 0] = 0.5, 0.6
    weights[1, 1, 0] = 0.4
    weights[2, 2, 1] = 0.1
    patches.update(weights, images)
    assert patches.experts.tolist() == [0]
    np.testing.assert_allclose(patches.weights, [[0.6, 0.4]])
    assert patches.examples.tolist() == [[0, 1]]
    expected = patch_tile(images[0], (1, 2), 1, 8)
    np.testing.assert_array_equal(patches.tiles[0, 0, ..., :3], expected)
    weights = np.zeros((1, 3, 2))
    weights[0, 2, 0] = 0.5
    patches.update(weights, images[2:], start=3)
    np.testing.assert_allclose(patches.weights, [[0.6, 0.5]])
    assert patches.examples.tolist() == [[0, 3]]
    np.testing.assert_array_equal(patches.tiles[0, 0, ..., :3], expected)


def test_best_words_by_hand():
    best = BestWords(count=2, window=1)
    words = [["a", "red", "cat", ""], ["a", "blue", "cat", "<i>"]]
    weights = np.zeros((2, 4, 2))
    weights[..., 1] = [[0.1, 0.0, 0.9, 0.9], [0.2, 0.3, 0.8, 0.7]]
    weights[0, 1, 0] = 0.5
    mask = np.array([[True] * 4, [True, True, True, False]])
    best.update(weights, words, mask)
    top = best.by_weight(1)
    assert [(word.word, word.context, word.count) for word in top] == [
        ("cat", "red [cat]", 2),
        ("blue", "a [blue] cat", 1),
    ]
    assert best.by_lift(1) == []
    lifted = best.by_lift(1, min_count=2)
    # Five words, six tokens, of which expert 1 serves all but "red".
    scores = [(word.word, round(word.score, 3)) for word in lifted]
    assert scores == [("a", 1.2), ("cat", 1.2)]
    assert best.by_lift(0, min_count=1)[0].score == pytest.approx(6.0)


def test_ribbons_fill_their_nodes():
    rng = np.random.default_rng(0)
    flows = [rng.integers(0, 9, (5, 5))]
    flows.append(np.diag(flows[0].sum(axis=0)))
    picture = _transitions.main_flows(flows, min_share=0.0)
    assert picture.shown == pytest.approx(1.0)
    leaving, arriving = Counter(), Counter()
    for ribbon in picture.ribbons:
        leaving[ribbon.layer, ribbon.source] += ribbon.height
        arriving[ribbon.layer + 1, ribbon.target] += ribbon.height
    for layer, column in enumerate(picture.columns):
        assert column[0].bottom + column[0].height == pytest.approx(1.0)
        assert column[-1].bottom > -1e-6
        assert column[-1].name == "none"
        for number, node in enumerate(column):
            for heights, exists in ((leaving, layer < 2), (arriving, layer > 0)):
                if exists:
                    assert heights[layer, number] == pytest.approx(node.height)
    # The second step goes straight on: no ribbon crosses another.
    names = [[node.name for node in column] for column in picture.columns]
    assert names[1] == names[2]
