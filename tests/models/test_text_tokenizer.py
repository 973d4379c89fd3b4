"""Tokenizers: CLIP's against those of others, SentencePiece, and those of one's own."""

import importlib.util
import io
import json
import warnings

import numpy as np
import pytest

from keras_moe import models
from keras_moe.models import TextBackbone, TextTokenizer
from keras_moe.models.preprocessing import _byte_pairs
from keras_moe.models.preprocessing._byte_pairs import clip_byte_pairs
from tests.compare import assert_same
from tests.forks import run_python
from tests.pair_models import TEXT
from tests.refusals import refuses
from tests.small_models import small_tokenizer as own

CAPTIONS = [
    "A photo of a cat.",
    "two  dogs\tand\na   bird",
    "it's the dog's 2nd; they'll've WON'T",
    "Crème brûlée à la carte — œuvre, naïve",
    "日本語のテキスト と 한국어",
    "a 🐱 & 🚀🚀, 👩‍👩‍👧",
    "$1,234.56 (50%) <b>bold</b> #tag @you http://a.b/c?d=e_f",
    "<|endoftext|> inside <|startoftext|>",
    "İstanbul ǅ ﬁne ½ Ω",
    "",
    " ",
    "word " * 200,
]
SIZES = {**TEXT, "vocabulary_size": 530, "max_length": 20}
FEW = ["a photo of a cat", "a photo of two cats", "the cat's hat"]


@pytest.fixture(scope="module")
def clip():
    if importlib.util.find_spec("open_clip") is None:
        pytest.skip("open_clip ships the vocabulary")
    return TextTokenizer.clip()


@pytest.fixture(scope="module")
def sentence_piece():
    import sentencepiece

    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(FEW), model_writer=proto, vocab_size=24,
        hard_vocab_limit=False, model_type="unigram", pad_id=0, eos_id=1, unk_id=2,
        bos_id=-1, minloglevel=2,
    )  # fmt: skip
    return proto.getvalue()


