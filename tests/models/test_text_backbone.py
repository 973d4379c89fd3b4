"""Backbones of texts: causality, padding, pooling, experts, and what is refused."""

import keras
import numpy as np
import pytest

from keras_moe import distribution, models
from keras_moe.models import TextBackbone
from tests import pair_models
from tests.compare import assert_close, assert_same
from tests.pair_models import MOE, TEXT
from tests.refusals import refuses
from tests.small_models import with_weights

pytestmark = pytest.mark.usefixtures("op_by_op")

SIZES = {**TEXT, "projection_dim": 4, "seed": 3}
IDS = pair_models.IDS[:2]
MASK = IDS != 0


def text(**kwargs):
    return TextBackbone.from_config({**SIZES, **kwargs})


def texts(ids=IDS, mask=None):
    return {"token_ids": ids, "padding_mask": ids != 0 if mask is None else mask}


@pytest.fixture(scope="module")
def moe():
    return with_weights(text(**MOE))


def outputs(model, inputs):
    return {k: keras.ops.convert_to_numpy(x) for k, x in model(inputs).items()}


def test_a_later_token_changes_no_earlier_one(moe):
    other = IDS.copy()
    other[1, 3] = 2
    before, after = (outputs(moe, texts(ids))["tokens"][1] for ids in (IDS, other))
    assert_close(after[:3], before[:3], atol=1e-5)
    assert (np.abs(after - before)[3:].max(axis=-1) > 1e-4).all()
    both_ways = with_weights(text(causal=False))
    before, after = (outputs(both_ways, texts(x))["tokens"][1] for x in (IDS, other))
    assert (np.abs(after - before).max(axis=-1) > 1e-4).all()


@pytest.mark.parametrize("causal", [True, False])
def test_padding_changes_no_result(causal):
    model = with_weights(text(causal=causal, **MOE, pooling="average"))
    expected = outputs(model, texts())
    ids = np.where(MASK, IDS, 4)
    longer = np.pad(ids, ((0, 0), (0, 1)), constant_values=9)
    mask = np.pad(MASK, ((0, 0), (0, 1)))
    for inputs in (texts(ids, MASK), texts(longer, mask), texts(IDS[:1, :3])):
        received = outputs(model, inputs)
        rows = len(inputs["token_ids"])
        kept = np.asarray(inputs["padding_mask"], bool)
        assert_close(
            received["tokens"][kept], expected["tokens"][:rows][MASK[:rows]], atol=1e-5
        )
        assert_close(received["pooled"], expected["pooled"][:rows], atol=1e-5)


def test_padding_may_count_as_tokens():
    model = with_weights(text(mask_padding=False, causal=False, pooling="last"))
    received = model.predict(texts(), verbose=0)
    unmasked = model.predict(texts(mask=np.ones_like(MASK)), verbose=0)
    assert_same(received["pooled"], unmasked["pooled"])
    masked = with_weights(text(causal=False, pooling="last"))
    difference = masked.predict(texts(), verbose=0)["pooled"] - received["pooled"]
    assert np.abs(difference[0]).max() > 1e-3
    assert_close(difference[1], 0, atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "positions"),
    [("first", [0, 0]), ("last", [2, 4]), ("end_of_text", [2, 4])],
)
def test_pooled_is_the_projection_of_a_token(pooling, positions):
    model = with_weights(text(pooling=pooling, projection_bias=True))
    received = model.predict(texts(), verbose=0)
    tokens = received["tokens"][[0, 1], positions]
    kernel, bias = (np.array(w) for w in model.get_layer("projection").weights)
    assert_close(received["pooled"], tokens @ kernel + bias, atol=1e-5)
    plain = text(pooling=pooling, projection_dim=None)
    assert plain.output["pooled"].shape == (None, 8)


@pytest.mark.parametrize(
    "kwargs", [{}, MOE, {"pooling": "map", "projection_bias": True}]
)
def test_it_is_described_and_laid_out(kwargs):
    model = text(**kwargs)
    described = models.describe(model)
    counts = [int(np.prod(w.shape)) for w in model.trainable_weights]
    assert described.parameters == sum(counts)
    assert (described.num_tokens, described.hidden_dim) == (6, 8)
    assert described.example == "text"
    rules = distribution.layouts(model, 2, model_parallel=2)
    name = "(.*/)?attention/(query|key|value)/kernel"
    assert rules.weights[name] == (None, "model", None)
    assert any("experts" in rule for rule in rules.weights) == ("moe_layers" in kwargs)


def test_the_defaults_are_the_text_tower_of_clip():
    model = models.Blueprint(TextBackbone, {"projection_dim": 512}).build_abstract()
    # The published number of the text tower with its projection.
    assert sum(int(np.prod(w.shape)) for w in model.weights) == 63_428_096
    described = models.describe(model)
    assert described.parameters == 63_428_096
    per_block = 24 * 77 * 512**2 + 4 * 77**2 * 512
    assert described.gflops == (12 * per_block + 2 * 512**2) / 1e9


@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_presets_of_longer_texts(moe, tmp_path):
    moe.save_to_preset(tmp_path / "saved")
    shorter = models.from_preset(str(tmp_path / "saved"), max_length=5)
    assert type(shorter) is TextBackbone
    both = (outputs(model, texts())["tokens"] for model in (shorter, moe))
    assert_close(*both, atol=1e-6)
    with pytest.raises(ValueError, match="or of more tokens"):
        models.from_preset(str(tmp_path / "saved"), max_length=7)


def test_adapters_and_int8_of_token_ids():
    model = with_weights(text(num_layers=1))
    expected = outputs(model, texts())["pooled"]
    # The tests of images quantise all other layers.
    model.token_embedding.quantize("int8")
    assert model.token_embedding.quantization_mode == "int8"
    received = outputs(model, texts())["pooled"]
    assert 0 < np.abs(received - expected).max() < 0.2 * np.abs(expected).max()
    model = text(**MOE)
    model.enable_lora(2, ["query", "experts", "token_embedding"])
    assert all("lora" in weight.name for weight in model.trainable_weights)


@pytest.mark.parametrize(("inputs", "message"), [
    (texts(np.array([[1, -1]])), "received: -1"),
    (texts(np.ones((1, 7), "int32")), r"max_length=6.*\(1, 7\)"),
    (texts(np.array([[1.0, 2.0]])), "dtype=float64"),
    ({**texts(), "padding_mask": MASK[:1]}, r"one shape.*\(1, 5\)"),
    (texts(np.array([[1, 19], [1, 3]])), "end_of_text_id=19.*text 1"),
])  # fmt: skip
def test_bad_texts(inputs, message):
    model = text(end_of_text_id=19, num_layers=1)
    for method in ("predict", "predict_on_batch", "fit", "evaluate"):
        refuses(message, getattr(model, method), inputs)


def test_no_texts_have_no_outputs():
    model = text(num_layers=1)
    for predict in (model.predict, model.predict_on_batch):
        received = predict(texts(IDS[:0]))
        assert received["pooled"].shape == (0, 4)
        assert received["tokens"].shape == (0, 0, 8)
    refuses("at least one image or example", model.evaluate, texts(IDS[:0]))
