"""The report's script in a browser: what its choices draw, and the page without it."""

import numpy as np
import pytest

from keras_moe.analysis.report.page import Chapter, page_html
from keras_moe.analysis.report.section import Batch, Block, Options, Subject
from keras_moe.analysis.report.sections.explorer import Explorer
from keras_moe.ops import Routing
from tests.browser import OVERFLOWS, opened_browser

pytestmark = pytest.mark.backend_free

WORDS = ["</script>", "<img src=x onerror=document.title=1>", "$x$"]
KEYS = [f"{modality}/block_{i}" for i in (1, 3) for modality in ("image", "text")]
TEXTS = "[...document.querySelectorAll('#explorer-map text')].map(x => x.textContent)"
SAYS = "document.getElementById('explorer-says').textContent"
CHIPS = (
    "[...document.querySelectorAll('#explorer-words .chip')].map(x => x.textContent)"
)


def routed(gates):
    gates = np.asarray(gates, "float32")[None]
    served = np.zeros_like(gates)
    np.put_along_axis(served, gates.argmax(axis=-1)[..., None], 1, axis=-1)
    # The last token finds no room.
    served[:, -1] = 0
    return Routing(gates, gates, gates, gates, served, served * gates)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    blocks = {
        key: Block(
            key,
            key[-7:],
            key.partition("/")[0],
            "token_choice",
            ("ffn",) * 3,
            1,
            1.0,
            None,
        )
        for key in KEYS
    }
    subject = Subject(None, "small", blocks, (1, 2), None, ("image", "text"))
    section = Explorer(subject, Options())
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
        section.update(Batch(start, images, ["a"], [WORDS], masks, None, routing, None))
    path = tmp_path_factory.mktemp("page") / "report.html"
    chapters = [Chapter(section, section.finish())]
    path.write_text(page_html(subject, chapters, {}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    with opened_browser() as opened:
        yield opened


def choose(page, name, value):
    """Takes a choice as a reader does."""
    page.evaluate(
        f"""(() => {{
          const select = document.getElementById("explorer-{name}");
          select.value = "{value}";
          select.dispatchEvent(new Event("change"));
        }})()"""
    )


def test_choices_are_drawn(written, browser):
    browser.errors.clear()
    browser.open(written, 390)
    assert browser.evaluate(TEXTS) == ["2", "x"]
    assert browser.evaluate(CHIPS) == [f"{WORDS[0]}1", f"{WORDS[1]}2", f"{WORDS[2]}x"]
    assert browser.evaluate(SAYS) == (
        "block_1: an expert serves 1 of 2 patches, 2 of 3 words."
    )
    choose(browser, "expert", 1)
    assert browser.evaluate(TEXTS) == [".20", ".30"]
    says = browser.evaluate(SAYS)
    assert "expert 1: serves 0 of 2 patches, 1 of 3 words" in says
    assert "a gate of 0.500" in says
    opacity = "document.querySelectorAll('#explorer-map rect')[0].style.fillOpacity"
    assert float(browser.evaluate(opacity)) == pytest.approx(0.75 * 0.2 / 0.5, abs=1e-3)
    choose(browser, "token", "text:0")
    says = browser.evaluate(SAYS)
    assert says.startswith(f"block_1, word 1, {WORDS[0]}: experts by gate 1 (0.500, se")
    choose(browser, "token", "image:1")
    assert "patch of row 1, column 2: experts by gate 0 (0.600)" in browser.evaluate(
        SAYS
    )
    # The other example has other experts in block_1 alone.
    choose(browser, "token", "all")
    choose(browser, "expert", "all")
    choose(browser, "example", 1)
    assert browser.evaluate(TEXTS) == ["0", "x"]
    browser.evaluate("document.getElementById('explorer-on').click()")
    assert browser.evaluate("document.getElementById('explorer-layer').value") == "1"
    assert browser.evaluate(TEXTS) == ["2", "x"]
    browser.evaluate(
        "document.querySelector('#explorer-map rect').dispatchEvent("
        "new MouseEvent('click'))"
    )
    assert browser.evaluate("document.getElementById('explorer-token').value") == (
        "image:0"
    )
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("document.title") == "Routing of small"
    assert browser.evaluate(OVERFLOWS) == []
    assert browser.errors == []


def test_keys_move_through_layers(written, browser):
    browser.open(written, 1280)
    browser.evaluate("document.getElementById('explorer-back').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.call(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter",
            windowsVirtualKeyCode=13, text="\r",
        )  # fmt: skip
    assert browser.evaluate("document.getElementById('explorer-layer').value") == "1"
    unlabelled = """[...document.querySelectorAll('select')]
      .filter(x => !x.labels.length || !x.labels[0].textContent.trim()).length"""
    assert browser.evaluate(unlabelled) == 0


def test_the_page_without_the_script(written, browser):
    browser.open(written, 390, script=False)
    shown = "getComputedStyle(document.getElementById('explorer-chooser')).display"
    assert browser.evaluate(shown) == "none"
    maps = "[...document.querySelectorAll('.map svg')].map(x => x.ariaLabel)"
    assert browser.evaluate(maps) == [
        f"block_{layer}: expert {expert}: 1 patch, 1 patch without an expert"
        for layer, expert in ((1, 2), (3, 2), (1, 0), (3, 2))
    ]
    height = "document.querySelector('.map svg').getBoundingClientRect().height"
    assert browser.evaluate(height) > 20
    browser.open(written, 390)
    assert browser.evaluate(shown) != "none"