def rows(tokenizer, captions):
    """Each caption's ids without padding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        texts = tokenizer(captions)
    pairs = zip(texts["token_ids"], texts["padding_mask"])
    return [ids[mask].tolist() for ids, mask in pairs]


def test_clip_equals_transformers(clip):
    transformers = pytest.importorskip("transformers")
    pairs = clip_byte_pairs()
    reference = transformers.CLIPTokenizer(
        vocab=pairs.vocabulary, merges=[tuple(m.split()) for m in pairs.merges]
    )
    expected = reference(CAPTIONS, truncation=True, max_length=77)["input_ids"]
    for caption, ids, other in zip(CAPTIONS, rows(clip, CAPTIONS), expected):
        assert ids == other, caption


def test_clip_from_files(tmp_path):
    merges = ["a t</w>", "c at</w>"]
    vocabulary = own(vocabulary_size=516).tokenizer.vocabulary
    vocabulary = {k: v for k, v in vocabulary.items() if v not in (512, 513)}
    start, end = (vocabulary.pop(x) for x in ("<|startoftext|>", "<|endoftext|>"))
    vocabulary.update({"at</w>": start, "cat</w>": end})
    vocabulary.update({"<|startoftext|>": end + 1, "<|endoftext|>": end + 2})
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    tokenizer = TextTokenizer.clip(tmp_path, max_length=4)
    assert rows(tokenizer, ["CAT"]) == [[end + 1, end, end + 2]]


@pytest.mark.parametrize(("content", "message"), [
    (None, "No such file"),
    (b"#version\na b\n", "2 lines"),
    (b"#version\n" + b"a b c\n" * 48894, "two tokens.*'a b c'"),
])  # fmt: skip
def test_other_files_are_refused(content, message, tmp_path):
    path = tmp_path / "merges.txt"
    if content is not None:
        path.write_bytes(content)
    refuses(message, TextTokenizer.clip, path)
    refuses(r"vocab\.json", TextTokenizer.clip, tmp_path)


def test_sentence_piece(sentence_piece, tmp_path):
    import sentencepiece

    (tmp_path / "model.spm").write_bytes(sentence_piece)
    reference = sentencepiece.SentencePieceProcessor(model_proto=sentence_piece)
    for vocabulary in (sentence_piece, tmp_path / "model.spm"):
        tokenizer = TextTokenizer.sentence_piece(vocabulary, max_length=30)
        assert (tokenizer.end_id, tokenizer.padding_id) == (1, 0)
        received = rows(tokenizer, ["A Photo OF a cat", ""])
        expected = reference.encode("a photo of a cat")
        assert received == [[*expected, 1], [1]]
    cased = TextTokenizer.sentence_piece(sentence_piece, lower_case=False)
    assert rows(cased, ["Photo"]) != rows(tokenizer, ["Photo"])
    for other in (tmp_path / "no.spm", b"no model"):
        refuses(r"no\.spm|8 bytes", TextTokenizer.sentence_piece, other)


def test_own_byte_pairs():
    tokenizer = own()
    assert tokenizer.vocabulary_size == 530
    # The end of a text has the largest id, which CLIP's pooling wants.
    assert (tokenizer.start_id, tokenizer.end_id) == (528, 529)
    names = [tokenizer.tokenizer.id_to_token(id) for id in rows(tokenizer, FEW)[0]]
    words = "".join(names[1:-1]).split("</w>")
    assert words == [*FEW[0].split(), ""]
    assert len(rows(tokenizer, ["cat"])[0]) < len(rows(tokenizer, ["xyz"])[0])
    # No byte is unknown.
    for ids in rows(tokenizer, CAPTIONS[2:7]):
        assert ids.count(529) == 1
        assert ids[-1] == 529 or len(ids) == 77
    assert rows(own(), FEW) == rows(tokenizer, FEW)


# Trains in a process that imports neither Keras nor the rest of the package.
TRAIN = """
import importlib.util, json, sys, types
checks = types.ModuleType("keras_moe._checks")
checks.check_integer = lambda name, value, *bounds: value
checks.unfit = ValueError
files = types.ModuleType("keras_moe._files")
files.read_bytes = files.read_text = None
sys.modules.update({"keras_moe._checks": checks, "keras_moe._files": files})
spec = importlib.util.spec_from_file_location("byte_pairs", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
captions = [a + b + " " + b + c for a in "abcdefg" for b in "hijkl" for c in "mnop"]
print(json.dumps(module.trained_byte_pairs(captions, 560).merges))
"""


def test_every_process_trains_the_same_byte_pairs():
    # Most of these pairs are as frequent as others, and hash maps differ by process.
    command = "-c", TRAIN, _byte_pairs.__file__
    outputs = {run_python(*command).stdout for _ in range(4)}
    assert len(outputs) == 1
    assert len(json.loads(outputs.pop())) == 560 - 514


def test_truncation_is_counted():
    tokenizer = own(max_length=4)
    with pytest.warns(UserWarning, match=r"2 of 3 captions.*max_length=4"):
        texts = tokenizer(["zzzz", "cat", "yyyyyy"])
    assert texts["token_ids"].shape == (3, 4)
    assert texts["token_ids"][[0, 2], -1].tolist() == [529, 529]
    assert texts["padding_mask"].sum(axis=1).tolist()[::2] == [4, 4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer(["xxxxx"])
        tokenizer([])
    assert tokenizer.num_truncated == 3


@pytest.mark.parametrize(("captions", "message"), [
    (["a", 3], r"captions\[1\]=3"),
    (["a", b"b"], r"captions\[1\]=b'b'"),
    (7, "captions=7"),
])  # fmt: skip
def test_captions_that_are_no_strings(captions, message):
    for call in (own(), lambda x: TextTokenizer.trained(x, 515)):
        refuses(message, call, captions)


def test_captions_of_any_sequence():
    tokenizer = own(max_length=20)
    expected = tokenizer(FEW)["token_ids"]
    for captions in (tuple(FEW), np.array(FEW), np.array(FEW, object), iter(FEW)):
        assert_same(tokenizer(captions)["token_ids"], expected)
    bare = TextTokenizer(own().tokenizer)
    refuses(r"one token.*captions\[1\]=' '", bare, ["a", " "])


@pytest.mark.parametrize("name", ["clip", "own", "spm"])
def test_ids_in_a_tf_data_pipeline_are_the_same(name, request):
    import tensorflow as tf

    tokenizer = {
        "clip": lambda: request.getfixturevalue("clip"),
        "own": lambda: own(max_length=32),
        "spm": lambda: TextTokenizer.sentence_piece(
            request.getfixturevalue("sentence_piece"), 20
        ),
    }[name]()
    # KerasHub's own path in a graph neither lower-cases nor splits as CLIP does.
    captions = ["A Photo of a cat.", "two  dogs\tand 12 B\u00dcRDS \U0001f431", ""]
    expected = tokenizer(captions)
    dataset = tf.data.Dataset.from_tensor_slices(captions)
    (whole,) = dataset.batch(3).map(tokenizer)
    for row, texts in enumerate(dataset.map(tokenizer)):
        assert texts.keys() == expected.keys()
        for key, value in texts.items():
            assert_same(value, expected[key][row])
            assert_same(whole[key], expected[key])
    specs = dataset.batch(2).map(tokenizer).element_spec
    assert specs["token_ids"].shape.as_list() == [None, tokenizer.max_length]
    assert (specs["token_ids"].dtype, specs["padding_mask"].dtype) == ("int32", "bool")
    for other in (tf.zeros((2,)), tf.fill((2, 2), "a")):
        refuses(r"\(batch,\); received: dtype=", tokenizer, other)


def test_a_tokenizer_is_part_of_a_preset(sentence_piece, tmp_path):
    backbone = TextBackbone(**SIZES)
    tokenizers = {
        "own": own(max_length=20),
        "spm": TextTokenizer.sentence_piece(sentence_piece, 20),
    }
    for name, tokenizer in tokenizers.items():
        tokenizer.check_fits(backbone)
        folder = tmp_path / name
        backbone.save_to_preset(folder)
        tokenizer.save_to_preset(folder)
        # The tokenizer stays where the backbone is saved again.
        models.from_preset(str(folder)).save_to_preset(folder)
        again = TextTokenizer.from_preset(folder)
        assert again.get_config() == tokenizer.get_config()
        texts = again(FEW[:1])
        expected = tokenizer(FEW[:1])
        for key, value in texts.items():
            assert_same(value, expected[key])
        assert backbone.predict(texts, verbose=0)["pooled"].shape == (1, 8)
    with pytest.raises(ValueError, match=r"at most the 529.*vocabulary_size=530"):
        own().check_fits(TextBackbone(vocabulary_size=529, num_layers=1))
    refuses("max_length=21", own(max_length=21).check_fits, backbone)
    backbone.save_to_preset(tmp_path / "without")
    refuses("without", TextTokenizer.from_preset, tmp_path / "without")


def save(folder, sentence_piece=None):
    """A preset's tokenizer, and its files."""
    tokenizer = own(max_length=20)
    if sentence_piece:
        tokenizer = TextTokenizer.sentence_piece(sentence_piece, 20)
    tokenizer.save_to_preset(folder)
    return tokenizer, sorted(path for path in folder.rglob("*") if path.is_file())


def damaged(content, draw):
    """Cut, with a byte or several changed, with further bytes, in another order."""
    at = int(draw.integers(len(content)))
    several = bytearray(content)
    for i in draw.integers(0, len(content), 8):
        several[i] ^= 1 << int(draw.integers(8))
    lines = content.split(b"\n")
    draw.shuffle(lines)
    yield content[:at]
    yield content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    yield bytes(several)
    yield content[:at] + draw.bytes(5) + content[at:]
    yield b"\n".join(lines)
    for other in (None, [], {}, "x", {"a": 1}, {"a": "b"}, {"a": [1]}, {"a": True}):
        yield json.dumps(other).encode()


def outcome(load):
    """The ids of captions, or the message of the ValueError."""
    try:
        return rows(load(), FEW)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["byte_pairs", "sentence_piece"])
