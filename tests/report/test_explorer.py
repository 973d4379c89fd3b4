"""The report's section on single examples, from records made by hand."""

import base64
import json
import re

import numpy as np
import pytest

from keras_moe.report import _markup
from keras_moe.report.section import Options, Reservoir
from keras_moe.report.sections._explorer import DATA_BUDGET, Explorer
from tests.report_records import batch, block, record, reported

HOSTILE = ["</script>", "<img onerror=alert(1)>", "$x^2$"]


def pictures(count=1):
    return np.linspace(-1, 1, count * 32, dtype="float32").reshape(count, 4, 8, 1)


def unpack(packed, kept):
    """The entries of `pack` by token: expert, whether it serves, value."""
    entries, largest = np.frombuffer(base64.b64decode(packed["entries"]), "<u4"), 2**15
    experts, serves = (
        entries >> (_markup.VALUE_BITS + 1),
        (entries >> _markup.VALUE_BITS & 1) > 0,
    )
    values = entries % largest / (largest - 1) * packed["largest"]
    flat = [*zip(experts.tolist(), serves.tolist(), values.tolist())]
    return [flat[i : i + kept] for i in range(0, len(flat), kept)]


def markup(content):
    return "".join(str(getattr(part, "markup", part)) for part in content.body)


def data_of(content):
    text = re.search(r'id="explorer-data">(.*?)</script>', markup(content)).group(1)
    return json.loads(text)


def test_a_reservoir_does_not_depend_on_batches():
    def kept(sizes, seed=5, numbers=None):
        reservoir, first = Reservoir(3, seed, numbers), 0
        for size in sizes:
            reservoir.offer(size, lambda index, first=first: first + index)
            first += size
        return reservoir.kept

    whole = kept([40])
    assert kept([1] * 40) == kept([7, 30, 3]) == whole
    assert list(whole) == sorted(whole) == list(whole.values())
    assert list(kept([2])) == [0, 1]
    assert kept([7, 30, 3], numbers=(17, 3)) == {3: 3, 17: 17}
    chosen = [n for seed in range(300) for n in kept([10], seed)]
    counts = np.bincount(chosen, minlength=10)
    # 90 of each, with a standard deviation of 8.
    assert counts.min() > 58
    assert counts.max() < 122


def test_the_examples_that_were_asked_for_are_drawn():
    gates = np.eye(3, dtype="float32")[[[0, 1], [1, 2], [2, 0], [0, 0]]]
    section = Explorer(reported(block("block_1")), Options(examples=(3, 1)))
    section.update(batch({"block_1": record(gates)}, images=pictures(4)))
    content = section.finish()
    assert [x["number"] for x in content.data["examples"]] == [1, 3]
    assert content.data["examples"][0]["experts"] == {"block_1": [1, 2]}
    assert content.body[-1].startswith("2 of 4 examples, the first 2 of them as maps")


def test_entries_are_the_heaviest_experts():
    values = np.array([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]])
    served = np.array([[True, False, True], [False, False, False]])
    routing = _markup.TokenRouting(values, served, values * served)
    assert routing.heaviest().tolist() == [2, -1]
    packed = _markup.pack(routing, kept=2)
    assert len(base64.b64decode(packed["entries"])) == 2 * 2 * 4
    expected = [[2, 1, 0.3], [0, 1, 0.1], [0, 0, 0.5], [2, 0, 0.3]]
    flat = [entry for row in unpack(packed, 2) for entry in row]
    np.testing.assert_allclose(flat, expected, atol=1e-4)


def test_maps_say_all_without_colours():
    text = _markup.expert_map(np.array([3, 3, 12, -1]), (2, 2), "example-0", "block_1")
    # Neighbours are one rectangle, and 12 has the colour of 4.
    assert '<path class="c3" d="M0 0h20v10h-20z"/>' in text
    assert '<path class="c4" d="M0 10h10v10h-10z"/>' in text
    assert re.findall(r"<tspan[^>]*>(\w+)<", text) == ["3", "3", "12", "x"]
    alt = "block_1, expert (number of patches): 3 (2), 12 (1), none (1)"
    assert f'aria-label="{alt}"' in text
    heat = _markup.heat_map(np.array([0.0, 0.2, 0.4, 0.0]), (2, 2), None, "expert 0")
    assert re.findall(r'class="(h\d)"', heat) == ["h2", "h5"]
    assert "row 2, column 1" in heat
    assert "<use" not in heat
    chips = _markup.word_chips(np.array([0, 9, -1]), HOSTILE, "text")
    assert not re.search("<img|</script|<b>[^t]", chips)
    assert "&lt;img onerror=alert(1)&gt;<sub>9</sub>" in chips


def test_one_example_of_images():
    gates = [[[0.2, 0.2, 0.6], [0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]]
    section = Explorer(reported(block("block_1")), Options())
    labels, outputs = np.array([1]), np.array([[2.0, 1.0]])
    facts = {"labels": labels, "outputs": outputs, "images": pictures()}
    section.update(batch({"block_1": record(gates)}, **facts))
    content = section.finish()
    (example,) = content.data["examples"]
    # The class token comes first, and has no place in the image.
    assert example["experts"] == {"block_1": [0, 1]}
    text = markup(content)
    assert "label &lt;b&gt;one&lt;/b&gt;, predicted zero" in text
    assert text.count("<h3>") == 1
    data = data_of(content)
    assert data["grid"] == [1, 2]
    packed = data["examples"][0]["layers"][0]["image"]
    assert [row[0][:2] for row in unpack(packed, 3)] == [(0, True), (1, True)]
    assert data["layers"][0]["experts"] == ["0", "1", "2"]


def test_captions_without_images():
    section = Explorer(reported(block("text/block_0"), grid=None), Options())
    gates = np.eye(3)[None, [0, 2, 1, 0]]
    masks = {"text": np.array([[True, True, True, False]])}
    words = [[*HOSTILE, ""]]
    routing = {"text/block_0": record(gates)}
    texts = {"words": words, "captions": [" ".join(HOSTILE)]}
    section.update(batch(routing, masks=masks, **texts))
    content = section.finish()
    text = markup(content)
    assert "<img" not in text
    # That of the data, at its end.
    assert text.count("</script>") == 1
    data = data_of(content)
    assert data["examples"][0]["words"] == HOSTILE
    assert data["grid"] is None
    assert content.data["examples"][0]["experts"] == {"text/block_0": [0, 2, 1]}


@pytest.mark.parametrize("kind", ["token_choice", "soft"])
def test_large_models_stay_within_the_page(kind):
    blocks = [block(f"block_{i}", 32, kind=kind) for i in range(24)]
    section = Explorer(reported(*blocks, grid=(14, 14)), Options(num_examples=4))
    gates = np.random.default_rng(0).dirichlet(np.ones(32), (4, 197))
    routing = {each.key: record(gates) for each in blocks}
    section.update(batch(routing, images=pictures(4)))
    content = section.finish()
    text = markup(content)
    assert len(text) < 2 * DATA_BUDGET
    assert "chooser" in text
    data = data_of(content)
    assert len(data["layers"]) == 24
    # The heaviest experts, while there is room.
    assert 1 <= data["layers"][0]["kept"]["image"] < 32
