"""The report: what it counts, the data that it takes, and the files that it writes."""

import json

import keras
import numpy as np
import pytest

from keras_moe import report
from keras_moe.analysis import prune_experts
from keras_moe.ops import Routing
from keras_moe.report import SectionContent, Table
from keras_moe.report.model import reported_model
from keras_moe.report.sections._layers import Confidence, EntropySums
from keras_moe.report.sections._loads import LayerCounts, demand, health_findings
from keras_moe.routers._pruned import METHODS
from tests.report_records import batch, block, reported
from tests.small_models import images, small_classifier, small_pairs_model

HOSTILE = "<script>alert(1)</script></svg>$x_{"


@pytest.fixture(scope="module")
def model():
    return small_classifier()


def one_batch(dispatched, affinity=None, mask=None):
    """A batch of one example with given tokens (N, E)."""
    served = np.asarray(dispatched, "float64")[None]
    affinity = served if affinity is None else np.asarray(affinity)[None]
    mask = np.ones(served.shape[:2], bool) if mask is None else np.array([mask])
    records = Routing(*[affinity] * 4, served, served * 0.5)
    return batch({"b": records}, masks={"image": mask})


def test_counts_by_hand():
    counts = LayerCounts(block("b"))
    affinity = [[0.9, 0.1, 0.0], [0.8, 0.2, 0.0], [0.1, 0.6, 0.3], [0.2, 0.3, 0.5]]
    served = [[1, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]]
    # The last token is padding.
    counts.update(one_batch(served, affinity, [True, True, True, False]))
    assert (counts.tokens, counts.unserved) == (3, 1)
    assert counts.served.tolist() == [1, 1, 0]
    assert counts.mass.tolist() == [0.5, 0.5, 0]
    assert counts.demand.tolist() == [2, 1, 0]
    assert counts.dropped == pytest.approx(1 / 3)
    assert counts.entropy == pytest.approx(np.log(2) / np.log(3))
    both = LayerCounts.together("layer", [counts, counts])
    assert both.served.tolist() == [2, 2, 0]
    assert (both.tokens, both.block.key) == (6, "layer")


def test_confidence_by_hand():
    section = Confidence(reported(block("b", 2)), report.Options())
    gates = [[0.9, 0.1], [0.6, 0.4], [0.5, 0.5], [0.2, 0.8], [1.0, 0.0]]
    # The last token is padding.
    section.update(one_batch(gates, gates, [True, True, True, True, False]))
    quartiles = section.finish().data["b"]
    # Bins of half a hundredth.
    expected = {"lower_quartile": 0.5, "median": 0.6, "upper_quartile": 0.8}
    assert quartiles == pytest.approx(expected, abs=0.006)


def test_entropies_by_hand():
    sums = EntropySums(2)
    gates = np.array([[0.5, 0.5], [1.0, 0.0]])
    # The second token was dropped.
    sums.add(gates, np.array([[1.0, 0.0], [0.0, 0.0]]), np.array([[1, 0], [0, 0]]))
    entropies = sums.entropies()
    assert entropies["local"] == pytest.approx(0.5)
    share = np.array([0.75, 0.25])
    expected = -(share * np.log(share)).sum() / np.log(2)
    assert entropies["global"] == pytest.approx(expected)
    assert (entropies["local_after"], entropies["global_after"]) == (0.0, 0.0)


@pytest.mark.parametrize(("kind", "served", "changes", "expected"), [
    ("token_choice", [5, 5, 5, 5], {}, "good All experts"),
    ("token_choice", [99, 0, 0, 0], {},
     "problem 3 of 4 experts are without a token: experts 1, 2, 3."),
    ("token_choice", [96, 2, 1, 1], {}, "problem collapsed: expert 0 does 96%"),
    ("token_choice", [999, 999, 999, 1], {}, "notice 1 of 4 experts is with less"),
    ("token_choice", [5] * 4, {"demand": [10, 5, 5, 5]}, "problem drops 20.0%"),
    ("expert_choice", [5, 5, 5, 5], {"unserved": 5}, "notice takes 25.0%"),
    ("soft", [0, 5, 5, 5], {}, "notice 1 of 4 experts is without weight: expert 0."),
    ("token_choice", [0, 0, 0, 0], {}, "problem no expert serves"),
])  # fmt: skip
def test_findings_by_hand(kind, served, changes, expected):
    counts = LayerCounts(block("b", 4, kind=kind, capacity_factor=None))
    counts.tokens = 20
    counts.served[:] = counts.mass[:] = counts.demand[:] = served
    for name, value in changes.items():
        setattr(counts, name, np.array(value))
    level, text = expected.split(" ", 1)
    findings = health_findings([counts])
    assert any(x.level == level and text in x.text for x in findings)


def test_records_of_a_shared_layer_are_judged_together():
    about = reported_model(small_pairs_model(["a cat"]))
    assert list(about.by_layer()) == ["block_1"]
    assert list(about.by_layer()["block_1"]) == ["image", "text"]
    assert about.modalities == ("image", "text")
    assert about.grid == (2, 2)


