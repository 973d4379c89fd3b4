"""The page of the report in a browser: it loads nothing, and fits phone and desktop."""

import numpy as np
import pytest

from keras_moe import analysis, models
from tests.browser import OVERFLOWS, opened_browser
from tests.small_models import images, with_weights

pytestmark = pytest.mark.backend_free

HOSTILE = '<script>alert(1)</script></svg><img src="http://example.com/x.png"> $a_{'
# Bytes of a page; mail and reviews take as much.
LARGEST = 2_000_000


def limoe():
    captions = [HOSTILE, "a cat", "two cats", "a dog"]
    tokenizer = models.TextTokenizer.trained(captions, 560, max_length=16)
    model = models.from_preset(
        "limoe_emoji", task="contrastive", preprocessor=tokenizer, load_weights=False
    )
    shape = model.backbone.image_shape
    pictures = images(12, *shape).clip(-1, 1)
    return model, {"images": pictures, "captions": captions * 3}


def deep():
    model = models.from_preset(
        "vmoe_digits",
        load_weights=False,
        num_classes=40,
        num_experts=32,
        num_layers=9,
        moe_layers="every_1",
    )
    labels = np.arange(80) % 40
    return with_weights(model), (images(80, 16, 16, 1), labels)


MODELS = {"limoe": limoe, "deep": deep}


@pytest.fixture(scope="module")
def page():
    with opened_browser() as opened:
        yield opened


@pytest.mark.parametrize("name", MODELS)
def test_the_page_fits_and_loads_nothing(name, page, tmp_path):
    model, data = MODELS[name]()
    names = [f"{HOSTILE} {number}" for number in range(40)]
    written = analysis.report(
        model, data, tmp_path / "report", name=HOSTILE, class_names=names, verbose=0
    )
    assert written.page.stat().st_size < LARGEST
    page.requests.clear()
    page.errors.clear()
    for width in (390, 1280):
        for dark in (False, True):
            page.open(written.page, width, dark)
            # Errors come behind the page's own event.
            page.evaluate("new Promise(done => setTimeout(done, 100))")
            assert page.evaluate(OVERFLOWS) == []
            colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (colour == "rgb(255, 255, 255)") is not dark
    assert page.evaluate("document.querySelectorAll('main section h2').length") > 4
    missing = "[...document.images].filter(x => !x.complete || !x.naturalWidth).length"
    assert page.evaluate(missing) == 0
    without_alt = "[...document.images].filter(x => !x.hasAttribute('alt')).length"
    assert page.evaluate(without_alt) == 0
    doubles = """(() => {
      const ids = [...document.querySelectorAll('[id]')].map(x => x.id);
      return ids.filter((x, i) => ids.indexOf(x) !== i).slice(0, 3);
    })()"""
    assert page.evaluate(doubles) == []
    assert page.requests == []
    assert page.errors == []


def test_a_page_that_loads_or_overflows_is_seen(page, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<body><div class='wide' style='width: 2000px; height: 2px'></div>"
        "<img src='http://localhost:9/x.png'>"
        "<script>console.error('wrong'); undefinedName()</script>"
    )
    page.requests.clear()
    page.errors.clear()
    page.open(bad, 390)
    page.evaluate("new Promise(done => setTimeout(done, 100))")
    assert page.evaluate("innerWidth") == 390
    assert page.evaluate(OVERFLOWS)[0].startswith("DIV.wide")
    assert page.requests == ["http://localhost:9/x.png"]
    assert any("wrong" in error for error in page.errors)
    assert any("undefinedName" in error for error in page.errors)
