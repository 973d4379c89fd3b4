"""The report on models and data with numbers that are not finite, and odd batches."""

import json
import re

import numpy as np
import pytest

from keras_moe import models
from keras_moe.report import write_report, writing
from keras_moe.report._queues import whole_groups
from keras_moe.report.model import reported_model
from keras_moe.report.section import Options
from tests.small_models import images, small_classifier


@pytest.fixture(scope="module")
def model():
    return small_classifier(examples_per_group=4, evaluation="official")


def report(model, data, folder, **kwargs):
    written = write_report(model, data, folder, verbose=0, **kwargs)
    values = json.loads(written.data.read_text(), parse_constant=pytest.fail)
    return written, values["sections"]


def test_images_that_are_not_finite_are_left_out(model, tmp_path):
    pixels, labels = images(8, 16, 8, 3), np.arange(8) % 3
    broken = np.concatenate([pixels, pixels[:4]])
    broken[8:10, 0, 0, 0], broken[10:, 0, 0, 0] = np.nan, np.inf
    _, expected = report(model, (pixels, labels), tmp_path / "a", batch_size=4)
    data, options = (broken, np.append(labels, [0] * 4)), Options(examples=(0, 8))
    written, sections = report(
        model, data, tmp_path / "b", batch_size=4, options=options
    )
    assert written.findings[0].level == "problem"
    texts = [x.text for x in written.findings]
    assert "The outputs of 4 of 12 examples are not finite." in texts
    assert any("block_1: the gates of 36 of 108 tokens" in x for x in texts)
    loads, own = sections["loads"]["block_1"], expected["loads"]["block_1"]
    assert loads.pop("tokens_not_finite") == 4 * 9
    assert own.pop("tokens_not_finite") == 0
    assert loads == own
    for name in ("entropies", "confidence"):
        assert sections[name] == expected[name], name
    whole, part = (x["predicted"] for x in sections["explorer"]["examples"])
    assert whole is not None
    assert part is None


@pytest.mark.parametrize("preset", ["moepp_digits", "mumoe_digits"])
def test_weights_that_are_not_finite(tmp_path, preset):
    whole = models.from_preset(preset, load_weights=False, num_classes=10)
    for weight in whole.weights:
        if weight.path.endswith("kernel") and "float" in str(weight.dtype):
            weight.assign(np.full(weight.shape, np.nan))
            break
    data = images(3, *whole.backbone.image_shape), np.array([0, 1, 2])
    written, _ = report(whole, data, tmp_path / "r")
    texts = [x.text for x in written.findings]
    assert any("tokens are not finite" in x for x in texts)
    assert not any("no expert serves" in x or "have no part" in x for x in texts)


def test_groups_are_whole(model, tmp_path):
    of_report = reported_model(model)
    # Below a group of four, up to a quarter of it, and above.
    sizes = [whole_groups(of_report, size) for size in (1, 3, 4, 6, 33)]
    assert sizes == [4, 4, 4, 4, 32]
    data = images(22, 16, 8, 3)
    small, own = report(model, data, tmp_path / "a", batch_size=6)
    _, all_at_once = report(model, data, tmp_path / "b", batch_size=64)
    for name in ("priorities", "dropped-patches"):
        assert own[name] == all_at_once[name]
    # Five groups of images with eight patches and a class token, and two choices each.
    queues = own["priorities"]["layers"][0]["queues"]
    assert sum(map(sum, queues.values())) == 20 * 9 * 2
    page = small.page.read_text(encoding="utf-8")
    assert "Examples per group: 4, as in training." in page
    assert "2 of 22 examples at the end fill no group and are left out here." in page


def test_a_page_that_would_be_too_large_says_what_it_leaves_out(
    model, tmp_path, monkeypatch
):
    data = images(15, 16, 8, 3), np.arange(15) % 3
    options = Options(num_examples=15)

    def page_of(name):
        folder = tmp_path / name
        written = write_report(model, data, folder, options=options, verbose=0)
        return written, written.page.read_text(encoding="utf-8")

    written, whole = page_of("a")
    assert "pictures left out" not in whole
    most = len(whole.encode()) * 2 // 3
    monkeypatch.setattr(writing, "MAX_BYTES", most)
    written, cut = page_of("b")
    assert most * 0.6 < len(cut.encode()) <= most
    assert "<span>pictures left out for the page&#39;s size</span>" in cut
    # All figures are beside the page.
    for name in re.findall(r"it is in (\w+\.png)", cut):
        assert (written.page.parent / name).is_file()
    # Tables stay, even if the page is too large for them.
    monkeypatch.setattr(writing, "MAX_BYTES", 1)
    _, least = page_of("c")
    assert "<svg" not in least.split("<main>")[1]
    assert least.count("<table>") == whole.count("<table>")