def test_the_files_of_a_report(model, tmp_path):
    folder = tmp_path / "report"
    data = images(5, 16, 8, 3), np.arange(5) % 3
    names = [HOSTILE, "b", "c"]
    written = report.write_report(
        model, data, folder, name=HOSTILE, class_names=names, batch_size=2, verbose=0,
        command="keras-moe report 'a b'", credit="Ann & Bob, CC BY 4.0",
        options=report.Options(training_batch_size=10),
    )  # fmt: skip
    page = written.page.read_text(encoding="utf-8")
    hits = model.predict(data[0], verbose=0).argmax(axis=-1) == data[1]
    assert f"<span>accuracy</span> {hits.mean():.1%}" in page
    assert f"<span>backend</span> {keras.backend.backend()}, Keras" in page
    assert "keras-moe report &#39;a b&#39;" in page
    assert "Pictures: Ann &amp; Bob, CC BY 4.0</footer>" in page
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    values = json.loads(written.data.read_text(encoding="utf-8"))
    assert values["examples"] == written.num_examples == 5
    # Eight patches and a class token.
    assert values["sections"]["loads"]["block_1"]["tokens"] == 45
    assert sum(values["sections"]["loads"]["block_1"]["served"]) == 90
    assert values["name"] == HOSTILE
    costs = values["sections"]["model"]["costs"]
    assert costs["parameters"] == model.count_params()
    # Nine tokens to two of four experts.
    assert costs["tokens_per_expert"] == [4.5]
    assert "with 45 tokens per expert and step of 10 images" in page
    known = [x.text for x in written.findings if "2605.15484" in x.text]
    assert known == costs["findings"]
    assert len(known) == 1
    assert len(written.pictures) == len({*written.pictures}) > 3
    for picture in written.pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert [x["text"] for x in values["findings"]] == [x.text for x in written.findings]


def test_a_failed_report_leaves_the_old_one(model, tmp_path, monkeypatch):
    folder = tmp_path / "report"
    pixels = images(1, 16, 8, 3)
    written = report.write_report(model, pixels, folder, name="first", verbose=0)
    (folder / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device", "report.json")

    with monkeypatch.context() as patch:
        patch.setattr(report.writing._files, "write_json", full)
        with pytest.raises(OSError, match="No space"):
            report.write_report(model, pixels, folder, name="second", verbose=0)
    assert {x.name: x.read_bytes() for x in folder.iterdir()} == before
    report.write_report(model, pixels, folder, name="second", verbose=0)
    assert "second" in written.page.read_text(encoding="utf-8")
    assert (folder / "notes.txt").read_text() == "mine"


class Classes(report.Section):
    """A section of counts, as in docs/analysis.md."""

    title, anchor = "Examples by class", "classes"
    intro = "How many examples of each class there are."

    def __init__(self, model, options):
        super().__init__(model, options)
        self.counts = {}

    def update(self, batch):
        for label in batch.labels.tolist():
            self.counts[label] = self.counts.get(label, 0) + 1

    def finish(self):
        rows = [[self.model.class_name(k), n] for k, n in sorted(self.counts.items())]
        table = Table(["class", "examples"], rows, "Classes")
        return SectionContent([table], self.counts)


class Judged(report.Section):
    """A section with findings of all levels."""

    title, anchor, intro = "Judged", "judged", "Findings."

    def finish(self):
        findings = [
            report.Finding(x, f"It is {x}.") for x in ("good", "notice", "problem")
        ]
        return report.SectionContent([], {}, findings)


def test_a_section_of_ones_own(model, tmp_path):
    data = images(3, 16, 8, 3), np.array([0, 2, 2])
    written = report.write_report(
        model, data, tmp_path / "report", sections=[Classes, Judged], verbose=0
    )
    assert [x.level for x in written.findings] == ["problem", "notice", "good"]
    values = json.loads(written.data.read_text(encoding="utf-8"))
    assert values["sections"] == {"classes": {"0": 1, "2": 2}, "judged": {}}
    page = written.page.read_text(encoding="utf-8")
    assert "Examples by class" in page
    assert page.index("It is problem.") < page.index("It is good.")


@pytest.mark.parametrize("method", ["router_drop", "router_pred_skip"])
def test_a_report_on_pruned_layers(model, tmp_path, method):
    smaller = prune_experts(model, {"block_1": [1, 3]}, method, removed=True)
    about = reported_model(smaller)
    (layer,) = about.blocks.values()
    # A smaller router numbers its experts anew.
    is_new = method == "router_drop"
    types = ("ffn", "ffn") if is_new else ("pruned", "ffn", "pruned", "ffn")
    assert layer.expert_types == types
    written = report.write_report(
        smaller, (images(5, 16, 8, 3), np.arange(5) % 3), tmp_path / "r", verbose=0
    )
    sections = json.loads(written.data.read_text())["sections"]
    load = sections["loads"]["block_1"]
    assert (np.array(load["served"]) > 0).tolist() == layer.is_present.tolist()
    # Nobody wonders that pruned experts are idle, or takes them away again.
    assert not any("no token" in finding.text for finding in written.findings)
    page = written.page.read_text(encoding="utf-8")
    assert ("4 (2 pruned)" in page) == (not is_new)


@pytest.mark.parametrize("method", METHODS)
def test_choices_of_pruned_experts(method):
    layer = block("b", ("ffn", "pruned", "ffn"), pruning=method)
    affinity = np.array([[[0.3, 0.6, 0.1], [0.7, 0.2, 0.1]]])
    served = np.array([[[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]])
    records = Routing(*[affinity] * 4, served, served)
    chosen = demand(layer, records, np.ones((1, 2), bool))
    moved = [0.0, 0.0, 0.0] if method == "router_pred_skip" else [1.0, 0.0, 0.0]
    assert chosen.tolist() == [moved, [1.0, 0.0, 0.0]]
