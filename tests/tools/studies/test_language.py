"""The study of language models: its n-grams, its figures, and a small run."""

import json
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.training.text_folder import WORDS
from tools.studies import language
from tools.studies.ngrams import KneserNey
from tools.studies.texts import Texts

SIZES = {"vocabulary_size": 540, "length": 8, "hidden_dim": 8, "mlp_dim": 4}
SIZES |= {"layers": 2, "experts": 4, "steps": 4, "batch_size": 4}


def counted(documents, size, order):
    """Counts of n-grams of all orders, by the definition."""
    grams = {order: Counter()}
    for ids in documents:
        ids = [size] * order + list(ids)
        for end in range(order, len(ids)):
            grams[order][tuple(ids[end - order + 1 : end + 1])] += 1
    for n in range(order - 1, 0, -1):
        grams[n] = Counter(gram[1:] for gram in grams[n + 1])
    return grams


def probability(grams, size, history, token, n):
    if n == 0:
        return 1 / size
    counts, history = grams[n], history[len(history) - n + 1 :]
    lower = probability(grams, size, history[1:], token, n - 1)
    own = {gram: count for gram, count in counts.items() if gram[:-1] == history}
    if not own:
        return lower
    once, twice = (sum(x == k for x in counts.values()) for k in (1, 2))
    discount = once / max(once + 2 * twice, 1)
    kept = max(own.get((*history, token), 0) - discount, 0)
    return (kept + discount * len(own) * lower) / sum(own.values())


def test_kneser_ney_is_its_definition():
    draw, size, order = np.random.default_rng(0), 5, 4
    documents = [draw.integers(0, size, 25).tolist() for _ in range(4)]
    model, grams = KneserNey(documents, size, order), counted(documents, size, order)
    ids = draw.integers(0, size, 12).tolist()
    padded = [size] * order + ids
    expected, lengths = [], []
    for end in range(order, len(padded)):
        history = tuple(padded[end - order + 1 : end])
        expected.append(probability(grams, size, history, padded[end], order))
        before = {n: {gram[:-1] for gram in grams[n]} for n in grams}
        known = (history[order - n :] in before[n] for n in range(1, order + 1))
        lengths.append(sum(known) - 1)
    values, contexts = model.log_likelihoods(ids)
    np.testing.assert_allclose(values, np.log(expected))
    assert contexts.tolist() == lengths
    assert set(lengths) == {1, 2, 3}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root, draw = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    for split, count in (("train", 20), ("validation", 40), ("test", 5)):
        (root / split).mkdir()
        for number in range(count):
            words = draw.choice(WORDS.split(), 12)
            (root / split / f"{number}.txt").write_text(" ".join(words))
    return f"text:{root}"


def test_seeds_begin_anew_and_perplexities_are_of_all_rows(source):
    texts = language.Texts(source, SIZES["vocabulary_size"], SIZES["length"])
    trainer = language.Trainer(texts, SIZES)

    def fit(seed):
        model, result = trainer.fit("MoE++, tau=0.75", seed, 1e-2, 4, lambda _: None)
        return result["curve"][-1][-1], model

    first, _ = fit(0)
    again, model = fit(0)
    assert first == pytest.approx(again, rel=1e-6)
    rows = texts.rows["validation"]
    assert len(rows["targets"]) > language.EVALUATED
    inputs = {name: rows[name] for name in ("token_ids", "padding_mask")}
    logits = model.predict(inputs, verbose=0).astype("float64")
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    counted = rows["targets"] >= 0
    # The order in which n-grams see the same targets.
    documents = np.concatenate([x[1:] for x in language.documents_of(rows)])
    np.testing.assert_array_equal(rows["targets"][counted], documents)
    losses = np.take_along_axis(logits, rows["targets"][..., None], -1)[counted]
    expected = np.exp(-losses.mean())
    assert trainer.perplexity(model, rows) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(trainer.losses(model, rows), -losses[:, 0], rtol=1e-4)


def test_a_package_of_python_is_in_one_split():
    splits = Texts("python_sources", 1024, 64).texts
    assert set(splits) == {"train", "validation", "test"}
    texts = [text for split in splits.values() for text in split]
    assert len(texts) == len(set(texts))
    folder = Path(sysconfig.get_path("stdlib"), "encodings")
    pages = {file.read_text(encoding="utf-8") for file in folder.glob("cp*.py")}
    assert [len(pages & set(split)) for split in splits.values()].count(0) == 2


def test_figures_by_hand():
    curve = [[1, 1.0, 100.0], [2, 2.0, 50.0], [3, 3.0, 25.0]]
    assert language._seconds_until(curve, 50.0) == 2.0
    assert language._seconds_until(curve, np.sqrt(50.0 * 25.0)) == pytest.approx(2.5)
    assert language._seconds_until(curve, 20.0) == float("inf")
    draw = np.random.default_rng(1)
    experts = draw.integers(4, size=400)
    assert language._explained(experts, experts) > 0.95
    assert abs(language._explained(draw.integers(50, size=400), experts)) < 0.05


def test_a_small_study(done, source, tmp_path, monkeypatch):
    names = ("dense", "MoE++, tau=0.75", "muMoE")
    chosen = {name: language.MODELS[name] for name in names}
    monkeypatch.setattr(language, "MODELS", {**chosen, "vanilla MoE": chosen[names[1]]})
    monkeypatch.setattr(language, "ORDERS", range(2, 4))
    constants = {language.DEFAULT_TYPES: language.CONSTANTS[language.DEFAULT_TYPES]}
    monkeypatch.setattr(language, "CONSTANTS", constants)
    monkeypatch.setattr(language, "REMOVALS", ["zero", ("zero", "copy")])
    sizes = [x for k, v in SIZES.items() for x in (f"--{k.replace('_', '-')}", str(v))]
    folder = tmp_path / "study"
    arguments = ["language", "--data", source, "--seeds", "1", "--output", folder]
    arguments += ["--rates", "1e-3", "1e-2"]
    assert "Kneser-Ney" in done(*arguments, *sizes)
    results = json.loads((folder / "results.json").read_text())
    rows = results["training"]["rows"]
    assert set(rows) == {*names, "vanilla MoE"}
    assert rows["dense"]["time"] == 1.0
    assert 0 < rows["MoE++, tau=0.75"]["ffn_experts"]["mean"] < 2
    types = results["types"]
    assert list(types["removed"]) == ["zero", "zero and copy"]
    # Two experts serve a token, but for what is dropped.
    for row in types["by_class"].values():
        assert 0 < sum(x["mean"] for x in row.values()) <= 2
    assert results["ngrams"]["test"] < SIZES["vocabulary_size"]
    contexts = results["contexts"]
    assert contexts["perplexities"]["n-grams"] == results["ngrams"]["test"]
    found = contexts["rows"].values()
    assert sum(row["share"] for row in found) == pytest.approx(1)
    for name, value in contexts["perplexities"].items():
        mean = sum(row["share"] * row[name] for row in found)
        assert np.exp(mean) == pytest.approx(value)
    # Four steps of four rows are not all rows.
    whole, part = (
        contexts["perplexities"][f"n-grams{x}"] for x in ("", " of as many rows")
    )
    assert part > whole