@pytest.mark.parametrize("has_checksums", [True, False])
def test_damaged_files_of_a_preset_are_named(
    kind, has_checksums, sentence_piece, tmp_path
):
    spm = sentence_piece if kind == "sentence_piece" else None
    tokenizer, paths = save(tmp_path, spm)
    if not has_checksums:
        (tmp_path / "metadata.json").unlink()
        # KerasHub's config of the vocabulary is not read.
        paths = [x for x in paths if x.name not in ("metadata.json", "tokenizer.json")]
    expected, draw = rows(tokenizer, FEW), np.random.default_rng(0)
    for path in paths:
        whole = path.read_bytes()
        for content in damaged(whole, draw):
            path.write_bytes(content)
            received = outcome(lambda: TextTokenizer.from_preset(tmp_path))
            if received == expected:
                # Such as another space. A changed sum may be that of no file.
                is_metadata = path.name == "metadata.json"
                assert not has_checksums or is_metadata or content == whole
            else:
                assert path.name in received
                assert str(tmp_path) in received
        path.write_bytes(whole)


def test_damaged_files_of_vocabularies_are_named(sentence_piece, tmp_path):
    pairs, draw = own().tokenizer, np.random.default_rng(0)
    files = {
        "vocab.json": json.dumps(pairs.vocabulary).encode(),
        "merges.txt": "\n".join(["#version: 0.2", *pairs.merges]).encode(),
        "model.spm": sentence_piece,
    }
    for name, whole in files.items():
        (tmp_path / name).write_bytes(whole)
    expected = rows(own(), FEW)
    for name, whole in files.items():
        path = tmp_path / name
        for content in damaged(whole, draw):
            path.write_bytes(content)
            if name == "model.spm":
                received = outcome(lambda p=path: TextTokenizer.sentence_piece(p))
                # No checksum tells a piece from another one.
                assert isinstance(received, list) or str(path) in received
            else:
                received = outcome(lambda: TextTokenizer.clip(tmp_path))
                assert received == expected or str(tmp_path) in received
        path.write_bytes(whole)


