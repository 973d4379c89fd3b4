"""Where experts work, how tokens move on, and the tags of captions' tokens."""

import numpy as np
import pytest

from keras_moe import analysis, models
from keras_moe.analysis.tokens import flow_statistics, main_experts
from keras_moe.ops import Routing
from tests.small_models import small_pairs_model

TAGS = {"two": "NUM", "cats": "NOUN", "a": "DET", "T-shirt": "NOUN", ",": "PUNCT"}
CAPTIONS = ["two cats", "a T-shirt, a T-shirt"]


def routing(combined):
    combined = np.asarray(combined, "float32")
    return Routing(*[combined] * 4, (combined > 0).astype("float32"), combined)


def test_flows_by_hand():
    first = routing([[[0.9, 0.1], [0.0, 0.4], [0.0, 0.0], [0.5, 0.5]]])
    second = routing([[[0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0]]])
    assert main_experts(first).tolist() == [[0, 1, 2, 0]]
    # A token that is served with weight 0 is served.
    no_weight = second._replace(combined=np.zeros((1, 4, 3)))
    assert main_experts(no_weight).tolist() == [[2, 1, 0, 3]]
    flows = analysis.token_flows(first, second)
    assert flows.tolist() == [[0, 0, 1, 1], [0, 1, 0, 0], [1, 0, 0, 0]]
    mask = np.array([[True, True, False, False]])
    assert analysis.token_flows(first, second, mask).sum() == 2


def test_statistics_of_flows_by_hand():
    independent = flow_statistics([[4, 4, 0], [4, 4, 0], [0, 0, 0]])
    assert independent.information == pytest.approx(0.0, abs=1e-12)
    # Eight tokens of an expert: four and four meet again.
    assert independent.kept_company == pytest.approx(2 * 2 * 4 * 3 / (2 * 8 * 7))
    assert independent.company_by_chance == pytest.approx(2 * 8 * 7 / (16 * 15))
    fixed = flow_statistics([[0, 8, 0], [8, 0, 0], [0, 0, 0]])
    assert fixed.information == pytest.approx(1.0)
    assert fixed.kept_company == 1.0
    # One expert for all says nothing; one token has no company.
    assert flow_statistics([[4, 0], [4, 0]]).information == 0.0
    assert flow_statistics([[1, 0], [0, 0]]) == (0.0, 0.0, 0.0)
    assert flow_statistics(np.zeros((2, 2))) == (0.0, 0.0, 0.0)


def test_views_leave_the_class_token_out():
    combined = np.zeros((2, 5, 2))
    combined[0, 0, 0] = 1.0  # the class token
    combined[1, 4, 0] = 0.5  # the last patch
    first, second = analysis.expert_views(
        routing(combined), (2, 2), images_per_expert=1
    )
    np.testing.assert_array_equal(first.position_shares, [[0, 0], [0, 0.5]])
    assert first.images.tolist() == [1]
    np.testing.assert_array_equal(first.patches[0], [[False, False], [False, True]])
    assert second.position_shares.max() == 0


class Pieces:
    """A tokenizer whose pieces are given, as SentencePiece writes them."""

    start_id, end_id = None, 0

    def __init__(self, *rows):
        size = max(map(len, rows))
        self.rows = [["</s>" if x is None else x for x in row] for row in rows]
        self.rows = [row + ["<pad>"] * (size - len(row)) for row in self.rows]

    def __call__(self, captions):
        ids = [[0 if x == "</s>" else 1 for x in row] for row in self.rows]
        mask = [[x != "<pad>" for x in row] for row in self.rows]
        return {"token_ids": np.array(ids), "padding_mask": np.array(mask)}

    def tokens(self, ids):
        return self.rows


def tag(words):
    return [TAGS.get(word, "X") for word in words]


def names(tags):
    return [[tags.group_names[number] for number in row] for row in tags.groups]


def test_pieces_have_the_tags_of_their_words():
    # The mark goes with the piece before it, and the second caption was truncated.
    tokenizer = Pieces(
        ["two", "▁", "cat", "s", None], ["a", "t", "-shirt,", "▁a", "t-", None]
    )
    tags = analysis.tag_tokens(tokenizer, CAPTIONS, tag)
    assert tags.group_names == ["DET", "NOUN", "NUM", "special", "padding"]
    assert names(tags) == [
        ["NUM", "NOUN", "NOUN", "NOUN", "special", "padding"],
        ["DET", "NOUN", "NOUN", "DET", "NOUN", "special"],
    ]
    tags = analysis.tag_tokens(Pieces(["two", "<unk>", "cats"]), ["two 猫 cats"], tag)
    assert names(tags) == [["NUM", "unknown", "unknown"]]


def test_trained_tokenizers_are_aligned():
    tokenizer = models.TextTokenizer.trained(CAPTIONS, 520, max_length=30)
    tags = analysis.tag_tokens(tokenizer, CAPTIONS, tag)
    texts = tokenizer(CAPTIONS)
    assert tags.groups.shape == texts["token_ids"].shape
    assert tags.group_names == ["DET", "NOUN", "NUM", "PUNCT", "special", "padding"]
    special = tags.groups == tags.group_names.index("special")
    np.testing.assert_array_equal(special.sum(axis=1), 2)
    # A caption alone has the same tags.
    assert names(analysis.tag_tokens(tokenizer, "two cats", tag))[0] == names(tags)[0]


def test_one_modality_is_counted_by_tag(tmp_path, op_by_op):
    model = small_pairs_model(CAPTIONS)
    tokenizer = model.preprocessor
    with pytest.warns(UserWarning, match="more than max_length"):
        tags = analysis.tag_tokens(tokenizer, CAPTIONS, tag)
    inputs = {"images": np.zeros((2, 8, 8, 3), "float32"), **tokenizer(CAPTIONS)}
    usage = analysis.expert_usage(
        model, inputs, modality="text", verbose=0, **tags._asdict()
    )
    block = usage.blocks["text/block_1"]
    # K = 1, padding is routed, and no token is dropped.
    counts = np.bincount(tags.groups.ravel(), minlength=len(tags.group_names))
    np.testing.assert_array_equal(block.tokens.sum(axis=1), counts)
    analysis.plots.plot_expert_groups(usage, tmp_path / "words.png")
    assert (tmp_path / "words.png").stat().st_size > 5000
