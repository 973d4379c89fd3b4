"""Models that answer from several threads, and are looked at while they do."""

import json
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_moe import analysis, evaluation, layers, models
from keras_moe.report import write_report
from keras_moe.report.sections._explorer import Explorer
from keras_moe.report.sections._mumoe import MuMoEExperts
from tests import small_models
from tests.pair_models import ONE, TEXT
from tests.small_models import images, small_pairs_model, with_weights

IMAGES, LABELS = images(12, 16, 8, 2), np.arange(12) % 3
PIXELS = images(4, 8, 8, 3)
TEXTS = ["a cat", "two cats sat", "the hat", "a photo of one hat"]
PHOTO = np.arange(16 * 8 * 2, dtype="uint8").reshape(16, 8, 2)

pytestmark = pytest.mark.every_backend


def classifier():
    head = layers.MuMoE(3, num_experts=4, rank=4, activation="softmax")
    preprocessor = models.ImagePreprocessor((16, 8, 2), mean=0.5, std=0.5)
    parts = {"head": head, "preprocessor": preprocessor}
    return with_weights(small_models.classifier(parts, router="softmax_token_choice"))


def mixer():
    backbone = models.MixerBackbone(
        image_shape=(16, 8, 2), patch_size=4, hidden_dim=8, num_layers=1, mlp_dim=12,
        token_mlp_dim=6, token_mixer="mumoe",
        moe={"moe_layers": [0], "router": "mumoe", "num_experts": 4},
    )  # fmt: skip
    return with_weights(models.MixerImageClassifier(backbone, 3))


def pairs():
    return small_pairs_model(TEXTS)


def language_model():
    tokenizer = models.TextTokenizer.trained(TEXTS, 530, max_length=12)
    sizes = {**TEXT, **ONE, "vocabulary_size": 530, "max_length": 12, "num_experts": 2}
    backbone = models.DecoderBackbone.from_config(sizes)
    model = models.CausalLM(with_weights(backbone), tokenizer)
    model.compile(sampler="greedy")
    return model


IDS = np.array([[1, 7, 9, 0, 0, 0, 0, 0]])
MASK = {"padding_mask": IDS != 0}
# Each model, and what a server calls.
DOORS = {
    classifier: {
        "predict": lambda model: model.predict(IMAGES, batch_size=8, verbose=0),
        "classify": lambda model: [x.probability for x in model.classify(PHOTO)],
    },
    pairs: {
        "similarity": lambda model: model.similarity(PIXELS, TEXTS[:3], batch_size=4),
        "encode": lambda model: model.encode_images(PIXELS, batch_size=3),
    },
    language_model: {
        "generate": lambda model: model.generate({"token_ids": IDS, **MASK}),
        "score": lambda model: model.score(TEXTS),
    },
}


def in_threads(functions):
    """Calls functions at the same time; their results, or the first one's error."""
    start = threading.Barrier(len(functions))

    def work(function):
        start.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(work, functions))


def assert_same(actual, expected):
    actual, expected = map(keras.tree.flatten, (actual, expected))
    for a, b in zip(actual, expected, strict=True):
        if isinstance(a, (str, type(None))):
            assert a == b
        else:
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "door"), [(make, door) for make in DOORS for door in DOORS[make]]
)
def test_doors_answer_in_threads_and_compile_once(make, door):
    model, call = make(), DOORS[make][door]
    block, traces = model.backbone.get_layer("block_0"), []
    inner = block.call

    def counted(*args, **kwargs):
        traces.append(1)
        return inner(*args, **kwargs)

    block.call = counted
    answers = in_threads([lambda: (call(model), call(model))] * 4)
    of_threads = len(traces)
    expected = call(model)
    for answer in answers:
        assert_same(answer, (expected, expected))
    if keras.backend.backend() != "torch":
        # As often as one thread alone: a fresh model of the same weights.
        model, traces[:] = make(), []
        block = model.backbone.get_layer("block_0")
        inner, block.call = block.call, counted
        call(model)
        assert of_threads == len(traces)