@pytest.mark.parametrize("kind", ["byte_pairs", "sentence_piece"])
def test_ids_as_people_read_them(kind, sentence_piece):
    tokenizer = own()
    if kind == "sentence_piece":
        tokenizer = TextTokenizer.sentence_piece(sentence_piece)
    texts = tokenizer(FEW[:2])
    for caption, tokens, mask in zip(
        FEW, tokenizer.tokens(texts["token_ids"]), texts["padding_mask"]
    ):
        assert len(tokens) == tokenizer.max_length
        words = [token for token, counts in zip(tokens, mask) if counts]
        own_words = words[1 if tokenizer.start_id is not None else 0 : -1]
        letters = "".join(own_words).replace("▁", "").replace(" ", "")
        assert letters == caption.replace(" ", "")
    # A byte that is no character by itself keeps its name.
    assert all(isinstance(x, str) and x for x in own().tokens([[200, 250]])[0])
    with pytest.raises(ValueError, match=f"received: -1 to {tokenizer.end_id}"):
        tokenizer.tokens([[-1, tokenizer.end_id]])


def test_clip_by_hand(clip):
    assert clip.vocabulary_size == 49408
    texts = clip("A photo of a cat.")
    ids = [49406, 320, 1125, 539, 320, 2368, 269, 49407]
    assert texts["token_ids"].shape == (1, 77)
    assert texts["token_ids"].dtype == "int32"
    assert texts["token_ids"][0, :8].tolist() == ids
    assert not texts["token_ids"][0, 8:].any()
    assert texts["padding_mask"][0].tolist() == [True] * 8 + [False] * 69
    assert rows(clip, [""]) == [[49406, 49407]]
