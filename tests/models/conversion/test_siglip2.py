"""SigLIP 2: Gemma's tokenizer, models of transformers, and zero-shot of SigLino."""

import io
import json
import warnings

import numpy as np
import pytest
import sentencepiece
from safetensors.numpy import load_file

from keras_moe import evaluation, models
from keras_moe.models import TextTokenizer
from tests import published
from tests.backends import every_backend_for
from tests.compare import assert_close, assert_same
from tests.models.conversion.test_siglino import MOE, released
from tests.refusals import refuses

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("op_by_op")
# Ranges of letters; the first three have capitals.
SCRIPTS = {
    "latin": ("AZ", "az", "\xc0\u024f"),
    "greek": ("\u0391\u03a1", "\u03a3\u03a9", "\u03b1\u03c9"),
    "cyrillic": ("\u0410\u044f",),
    "arabic": ("\u0627\u064a",),
    "hebrew": ("\u05d0\u05ea",),
    "devanagari": ("\u0905\u0939", "\u093e\u094d"),
    "thai": ("\u0e01\u0e2e", "\u0e30\u0e3a"),
    "hangul": ("\uac00\ud7a3",),
    "han": ("\u4e00\u9fff",),
    "kana": ("\u3041\u3096", "\u30a1\u30fa"),
}
OTHERS = [
    "🐱", "👩‍👩‍👧", "🇫🇷", "  ", "\t", "\n\n", "1", "2345", "(", "...", "—", "İ", "ß",
    "ﬁ", "\u200b", "▁", "\u00a0", "e\u0301", "</s>", "<0x41>",
]  # fmt: skip
SPECIAL = {"pad": 0, "eos": 1, "bos": 2, "unk": 3}


def word(draw, ranges):
    ends = [ranges[i] for i in draw.integers(len(ranges), size=draw.integers(1, 8))]
    return "".join(chr(draw.integers(ord(a), ord(b) + 1)) for a, b in ends)


def captions(count, seed):
    """Words of a script, most of them from a small vocabulary, and other signs."""
    draw, texts = np.random.default_rng(0), []
    words = {k: [word(draw, x) for _ in range(99)] for k, x in SCRIPTS.items()}
    draw = np.random.default_rng(seed)
    for number in range(count):
        name = list(SCRIPTS)[number % len(SCRIPTS)]
        space = "" if name in ("thai", "han", "kana") else " "
        parts = []
        for kind in draw.choice(3, size=draw.integers(1, 12), p=[0.7, 0.15, 0.15]):
            known = (words[name], OTHERS, [word(draw, SCRIPTS[name])])[kind]
            parts.append(known[draw.integers(len(known))])
        texts.append(space.join(parts))
    return texts


def trained(**options):
    """A model of SentencePiece, with the settings of Gemma's."""
    proto = io.BytesIO()
    pieces = {f"{name}_piece": f"<{name}>" for name in SPECIAL}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(x.lower().replace("\n", " ") for x in captions(2000, 1)),
        model_writer=proto,
        **{
            **{f"{name}_id": id for name, id in SPECIAL.items()},
            **pieces, "vocab_size": 3000, "model_type": "bpe", "byte_fallback": True,
            "split_digits": True, "add_dummy_prefix": False,
            "remove_extra_whitespaces": False, "normalization_rule_name": "identity",
            "character_coverage": 0.98, "allow_whitespace_only_pieces": True,
            "user_defined_symbols": ["<mask>", "</s>", "\t"], "minloglevel": 2,
            **options,
        },
    )  # fmt: skip
    return proto.getvalue()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A folder with both files, and transformers' tokenizer."""
    folder = tmp_path_factory.mktemp("gemma")
    (folder / "tokenizer.model").write_bytes(trained())
    config = {
        "tokenizer_class": "Siglip2Tokenizer", "add_eos_token": True,
        "padding_side": "right", "model_max_length": 64,
        **{f"{name}_token": f"<{name}>" for name in SPECIAL},
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    # Reads the vocabulary and its merges from SentencePiece's model.
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    reference.save_pretrained(folder)
    return folder, reference


def ids_of(reference, texts):
    options = {"padding": "max_length", "truncation": True, "max_length": 64}
    return reference(texts, return_tensors="np", **options)["input_ids"]


def test_ids_of_captions_in_ten_scripts(gemma):
    folder, reference = gemma
    texts = captions(10_000, 2)
    assert len({*texts}) > 9_500
    expected = ids_of(reference, texts)
    received = {}
    with warnings.catch_warnings():
        # Some are longer than 64 tokens.
        warnings.simplefilter("ignore")
        for name in ("tokenizer.json", "tokenizer.model"):
            tokenizer = TextTokenizer.sentence_piece(folder / name)
            assert (tokenizer.max_length, tokenizer.end_id) == (64, 1)
            received[name] = tokenizer(texts)
            assert 50 < tokenizer.num_truncated < 5_000
    for rows in received.values():
        assert_same(rows["token_ids"], expected)
        assert_same(rows["padding_mask"], expected != 0)
    # Nothing is unknown; capitals are as letters, whatever their neighbours are.
    assert not np.any(expected == SPECIAL["unk"])
    assert_same(*tokenizer(["\u039f\u0394\u039f\u03a3", "\u03bf\u03b4\u03bf\u03c3"])[
        "token_ids"
    ])  # fmt: skip


@pytest.mark.parametrize(
    "name", every_backend_for(["tokenizer.json", "tokenizer.model"], "tokenizer.json")
)
def test_a_whole_model_in_and_out(gemma, name, tmp_path):
    folder, tokenizer = gemma
    reference = published.transformers_siglip(
        vocab_size=len(tokenizer), max_position_embeddings=64
    )
    reference.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / name).write_bytes((folder / name).read_bytes())
    model = models.from_preset(str(tmp_path / "source"))
    texts = ["A Photo of a CAT", "\u0444\u043e\u0442\u043e \U0001f431", ""]
    inputs = {"input_ids": torch.tensor(ids_of(tokenizer, texts))}
    with torch.no_grad():
        expected = reference(pixel_values=published.pixels(), **inputs)
    pairs = {"images": published.PAIR_IMAGES, **model.preprocessor(texts)}
    received = model.predict(pairs, verbose=0)
    for kind in ("image", "text"):
        embeds = expected[f"{kind}_embeds"]
        assert_close(received[f"{kind}_embeddings"], embeds, 1e-5, 1e-5)
    logits = model.similarity(published.PAIR_IMAGES, texts)
    assert_close(logits, expected.logits_per_image, 1e-5, 1e-5)
    # The tokenizer is saved with the model.
    model.save_to_preset(tmp_path / "saved")
    again = models.from_preset(str(tmp_path / "saved"))
    assert_same(again.similarity(published.PAIR_IMAGES, texts), logits)
    # And exported with it.
    models.export_weights(again, "transformers", tmp_path / "exported")
    files = (tmp_path / x / "model.safetensors" for x in ("source", "exported"))
    before, after = (load_file(file) for file in files)
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert_same(after[key], value)
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    many = captions(100, 3)
    assert_same(ids_of(other, many), ids_of(tokenizer, many))