def usage(model, inputs, **options):
    return analysis.expert_usage(model, inputs, verbose=0, **options)


def ablated(model, layer, experts, removal=None):
    result = analysis.ablate_experts(
        model, IMAGES, LABELS, layer, experts, removal=removal, verbose=0
    )
    return result.to_dict()


def outputs(model):
    return model.predict(IMAGES, verbose=0)


def report(model):
    sections = [Explorer, MuMoEExperts]
    with tempfile.TemporaryDirectory() as folder:
        data = IMAGES, LABELS
        written = write_report(
            model, data, f"{folder}/report", sections=sections, verbose=0
        )
        return json.loads(Path(written.data).read_text())


def few_shot(model):
    features, data = keras.Model(model.input, model.features), (IMAGES, LABELS)
    data = evaluation.extract_features(features, data)
    result = evaluation.few_shot(*data, *data, shots=(1,))
    return result.accuracies


# Functions of `analysis`, `report` and `evaluation`, one of each way to look.
LOOKS = {
    classifier: {
        "contributions": lambda model: usage(
            model.backbone, IMAGES, contributions=True
        ).to_dict(),
        "not chosen": lambda model: ablated(model, "block_1", [1], "choice"),
        "head": lambda model: ablated(model, "head", [0, 3]),
        "logits": lambda model: outputs(
            analysis.edit_expert_logits(model, IMAGES, output=1)
        ),
        "steered": lambda model: outputs(analysis.steer_expert(model, "block_1", 2)),
        "pruned": lambda model: outputs(
            analysis.prune_experts(model, {"block_1": [0, 1, 2]})
        ),
        "report": report,
        "few shot": few_shot,
    },
    mixer: {
        "block": lambda model: ablated(model, "block_0", [0, 3]),
        "mixer": lambda model: ablated(model, "block_0/token_mixer", [0, 3]),
    },
    pairs: {
        "usage": lambda model: usage(
            model.backbone,
            {"images": PIXELS, **model.preprocessor(TEXTS)},
            contributions=True,
        ).to_dict(),
        "zero shot": lambda model: (
            evaluation.zero_shot_from_model(model, PIXELS, np.arange(4), TEXTS).ranks
        ),
    },
    language_model: {
        "continuations": lambda model: evaluation.continuation_log_likelihoods(
            model, [("a cat", " sat")]
        )
    },
}
SERVED = {
    classifier: DOORS[classifier]["predict"],
    mixer: lambda model: model.predict(IMAGES, verbose=0),
    pairs: DOORS[pairs]["similarity"],
    language_model: DOORS[language_model]["generate"],
}


@pytest.mark.parametrize("make", LOOKS)
def test_a_model_answers_while_it_is_looked_at(make, op_by_op):
    model, serve = make(), SERVED[make]
    answer = serve(model)
    expected = {name: look(model) for name, look in LOOKS[make].items()}
    over = threading.Event()

    def look_at():
        try:
            return {name: look(model) for name, look in LOOKS[make].items()}
        finally:
            over.set()

    def serve_on():
        answers = []
        while not over.is_set():
            answers.append(serve(model))
        return answers

    actual, answers = in_threads([look_at, serve_on])
    for name, result in actual.items():
        assert_same(result, expected[name])
    assert answers
    for each in answers:
        assert_same(each, answer)


def test_a_model_is_evaluated_in_threads():
    model = classifier()
    model.compile()
    alone = model.evaluate(IMAGES, LABELS, verbose=0)
    results = in_threads([lambda: model.evaluate(IMAGES, LABELS, verbose=0)] * 4)
    if keras.backend.backend() == "jax":
        assert results == [alone] * 4
    assert np.isfinite(model.predict(IMAGES, verbose=0)).all()
