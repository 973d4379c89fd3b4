"""The page of the report in a browser: what it loads, what fits, and its script."""

import re
from pathlib import Path

import numpy as np
import pytest

from keras_moe import models
from keras_moe.analysis.plots._figure import EXPERT_COLOURS, TYPE_COLOURS
from keras_moe.ops import Routing
from keras_moe.report import Options, write_report, writing
from keras_moe.report.sections._explorer import Explorer
from keras_moe.report.writing import page_html
from tests.browser import OVERFLOWS, opened_browser
from tests.report_records import batch, block, record, reported
from tests.small_models import images, with_weights

HOSTILE = '<script>alert(1)</script></svg><img src="http://example.com/x.png"> $a_{'
WORDS = ["</script>", "<img src=x onerror=document.title=1>", "$x$"]
KEYS = [f"{modality}/block_{i}" for i in (1, 3) for modality in ("image", "text")]
TEXTS = "[...document.querySelectorAll('#explorer-map text')].map(x => x.textContent)"
SAYS = "document.getElementById('explorer-says').textContent"
CHIPS = (
    "[...document.querySelectorAll('#explorer-words .chip')].map(x => x.textContent)"
)
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
    sizes = {"num_classes": 40, "num_experts": 32, "num_layers": 9}
    model = models.from_preset(
        "vmoe_digits", load_weights=False, moe_layers="every_1", **sizes
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
    written = write_report(
        model, data, tmp_path / "report", name=HOSTILE, class_names=names, verbose=0
    )
    assert written.page.stat().st_size < LARGEST
    page.requests.clear()
    page.errors.clear()
    for width in (390, 1280):
        for dark in (False, True):
            page.open(written.page, width, dark)
            # Errors come after the page's own event.
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


def test_an_expert_has_one_colour():
    css = (Path(writing.__file__).parent / "page.css").read_text("utf-8")
    tints = dict(re.findall(r"\.c(\d)(?:, \.h)? \{ --tint: (#\w+);", css))
    expected = {str(e): x.lower() for e, x in enumerate(EXPERT_COLOURS)}
    assert tints == expected
    assert not {*TYPE_COLOURS.values()} & {*EXPERT_COLOURS}


def routed(gates):
    served = np.eye(3)[np.argmax(gates, axis=-1)]
    # The last token finds no room.
    served[-1] = 0
    return record([gates], served[None])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    blocks = {key: block(key, block=key[-7:]) for key in KEYS}
    section = Explorer(reported(*blocks.values()), Options())
    first = {
        "image": routed([[0.1, 0.2, 0.7], [0.6, 0.3, 0.1]]),
        "text": routed([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8], [1, 0, 0]]),
    }
    for start, order in enumerate(([0, 1, 2], [2, 0, 1])):
        routing = {
            key: Routing(*(x[..., order] for x in first[blocks[key].modality]))
            if key.endswith("1")
            else first[blocks[key].modality]
            for key in KEYS
        }
        masks = {"image": np.ones((1, 2), bool), "text": np.ones((1, 3), bool)}
        images = np.zeros((1, 4, 8, 3), "float32")
        facts = {"captions": ["a"], "words": [WORDS], "masks": masks}
        section.update(batch(routing, start=start, images=images, **facts))
    path = tmp_path_factory.mktemp("page") / "report.html"
    html = page_html("small", [(section, section.finish())], {})
    path.write_text(html, encoding="utf-8")
    return path


def choose(page, name, value):
    """Takes a choice as a reader does."""
    page.evaluate(
        f"""(() => {{
          const select = document.getElementById("explorer-{name}");
          select.value = "{value}";
          select.dispatchEvent(new Event("change"));
        }})()"""
    )


def test_choices_are_drawn(written, page):
    page.errors.clear()
    page.open(written, 390)
    assert page.evaluate(TEXTS) == ["2", "x"]
    assert page.evaluate(CHIPS) == [f"{WORDS[0]}1", f"{WORDS[1]}2", f"{WORDS[2]}x"]
    assert page.evaluate(SAYS) == (
        "block_1: an expert serves 1 of 2 patches, 2 of 3 words."
    )
    choose(page, "expert", 1)
    assert page.evaluate(TEXTS) == [".20", ".30"]
    says = page.evaluate(SAYS)
    assert "expert 1: serves 0 of 2 patches, 1 of 3 words" in says
    assert "a gate of 0.500" in says
    opacity = "document.querySelectorAll('#explorer-map rect')[0].style.fillOpacity"
    assert float(page.evaluate(opacity)) == pytest.approx(0.75 * 0.2 / 0.5, abs=1e-3)
    choose(page, "token", "text:0")
    says = page.evaluate(SAYS)
    assert says.startswith(f"block_1, word 1, {WORDS[0]}: experts by gate 1 (0.500, se")
    choose(page, "token", "image:1")
    assert "patch of row 1, column 2: experts by gate 0 (0.600)" in page.evaluate(SAYS)
    # The other example has other experts in block_1 alone.
    choose(page, "token", "all")
    choose(page, "expert", "all")
    choose(page, "example", 1)
    assert page.evaluate(TEXTS) == ["0", "x"]
    # Keys move through layers, too.
    page.evaluate("document.getElementById('explorer-back').focus()")
    for kind in ("keyDown", "keyUp"):
        page.call(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter",
            windowsVirtualKeyCode=13, text="\r",
        )  # fmt: skip
    assert page.evaluate("document.getElementById('explorer-layer').value") == "1"
    assert page.evaluate(TEXTS) == ["2", "x"]
    page.evaluate(
        "document.querySelector('#explorer-map rect').dispatchEvent("
        "new MouseEvent('click'))"
    )
    assert page.evaluate("document.getElementById('explorer-token').value") == (
        "image:0"
    )
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    unlabelled = """[...document.querySelectorAll('select')]
      .filter(x => !x.labels.length || !x.labels[0].textContent.trim()).length"""
    assert page.evaluate(unlabelled) == 0
    assert page.evaluate("document.title") == "Routing of small"
    assert page.evaluate(OVERFLOWS) == []
    assert page.errors == []


def test_the_page_without_the_script(written, page):
    page.open(written, 390, script=False)
    shown = "getComputedStyle(document.getElementById('explorer-chooser')).display"
    assert page.evaluate(shown) == "none"
    maps = "[...document.querySelectorAll('.map svg')].map(x => x.ariaLabel)"
    expected = []
    for experts in ((2, 2), (0, 2)):
        expected.append("The image")
        for layer, expert in zip((1, 3), experts):
            text = f"block_{layer}, expert (number of patches): {expert} (1), none (1)"
            expected.append(text)
    assert page.evaluate(maps) == expected
    height = "document.querySelector('.map svg').getBoundingClientRect().height"
    assert page.evaluate(height) > 20
    page.open(written, 390)
    assert page.evaluate(shown) != "none"
