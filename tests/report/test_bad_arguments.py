"""Models, data and options that a report refuses, in one table."""

import numpy as np
import pytest

from keras_moe import models
from keras_moe.report import Options, Section, SectionContent, write_report
from tests.refusals import check_refused
from tests.small_models import SMALL, images, small_classifier, small_pairs_model

PIXELS = images(3, 16, 8, 3)
PAIRS = images(2, 8, 8, 3)
RANGE = r"in \[-1, 1\] as .*received: dtype="
LABELS = "Expected labels as whole.*; received: shape"
TEXTS = "Expected captions as a list|lengths"


class Count(Section):
    title, anchor, intro = "Count", "count", "Nothing."

    def finish(self):
        return SectionContent([], {})


@pytest.fixture(scope="module")
def models_of():
    pairs = small_pairs_model(["a cat", "two cats"])
    sizes = {k: x for k, x in SMALL.items() if k not in ("moe_layers", "num_experts")}
    return {
        "images": small_classifier(),
        "pairs": pairs,
        "pairs without a tokenizer": models.ContrastiveModel(pairs.backbone),
        "dense": models.from_preset("vit_s32", load_weights=False, **sizes),
    }


def unread():
    raise AssertionError("The data was read.")
    yield


def options(*examples):
    return {"options": Options(examples=examples)}


@pytest.mark.parametrize(("name", "data", "arguments", "message"), [
    ("dense", PIXELS, {}, "Expected a model with experts"),
    ("images", PIXELS[:0], {}, "at least one example; received: none"),
    ("images", (PIXELS, np.zeros(2, int)), {}, r"received: lengths \[2, 3\]"),
    ("images", {"x": PIXELS}, {}, r"Expected images, .*a dict of \['x'\]"),
    ("images", np.uint8(255 * (PIXELS > 0)), {}, RANGE),
    ("images", 127.5 * (PIXELS.clip(-1, 1) + 1.0), {}, RANGE),
    ("images", (PIXELS, np.array([0.5, 1.0, 0.0])), {}, LABELS),
    ("images", (PIXELS, np.array(["cat", "dog", "cat"])), {}, LABELS),
    ("images", (PIXELS, np.array([[0.3, 0.7], [0, 1], [0, 1]])), {}, LABELS),
    ("pairs", (PAIRS, "a cat"), {}, TEXTS),
    ("pairs", PAIRS, {}, "token_ids"),
    ("pairs without a tokenizer", (PAIRS, ["a", "b"]), {}, "preprocessor=None"),
    # Where the number is known, before the data is read; else after it.
    ("images", PIXELS, options(3), "numbers of examples below 3"),
    ("images", unread(), {**options(5), "max_examples": 5}, "below 5"),
    ("images", PIXELS, options(1, 1), "different numbers"),
    ("images", PIXELS, options(), r"examples=\(\)"),
    ("images", PIXELS, {"batch_size": 0}, "batch_size=0"),
    ("images", PIXELS, {"sections": [Count, Count]}, "different anchors"),
])  # fmt: skip
def test_bad_arguments(models_of, tmp_path, name, data, arguments, message):
    folder = tmp_path / "r"
    given = {"model": models_of[name], "data": data, "folder": folder, **arguments}
    check_refused(write_report, {**given, "verbose": 0}, message)
    assert not folder.exists()
