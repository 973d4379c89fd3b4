"""Likelihoods of texts after others, against `score`; lm_eval."""

import json

import numpy as np
import pytest

from keras_moe import evaluation, models
from tests.pair_models import ONE, TEXT

TEXTS = ["the cat sat on the mat", "a dog ran over two hills", "one two three four"]


@pytest.fixture(scope="module")
def model():
    tokenizer = models.TextTokenizer.trained(TEXTS, 540, max_length=12)
    sizes = {**TEXT, **ONE, "vocabulary_size": 540, "max_length": 12, "hidden_dim": 16}
    backbone = models.DecoderBackbone.from_config(
        {**sizes, "num_experts": 2, "seed": 0}
    )
    model = models.CausalLM(backbone, tokenizer)
    # Far from uniform.
    kernel = backbone.token_embedding.trainable_weights[-1]
    kernel.assign(10 * np.random.default_rng(0).normal(size=kernel.shape))
    return model


def by_score(model, context, continuation):
    """The sum of `score`'s tokens after the context."""
    before, whole = model.preprocessor.prompts([context, context + continuation])
    return model.score([whole], per_token=True)[0, len(before) :].sum()


def test_likelihoods_are_those_of_score(model):
    pairs = [("the cat", " sat on"), ("a dog ran", " over"), ("", "one two three")]
    scores = evaluation.continuation_log_likelihoods(model, pairs, batch_size=2)
    for pair, (score, greedy) in zip(pairs, scores, strict=True):
        assert score == pytest.approx(by_score(model, *pair), rel=1e-4)
        assert not greedy
    # What the model writes greedily is the likeliest of all.
    model.compile(sampler="greedy")
    ids = np.array(model.preprocessor.prompts(["the cat"]))
    prompt = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    written = model.generate(prompt, ids.shape[1] + 3, stop_token_ids=None)
    scorer = evaluation.language._Scorer(model, 1)
    whole = written["token_ids"][0].tolist()
    ((_, greedy),) = scorer.scores([(whole, 3)])
    assert greedy
    whole[-1] = (whole[-1] + 1) % 540
    ((_, greedy),) = scorer.scores([(whole, 3)])
    assert not greedy


def test_long_contexts_lose_their_beginning(model):
    context = " ".join(TEXTS * 3)
    ids = model.preprocessor.prompts([context + " cat sat"])[0]
    count = len(ids) - len(model.preprocessor.prompts([context])[0])
    ((score, _),) = evaluation.continuation_log_likelihoods(
        model, [(context, " cat sat")]
    )
    # The 12 tokens that predict, and the last one; two rows see all but the first.
    row = ids[-13:]
    inputs = {"token_ids": np.array([row[:-1]]), "padding_mask": np.ones((1, 12), int)}
    logits = model.predict(inputs, verbose=0)[0].astype("float64")
    values = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    own = values[np.arange(12), row[1:]][-count:]
    assert score == pytest.approx(own.sum(), rel=1e-4)


def test_bad_input(model):
    with pytest.raises(ValueError, match="pairs of two texts; received: 'ab'"):
        evaluation.continuation_log_likelihoods(model, ["ab"])
    with pytest.raises(ValueError, match="continuations of at most 12 tokens"):
        evaluation.continuation_log_likelihoods(model, [("a", " cat sat" * 20)])
    with pytest.raises(ValueError, match="Expected a CausalLM with a tokenizer"):
        evaluation.continuation_log_likelihoods(model.backbone, [("a", " cat")])


def test_lm_eval_asks_for_likelihoods_and_texts(model):
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    adapter = evaluation.lm_eval_model(model, batch_size=2)

    def ask(kind, *arguments):
        requests = [instance(kind, {}, x, 0) for x in arguments]
        return getattr(adapter, kind)(requests)

    pairs = [("the cat ", "sat"), ("one", " two three")]
    for (score, _), (a, b) in zip(
        ask("loglikelihood", *pairs), (("the cat", " sat"), pairs[1])
    ):
        assert score == pytest.approx(by_score(model, a, b), rel=1e-4)
    short, long = TEXTS[0], " ".join(TEXTS)
    scores = ask("loglikelihood_rolling", (short,), (long,))
    assert scores[0] == pytest.approx(by_score(model, "", short), rel=1e-4)
    # Each token once, in windows of the model's length.
    windows = evaluation.language._Scorer(model, 1).windows(long)
    ids = model.preprocessor.prompts([long])[0]
    assert [x for ids, n in windows for x in ids[-n:]] == ids[1:]
    assert len(windows) > 1
    assert scores[1] < scores[0]
    options = {"max_gen_toks": 4}
    (whole,) = ask("generate_until", ("the cat", options))
    prompt = model.preprocessor.prompts(["the cat"])[0]
    expected = model.generate("the cat", len(prompt) + 4, strip_prompt=True)
    assert whole == expected
    stop = whole[1]
    (cut,) = ask("generate_until", ("the cat", {**options, "until": [stop]}))
    assert cut == whole.split(stop)[0]


def test_lm_eval_runs_a_task(model, tmp_path):
    tasks = pytest.importorskip("lm_eval.tasks")
    lm_eval = pytest.importorskip("lm_eval.evaluator")
    rows = [
        {"question": "the cat", "choices": ["sat", "two"], "answer": 0},
        {"question": "one two", "choices": ["mat", "three"], "answer": 1},
        {"question": "a dog", "choices": ["ran over two hills", "mat"], "answer": 0},
    ]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "own.yaml").write_text(
        f"""
task: own
dataset_path: json
dataset_kwargs:
  data_files: {{test: {tmp_path}/test.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
    )
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    options = {"tasks": ["own"], "task_manager": manager, "bootstrap_iters": 0}
    results = lm_eval.simple_evaluate(evaluation.lm_eval_model(model), **options)
    results = results["results"]["own"]
    right = {"acc": 0, "acc_norm": 0}
    for row in rows:
        pairs = [(row["question"], f" {choice}") for choice in row["choices"]]
        scores = evaluation.continuation_log_likelihoods(model, pairs)
        scores = np.array([score for score, _ in scores])
        lengths = [len(choice) for choice in row["choices"]]
        right["acc"] += scores.argmax() == row["answer"]
        right["acc_norm"] += (scores / lengths).argmax() == row["answer"]
    for metric, count in right.items():
        assert results[f"{metric},none"] == pytest.approx(count / 3)