@pytest.mark.every_backend
def test_zero_shot_of_siglino(gemma, tmp_path):
    """Its features for SigLIP 2 next to the text tower that has images of any shape."""
    photos, arrays = released(MOE, tmp_path)
    folder, tokenizer = gemma
    dim = arrays["outputs/summary_features/siglip2"].shape[1]
    tower = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    text = {"vocab_size": len(tokenizer), "hidden_size": 16, "projection_size": dim}
    config = transformers.Siglip2Config(
        text_config={**tower, **text, "max_position_embeddings": 64},
        vision_config={**tower, "hidden_size": dim, "num_patches": 4, "patch_size": 2},
    )
    reference = published.torch_randomized(transformers.Siglip2Model(config))
    reference.save_pretrained(tmp_path / "siglip2")
    vocabulary = (folder / "tokenizer.json").read_text()
    (tmp_path / "siglip2" / "tokenizer.json").write_text(vocabulary)
    names = ["a cat", "a dog", "a BIRD"]
    siglino, siglip2 = str(tmp_path), str(tmp_path / "siglip2")

    # As in the documentation.
    encoder = models.from_preset(siglino, image_shape=photos.shape[1:])
    tokens = TextTokenizer.from_preset(siglip2)([f"a photo of {x}" for x in names])
    classes = models.TextBackbone.from_preset(siglip2).predict(tokens)["pooled"]
    images = encoder.predict(photos)["siglip2"]
    result = evaluation.zero_shot(images, [0, 1], classes)

    ids = ids_of(tokenizer, [f"a photo of {x}" for x in names])
    with torch.no_grad():
        expected = reference.text_model(torch.tensor(ids)).pooler_output
    assert_close(classes, expected, 1e-5, 1e-5)
    summaries = arrays["outputs/summary_features/siglip2"]
    assert_close(images, summaries, 1e-4, 2e-5)
    similarities = summaries @ (expected / expected.norm(dim=1, keepdim=True)).numpy().T
    own = similarities[[0, 1], [0, 1]]
    assert_same(result.ranks, np.sum(similarities >= own[:, None], axis=1))


def test_other_vocabularies(gemma, tmp_path):
    folder, _ = gemma
    published.transformers_siglip().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.model"
    # SigLIP's own, whose texts lose their punctuation first, is not read.
    path.write_bytes(trained(bos_id=-1, vocab_size=2990))
    assert models.from_preset(str(tmp_path)).preprocessor is None
    path.write_bytes((folder / "tokenizer.model").read_bytes())
    refuses("vocabulary_size=3000", models.from_preset, str(tmp_path))
    text = (folder / "tokenizer.json").read_text()
    for content in (text[:-9], "{}", '{"model": {"type": "BPE"}}'):
        path = tmp_path / "tokenizer.json"
        path.write_text(content)
        for load in (TextTokenizer.sentence_piece, TextTokenizer.from_preset):
            source = path if load == TextTokenizer.sentence_piece else str(tmp_path)
            refuses(r"tokenizer\.json", load, source)
    tokenizer = TextTokenizer.sentence_piece(folder / "tokenizer.json")
    assert tokenizer.tokens([[1, 3]]) == [["<eos>", "<unk>"]]
    ids = tokenizer("a photo of 2 cats")["token_ids"]
    assert tokenizer.texts(ids) == ["a photo of 2 cats" + "<pad>" * (ids == 0).sum()]
