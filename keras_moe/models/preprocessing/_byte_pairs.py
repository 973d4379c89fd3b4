"""Byte-pair vocabularies: CLIP's from a file, or trained.

Ids: 256 bytes, 256 bytes ending a word, a token per merge, start and end of text.
"""

import gzip
import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from keras_moe._checks import check_integer, unfit
from keras_moe._files import read_bytes, read_text

# What a CLIP's folder has, as transformers writes it: one group or both.
TOKENIZER_FILES = (("vocab.json", "merges.txt"), ("tokenizer.json",))
START, END = "<|startoftext|>", "<|endoftext|>"
END_OF_WORD = "</w>"
# Bytes, bytes at the end of a word, two special tokens.
_BASE = 514
# The trainer reserves memory for as many tokens as it is asked for.
_MOST = 2**24
# OpenAI's file has more merges than CLIP uses.
_CLIP_MERGES = 49152 - 256 - 2
_PACKAGE, _FILE = "open_clip", "bpe_simple_vocab_16e6.txt.gz"
# CLIP's word pattern: merges stay within words.
_WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|"
    r"[^\s\p{L}\p{N}]+"
)


class BytePairs(NamedTuple):
    """Token ids by token, and pairs of tokens in merge order, joined by a space."""

    vocabulary: dict[str, int]
    merges: list[str]


def clip_byte_pairs(path: str | os.PathLike | None = None) -> BytePairs:
    """Returns CLIP's vocabulary of 49,408 tokens."""
    path = _shipped() if path is None else Path(path)
    if path.is_dir():
        return _from_folder(path)
    data = read_bytes(path)
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    lines = lines.splitlines()
    # The first line is the version.
    merges = [line.strip() for line in lines[1 : 1 + _CLIP_MERGES]]
    if len(merges) < _CLIP_MERGES:
        expected = f"a version and {_CLIP_MERGES} merges in {path}"
        raise unfit(expected, f"{len(lines)} lines")
    return _byte_pairs(merges, path)


def trained_byte_pairs(captions: Iterable[str], vocabulary_size: int) -> BytePairs:
    """Trains a vocabulary like CLIP's on captions."""
    size = check_integer("vocabulary_size", vocabulary_size, _BASE + 1, _MOST)
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=END_OF_WORD))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFC(),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Lowercase(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        initial_alphabet=_bytes(),
        end_of_word_suffix=END_OF_WORD,
        # Break ties between equal counts by token id. The trainer numbers word-final
        # bytes in hash map order, which differs between processes.
        special_tokens=[byte + END_OF_WORD for byte in _bytes()],
    )
    tokenizer.train_from_iterator(captions, trainer)
    merges = _joined(json.loads(tokenizer.to_str())["model"]["merges"])
    if not merges:
        raise unfit("captions with words of several letters", "none")
    # The trainer's vocabulary lacks start and end of text.
    return _byte_pairs(merges[: size - _BASE], "captions")


def _shipped():
    """Finds the file in open_clip without importing the package."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / _FILE).is_file():
            return Path(folder) / _FILE
    expected = f"the path of {_FILE}, or the package open_clip_torch, which ships it"
    raise unfit(expected, "path=None, and no such package")


def read_byte_pairs(
    vocabulary: str | os.PathLike, merges: str | os.PathLike, within: Path | None = None
) -> BytePairs:
    """Reads `BytePairs` from `vocab.json` and `merges.txt`, unchecked."""
    ids = json.loads(read_text(vocabulary, within))
    # Tokens may have any character but the end of a line, even Unicode's other ends.
    lines = read_text(merges, within).split("\n")
    lines = [line.rstrip("\r") for line in lines]
    return BytePairs(ids, [x for x in lines if x and not x.startswith("#version")])


def _from_folder(path):
    (vocabulary, merges), single = (
        [path / name for name in names] for names in TOKENIZER_FILES
    )
    if single[0].is_file() and not (vocabulary.is_file() and merges.is_file()):
        model = json.loads(read_text(single[0], path))["model"]
        return _checked(model["vocab"], _joined(model["merges"]), single[0])
    return _checked(*read_byte_pairs(vocabulary, merges, path), path)


def _joined(merges):
    """Returns merges as lines; newer versions of tokenizers write pairs."""
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _byte_pairs(merges, source):
    tokens = [*_bytes(), *(byte + END_OF_WORD for byte in _bytes())]
    tokens += ["".join(merge.split()) for merge in merges]
    tokens += [START, END]
    return _checked({x: index for index, x in enumerate(tokens)}, merges, source)


def _checked(vocabulary, merges, source):
    merged = set()
    for merge in merges:
        pair = merge.split(" ")
        if len(pair) != 2 or not vocabulary.keys() >= {*pair, "".join(pair)}:
            expected = f"two tokens in each merge of {source}, which make a third one"
            raise unfit(expected, repr(merge))
        merged.add("".join(pair))
    others = {*_bytes(), *(byte + END_OF_WORD for byte in _bytes()), START, END}
    missing = sorted(vocabulary.keys() - merged - others)
    is_unique = len(set(vocabulary.values())) == len(vocabulary)
    if missing or not is_unique or not vocabulary.keys() >= {START, END}:
        raise ValueError(
            f"Expected {START}, {END}, different ids and a merge for each token of "
            f"several letters in {source}; received: no merge for {missing[:3]}"
        )
    return BytePairs(vocabulary, merges)


def _bytes():
    """Returns the 256 bytes as characters in CLIP's order: printable ones first."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in prints]
    return [chr(x) for x in prints] + [chr(256 + i) for i in range(len(others))]
