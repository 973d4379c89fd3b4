"""The report's sections on MoE++ and muMoE, from records made by hand."""

import json

import numpy as np
import pytest

from keras_moe.analysis import ablate_experts
from keras_moe.layers import MuMoE
from keras_moe.report import Figure, Options, Table
from keras_moe.report.sections._compute import Compute
from keras_moe.report.sections._mumoe import MuMoEExperts
from tests.report_records import batch, block, record, reported
from tests.small_models import classifier, images, with_weights

TYPES = ("ffn", "ffn", "zero", "copy")
# A class token and 1 x 2 patches, K = 2.
SERVED = np.array([[[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]]], "float32")
GATES = np.array(
    [[[0.5, 0.3, 0.1, 0.1], [0.7, 0.0, 0.2, 0.1], [0.1, 0.1, 0.6, 0.2]]], "float32"
)


def moepp(key, expert_types=TYPES):
    return block(key, expert_types, num_selected_experts=2, capacity_factor=None)


def figures(content):
    return {part.name: part for part in content.body if isinstance(part, Figure)}


def test_compute_by_kind_by_hand():
    routing = {"block_0": record(GATES, SERVED)}
    section = Compute(reported(moepp("block_0")), Options())
    for value in (-1.0, 1.0):
        pictures = np.full((1, 2, 4, 1), value, "float32")
        masks = {"image": np.ones((1, 3), bool)}
        section.update(batch(routing, masks=masks, images=pictures))
    content = section.finish()
    layer = content.data["layers"]["block_0"]
    assert layer["shares"] == pytest.approx(
        {"ffn": 3 / 6, "zero": 2 / 6, "copy": 1 / 6, "constant": 0.0}
    )
    assert layer["experts_per_token"]["ffn"] == pytest.approx(1.0)
    assert layer["dropped_choices"] == pytest.approx(0.0)
    highest, second = np.array([0.5, 0.7, 0.6]), np.array([0.3, 0.2, 0.2])
    assert layer["highest_mean"] == pytest.approx(highest.mean())
    assert layer["highest_variance"] == pytest.approx(highest.var())
    assert layer["second_variance"] == pytest.approx(second.var())
    json.dumps(content.data)
    # The class token's two FFN experts are no patch's.
    drawn = figures(content)
    assert "example 0: 0.50" in drawn["compute_maps_1"].alt
    assert "ffn 0.00 to 1.00" in drawn["compute_mean_maps"].alt
    assert "constant" not in drawn["compute_mean_maps"].alt
    (finding,) = content.findings
    assert finding.level == "good"
    assert "1.00 of 2.00 choices" in finding.text


def test_words_with_most_compute_come_first():
    section = Compute(reported(moepp("text/b"), grid=None), Options())
    masks = {"text": np.array([[True, True, False]])}
    words = [["<b>", "$x$", ""]]
    section.update(batch({"text/b": record(GATES, SERVED)}, masks=masks, words=words))
    content = section.finish()
    assert content.data["words"] == {"<b>": [1, 2.0], "$x$": [1, 1.0]}
    (chips,) = [str(x.markup) for x in content.body if hasattr(x, "markup")]
    assert chips.index("&lt;b&gt;<sub>2.00") < chips.index("$x$<sub>1.00")
    # Padding does not count.
    assert content.data["layers"]["text/b"]["experts_per_token"]["ffn"] == 1.5


def test_ffn_experts_alone_are_no_moepp():
    assert not Compute.fits(reported(moepp("block_0", ("ffn",) * 4)))
    idle = np.tile(np.array([1, 1, 0, 0], "float32"), (1, 3, 1))
    section = Compute(reported(moepp("block_0")), Options())
    masks = {"image": np.ones((1, 3), bool)}
    pictures = np.zeros((1, 2, 4, 2), "float32")
    section.update(
        batch({"block_0": record(GATES, idle)}, masks=masks, images=pictures)
    )
    (finding,) = section.finish().findings
    assert finding.level == "notice"


def test_coefficients_by_class_by_hand():
    coefficients = np.array([[[1.0, 0.0, 0.0]], [[0.25, 0.75, 0.0]], [[0.5, 0.5, 0]]])
    section = MuMoEExperts(reported(block("head", kind="mumoe")), Options())
    labels = np.array([0, 2, -1])
    routing = {"head": record(coefficients, coefficients > 0)}
    section.update(batch(routing, masks={}, labels=labels))
    content = section.finish()
    head = content.data["head"]
    assert head["load"] == [2, 2, 0]
    assert head["mean_coefficients"] == pytest.approx([1.75 / 3, 1.25 / 3, 0])
    classes = figures(content)["mumoe_classes_head"]
    assert classes.alt.endswith("zero: expert 0, 2: expert 1")
    # No model was there to be asked without an expert.
    assert any("not ablated" in part for part in content.body if isinstance(part, str))
    assert content.findings[0].text == "head: 1 of 3 experts have no part."


def test_experts_of_a_head_are_ablated():
    options = {"activation": "softmax", "normalization": None, "use_bias": False}
    head = {"head": MuMoE(3, 4, rank=4, **options)}
    model = with_weights(classifier(head, num_layers=1, moe_layers=None))
    pictures, gates = images(24, 16, 8, 2), np.full((24, 1, 4), 0.25)
    outputs = model.predict(pictures, verbose=0)
    labels = outputs.argmax(axis=-1)
    whole = reported(block("head", 4, kind="mumoe"), keras_model=model)
    section = MuMoEExperts(whole, Options())
    for start in (0, 16):
        rows = slice(start, start + 16)
        records = {"head": record(gates[rows], gates[rows])}
        facts = {"labels": labels[rows], "outputs": outputs[rows]}
        section.update(batch(records, masks={}, images=pictures[rows], **facts))
    content = section.finish()
    ablation = content.data["head"]["ablation"]
    expected = ablate_experts(model, pictures, labels, verbose=0)
    assert expected.changes.any()
    np.testing.assert_allclose(ablation["ablated"], expected.ablated)
    assert ablation["images"] == 24
    text = content.findings[-1].text
    assert f"polysemanticity of {expected.mean_polysemanticity:.2f}" in text
    table = [part for part in content.body if isinstance(part, Table)][-1]
    assert "24 images" in table.caption
    assert len(table.rows) == int(expected.changes.any(axis=1).sum())
