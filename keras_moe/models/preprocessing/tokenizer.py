"""Texts as token ids: tokenizers, and rows of ids. Axes: B batch, N tokens."""

import contextlib
import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
import sentencepiece
from tokenizers import Tokenizer, normalizers

from keras_moe._backends.tensorflow import call_on_strings, is_tensorflow
from keras_moe._checks import argument_names, check_bool, check_integer, unfit
from keras_moe._files import read_bytes, read_text, write_bytes, write_json
from keras_moe._types import Tensor
from keras_moe.models._remote import check_file_exists, get_file, load_json
from keras_moe.models.preprocessing import _byte_pairs
from keras_moe.models.saving._preset_folder import (
    TOKENIZER,
    add_tokenizer_checksums,
    compare_tokenizer,
)

# A byte-pair vocabulary as transformers stores it.
GPT2_FILES = ("vocab.json", "merges.txt")
# SigLIP 2's vocabulary, Gemma's, as transformers stores it: either is enough.
GEMMA_FILES = ("tokenizer.json", "tokenizer.model")
# Character by character, as transformers does it: Python's depends on the neighbours.
_LOWER_CASE = normalizers.Lowercase()
# The asset of a `JsonTokenizer`.
_ASSET = "vocabulary.json"
# A lone UTF-16 surrogate, which cannot be encoded.
_SURROGATE = re.compile("[\ud800-\udfff]")
# Ids are int32.
_LARGEST = 2**31 - 1


@keras.saving.register_keras_serializable("keras_moe")
class TextTokenizer:
    """Turns captions into the inputs of a `TextBackbone`.

    It uses KerasHub's tokenizers in NumPy, without TensorFlow, and gives the same ids
    on every backend. Each caption gets its start token (if any) and end token and is
    padded to `max_length`. Longer captions lose tokens before the end token: the first
    one warns, and `num_truncated` counts them.

    `dataset.map(tokenizer)` works on a `tf.data.Dataset` of captions or batches. Tasks
    save and load their preprocessor; otherwise use `save_to_preset` and `from_preset`.

    Args:
        tokenizer: `keras_hub.tokenizers.Tokenizer` with a vocabulary.
        max_length: N, the number of tokens per row.
        start_id: id before each caption, if any.
        end_id: id after each caption, if any.
        padding_id: id of padding.
        lower_case: whether to lower-case captions first; CLIP's tokenizer always does.

    Reference: *Learning Transferable Visual Models From Natural Language Supervision*,
    section 2.4.

    Example:

    >>> from keras_moe.models import TextTokenizer
    >>> captions = ["two cats", "a cat"]
    >>> tokenizer = TextTokenizer.trained(captions, vocabulary_size=518, max_length=9)
    >>> texts = tokenizer(captions)
    >>> texts["token_ids"].shape, texts["token_ids"][:, 0].tolist()
    ((2, 9), [516, 516])
    """

    def __init__(
        self,
        tokenizer: keras_hub.tokenizers.Tokenizer,
        max_length: int = 77,
        start_id: int | None = None,
        end_id: int | None = None,
        *,
        padding_id: int = 0,
        lower_case: bool = False,
    ):
        if not isinstance(tokenizer, keras_hub.tokenizers.Tokenizer):
            raise unfit("one of KerasHub's tokenizers", tokenizer=tokenizer)
        self.tokenizer = tokenizer
        special = {"start_id": start_id, "end_id": end_id}
        special = {name: id for name, id in special.items() if id is not None}
        for name, id in special.items():
            check_integer(name, id, 0)
        self.max_length = check_integer("max_length", max_length, len(special) + 1)
        self.start_id, self.end_id = start_id, end_id
        self.padding_id = check_integer("padding_id", padding_id, 0)
        self.lower_case = check_bool("lower_case", lower_case)
        if self.has_vocabulary:
            self._check_special_ids()
        self.num_truncated = 0

    def _check_special_ids(self):
        ids = getattr(self.tokenizer, "vocabulary", None)
        size = self.vocabulary_size
        if isinstance(ids, dict):
            # Published files may have gaps in their ids.
            size = max(ids.values()) + 1
        for name in ("start_id", "end_id", "padding_id"):
            if (getattr(self, name) or 0) >= size:
                expected = f"{name} < {size}, the size of the vocabulary"
                raise unfit(expected, f"{name}={getattr(self, name)}")

    @classmethod
    def clip(
        cls, vocabulary: str | os.PathLike | None = None, max_length: int = 77
    ) -> "TextTokenizer":
        """Creates CLIP's tokenizer with 49,408 byte pairs.

        Args:
            vocabulary: merges file, or folder with `vocab.json` and `merges.txt` or
                `tokenizer.json`. Defaults to the file in the package open_clip_torch.
            max_length: number N of tokens.
        """
        with _explained(f"a vocabulary of byte pairs in {vocabulary}"):
            return cls._of_byte_pairs(
                _byte_pairs.clip_byte_pairs(vocabulary), max_length
            )

    @classmethod
    def trained(
        cls, captions: Iterable[str], vocabulary_size: int, max_length: int = 77
    ) -> "TextTokenizer":
        """Trains a byte-pair tokenizer like CLIP's on captions.

        Args:
            captions: texts to train on.
            vocabulary_size: maximum number of tokens, from 515 (256 bytes, the same at
                the end of a word, two special tokens and one pair) to 2**24.
            max_length: number N of tokens.
        """
        pairs = _byte_pairs.trained_byte_pairs(_strings(captions), vocabulary_size)
        return cls._of_byte_pairs(pairs, max_length)

    @classmethod
    def _of_byte_pairs(cls, pairs, max_length):
        tokenizer = keras_hub.tokenizers.CLIPTokenizer(
            vocabulary=pairs.vocabulary, merges=pairs.merges
        )
        start, end = tokenizer.start_token_id, tokenizer.end_token_id
        return cls(tokenizer, max_length, start, end)

    @classmethod
    def sentence_piece(
        cls,
        vocabulary: str | os.PathLike | bytes,
        max_length: int = 64,
        lower_case: bool = True,
        start_id: int | None = None,
    ) -> "TextTokenizer":
        """Creates a SentencePiece tokenizer, such as T5's or SigLIP 2's (Gemma's).

        Captions end with the vocabulary's `<eos>` or `</s>`; padding is its `<pad>`, or
        0.

        Args:
            vocabulary: SentencePiece model file, or its bytes; or a `tokenizer.json`.
            max_length: number N of tokens.
            lower_case: whether to lower-case captions, as in LIMoE and SigLIP.
            start_id: optional id before each text, such as LLaMA's 1.
        """
        is_bytes = isinstance(vocabulary, bytes)
        source = f"{len(vocabulary)} bytes" if is_bytes else vocabulary
        with _explained(f"a model of SentencePiece in {source}"):
            if str(source).endswith(".json"):
                tokenizer = JsonTokenizer(read_text(source))
            else:
                proto = vocabulary if is_bytes else read_bytes(source)
                sentencepiece.SentencePieceProcessor(model_proto=proto)
                tokenizer = keras_hub.tokenizers.SentencePieceTokenizer(proto=proto)
            ids = {token: id for id, token in enumerate(tokenizer.get_vocabulary())}
        # In Gemma's vocabulary </s> is a tag of HTML.
        end = ids.get("<eos>", ids.get("</s>"))
        padding = ids.get("<pad>", 0)
        options = {"padding_id": padding, "lower_case": lower_case}
        return cls(tokenizer, max_length, start_id, end, **options)

    @classmethod
    def gpt2(
        cls,
        vocabulary: str | os.PathLike,
        merges: str | os.PathLike,
        max_length: int = 1024,
    ) -> "TextTokenizer":
        """Creates GPT-2's tokenizer, which keeps letters' case and spaces.

        Texts end with `<|endoftext|>`.

        Args:
            vocabulary: path of `vocab.json`.
            merges: path of `merges.txt`.
            max_length: number N of tokens.
        """
        with _explained(f"GPT-2's byte pairs in {vocabulary} and {merges}"):
            pairs = _byte_pairs.read_byte_pairs(vocabulary, merges)
            tokenizer = keras_hub.tokenizers.GPT2Tokenizer(
                vocabulary=pairs.vocabulary, merges=pairs.merges
            )
            return cls(tokenizer, max_length, end_id=tokenizer.end_token_id)

    @property
    def name(self) -> str:
        """Name in model summaries."""
        return "text_tokenizer"

    @property
    def has_vocabulary(self) -> bool:
        """Whether the vocabulary, which is not part of the config, is loaded."""
        try:
            return self.vocabulary_size > 0
        except ValueError:
            return False

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return self.tokenizer.vocabulary_size()

    def sha256(self) -> str:
        """Returns a digest of what documents' ids depend on, such as the vocabulary."""
        kind = type(self.tokenizer).__name__
        settings = (kind, self.lower_case, self.start_id, self.end_id)
        digest = hashlib.sha256(repr(settings).encode())
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_assets(folder)
            for path in sorted(Path(folder).iterdir()):
                digest.update(read_bytes(path))
        return digest.hexdigest()

    def __call__(self, captions: object) -> dict[str, Any]:
        """Tokenizes captions."""
        if is_tensorflow(captions):
            row = (self.max_length,)
            rows = {"token_ids": (row, "int32"), "padding_mask": (row, "bool")}
            return call_on_strings(self, captions, rows)
        captions = _strings([captions] if isinstance(captions, str) else captions)
        token_ids = np.full((len(captions), self.max_length), self.padding_id, "int32")
        mask = np.zeros(token_ids.shape, bool)
        num_truncated = 0
        start, end = self._special()
        left = self.max_length - len(start) - len(end)
        for row, ids in enumerate(self._tokenized(captions)):
            is_truncated, ids = len(ids) > left, [*start, *ids[:left], *end]
            if not ids:
                expected = "captions of at least one token"
                raise unfit(expected, f"captions[{row}]={captions[row]!r}")
            num_truncated += is_truncated
            token_ids[row, : len(ids)] = ids
            mask[row, : len(ids)] = True
        if num_truncated and not self.num_truncated:
            warnings.warn(
                f"{num_truncated} of {len(captions)} captions have more than "
                f"max_length={self.max_length} tokens and lose the last of them; "
                "num_truncated counts further ones",
                stacklevel=2,
            )
        self.num_truncated += num_truncated
        return {"token_ids": token_ids, "padding_mask": mask}

    def documents(self, texts: object) -> list[list[int]]:
        """Returns the ids of whole texts with start and end tokens, for `pack`."""
        texts = _strings([texts] if isinstance(texts, str) else texts)
        start, end = self._special()
        return [[*start, *ids, *end] for ids in self._tokenized(texts)]

    def prompts(self, texts: object) -> list[list[int]]:
        """Returns the ids of texts with start tokens, for `CausalLM.generate`."""
        start, _ = self._special()
        return [[*start, *ids] for ids in self._tokenized(_strings(texts))]

    def _special(self):
        """The start and the end token, each in a list, which is empty without it."""
        return [[] if x is None else [x] for x in (self.start_id, self.end_id)]

    def texts(self, rows: Any) -> list[str]:
        """Returns the texts of lists of ids, without special tokens."""
        special = (self.start_id, self.end_id)
        # A model may have more ids than its tokenizer.
        known = range(self.vocabulary_size)
        rows = [[int(x) for x in row if x not in special] for row in rows]
        return [self._joined([x for x in row if x in known]) for row in rows]

    def _joined(self, ids):
        """The text of ids; KerasHub would join CLIP's words without spaces."""
        words = [[]]
        for id in ids:
            words[-1].append(id)
            if self.tokenizer.id_to_token(id).endswith(_byte_pairs.END_OF_WORD):
                words.append([])
        return " ".join(self.tokenizer.detokenize(word) for word in words if word)

    def _tokenized(self, texts):
        if self.lower_case:
            texts = [_LOWER_CASE.normalize_str(x) for x in texts]
        return self.tokenizer.tokenize(texts) if texts else []

    def tokens(self, token_ids: Tensor) -> list[list[str]]:
        """Returns the readable string of each token id (B, N), as B lists.

        Example:

        >>> from keras_moe.models import TextTokenizer
        >>> tokenizer = TextTokenizer.trained(["a cat", "two cats"], 518, max_length=6)
        >>> tokenizer.tokens(tokenizer("a cat")["token_ids"])[0][:2]
        ['<|startoftext|>', 'a']
        """
        ids = np.asarray(token_ids)
        size = self.vocabulary_size
        if ids.size and not 0 <= ids.min() <= ids.max() < size:
            expected = f"token ids of the {size} of the vocabulary"
            raise unfit(expected, f"{ids.min()} to {ids.max()}")
        texts = {int(id): self._text_of(int(id)) for id in np.unique(ids)}
        return [[texts[id] for id in row] for row in ids.tolist()]

    def _text_of(self, id):
        token = self.tokenizer.id_to_token(id)
        if id in (self.start_id, self.end_id):
            return token
        text = self.tokenizer.detokenize([id]).strip()
        return text if text and "\ufffd" not in text else token

    def check_fits(self, backbone: object) -> None:
        """Raises ValueError if ids or rows are too large for a backbone."""
        for name in ("vocabulary_size", "max_length"):
            mine, largest = getattr(self, name), getattr(backbone, name)
            if mine > largest:
                raise ValueError(
                    f"Expected a tokenizer with {name} of at most the {largest} of the "
                    f"backbone; received: {name}={mine}"
                )

    def save_to_preset(self, preset_dir: str | os.PathLike) -> None:
        """Saves tokenizer, vocabulary and their SHA-256 to a preset folder."""
        folder = Path(preset_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save_to_preset(str(folder))
        write_json(folder / TOKENIZER, keras.saving.serialize_keras_object(self))
        add_tokenizer_checksums(folder)

    @classmethod
    def from_preset(cls, preset: str | os.PathLike) -> "TextTokenizer":
        """Loads the tokenizer of a preset or a published SigLIP 2, folder or handle."""
        preset = os.fspath(preset)
        gemma = None if check_file_exists(preset, TOKENIZER) else cls.of_gemma(preset)
        if gemma is not None:
            return gemma
        with _explained(f"a tokenizer in {TOKENIZER} of {preset}"):
            config = load_json(preset, TOKENIZER)
            compare_tokenizer(preset)
            tokenizer = keras.saving.deserialize_keras_object(config)
            tokenizer.load_preset_assets(preset)
        return tokenizer

    @classmethod
    def of_gemma(cls, preset: str, max_length: int = 64) -> "TextTokenizer | None":
        """Reads Gemma's tokenizer next to published weights; None without it."""
        name = next((x for x in GEMMA_FILES if check_file_exists(preset, x)), None)
        if name is None:
            return None
        tokenizer = cls.sentence_piece(get_file(preset, name), max_length)
        is_gemma = {"<bos>", "<eos>"} <= {*tokenizer.tokenizer.get_vocabulary()}
        return tokenizer if is_gemma else None

    def load_preset_assets(self, preset: str) -> None:
        assets = self.tokenizer.file_assets or ()
        compare_tokenizer(preset)
        with _explained(f"a vocabulary in {' and '.join(assets)} of {preset}"):
            self.tokenizer.load_preset_assets(preset)
            self._check_special_ids()
            # Some values are only checked when used.
            self.tokenizer.tokenize(["a"])

    def get_config(self) -> dict:
        """Returns the arguments; the vocabulary is a preset asset."""
        config = {name: getattr(self, name) for name in argument_names(TextTokenizer)}
        tokenizer = keras.saving.serialize_keras_object(self.tokenizer)
        return {**config, "tokenizer": tokenizer}

    @classmethod
    def from_config(cls, config: dict) -> "TextTokenizer":
        tokenizer = keras.saving.deserialize_keras_object(config["tokenizer"])
        return cls(**{**config, "tokenizer": tokenizer})


def byte_pair_files(tokenizer: TextTokenizer | None, is_clip: bool) -> dict[str, Any]:
    """The files of CLIP's or GPT-2's tokenizer in transformers; none of another one."""
    kinds = keras_hub.tokenizers.GPT2Tokenizer, keras_hub.tokenizers.CLIPTokenizer
    if tokenizer is None or not isinstance(tokenizer.tokenizer, kinds[is_clip]):
        return {}
    pairs: Any = tokenizer.tokenizer
    merges = "\n".join(["#version: 0.2", *(pairs.merges or ()), ""])
    files: dict[str, Any] = dict(zip(GPT2_FILES, (pairs.vocabulary, merges)))
    if is_clip:
        files["tokenizer_config.json"] = {
            "tokenizer_class": "CLIPTokenizer",
            "bos_token": _byte_pairs.START,
            **dict.fromkeys(("eos_token", "pad_token", "unk_token"), _byte_pairs.END),
            "model_max_length": tokenizer.max_length,
        }
    return files


@keras.saving.register_keras_serializable("keras_moe")
class JsonTokenizer(keras_hub.tokenizers.Tokenizer):
    """A tokenizer of the package tokenizers, without special tokens or padding."""

    # The file's text is an asset of presets, and not part of the config.
    content, _backend, _size = "", None, 0

    def __init__(self, content: str | None = None, dtype: str = "int32", **kwargs):
        super().__init__(dtype=dtype, **kwargs)
        self.file_assets = [_ASSET]
        if content is not None:
            self._read(content)

    def _read(self, content):
        self.content, self._backend = content, Tokenizer.from_str(content)
        self._backend.no_padding()
        self._backend.no_truncation()
        # Files may have gaps in their ids.
        self._size = max(self._backend.get_vocab().values(), default=-1) + 1

    @property
    def backend(self) -> Tokenizer:
        if self._backend is None:
            raise ValueError(f"Expected a vocabulary from {_ASSET}; received: none")
        return self._backend

    def save_assets(self, dir_path: str) -> None:
        write_bytes(Path(dir_path) / _ASSET, self.content.encode())

    def load_assets(self, dir_path: str) -> None:
        self._read(read_text(Path(dir_path) / _ASSET))

    def vocabulary_size(self) -> int:
        return self._size if self.backend else 0

    def get_vocabulary(self) -> list[str]:
        return [self.id_to_token(id) for id in range(self.vocabulary_size())]

    def id_to_token(self, id: int) -> str:
        return self.backend.id_to_token(id) or ""

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def tokenize(self, inputs: Sequence[str]) -> list[list[int]]:
        encoded = self.backend.encode_batch(list(inputs), add_special_tokens=False)
        return [x.ids for x in encoded]

    def detokenize(self, inputs: Sequence[int]) -> str:
        return self.backend.decode(list(inputs), skip_special_tokens=False)


@contextlib.contextmanager
def _explained(expected):
    """Context that turns any error into a ValueError with what was expected."""
    try:
        yield
    except (ConnectionError, PermissionError):
        raise
    except Exception as error:
        # Tokenizer libraries raise different errors, one of them plain `Exception`.
        raise ValueError(
            f"Expected {expected}; received files that fail with "
            f"{type(error).__name__}: {error}"
        ) from error


def _strings(captions):
    """Returns the captions as a list, if all are strings."""
    if isinstance(captions, np.ndarray):
        captions = captions.tolist()
    if isinstance(captions, (str, bytes, dict)) or not isinstance(captions, Iterable):
        raise unfit("a sequence of strings", captions=captions)
    captions = list(captions)
    for index, caption in enumerate(captions):
        if not isinstance(caption, str) or _SURROGATE.search(caption):
            expected = "captions that are strings without lone surrogates"
            raise unfit(expected, f"captions[{index}]={caption!r}")
    return captions


def pack(
    documents: Iterable[Sequence[int]], length: int, padding_id: int = 0
) -> dict[str, np.ndarray]:
    """Packs documents one after another into rows, without padding between them.

    A document that does not fit goes on in the next row. The last row is padded.

    Args:
        documents: token ids of each document.
        length: N, tokens per row.
        padding_id: id of padding.

    Returns: `"token_ids"` (B, N), and `"padding_mask"` (B, N), the numbers 1, 2, ... of
    the documents in a row, and 0 for padding.

    Example:

    >>> from keras_moe.models import pack
    >>> rows = pack([[5, 6, 7], [8, 9]], length=4)
    >>> rows["token_ids"].tolist(), rows["padding_mask"].tolist()
    ([[5, 6, 7, 8], [9, 0, 0, 0]], [[1, 1, 1, 2], [1, 0, 0, 0]])
    """
    length = check_integer("length", length)
    padding_id = check_integer("padding_id", padding_id, 0, _LARGEST)
    rows = [_ids(document) for document in documents]
    if not any(map(len, rows)):
        raise ValueError("Expected documents with token ids; received: none")
    ids = np.concatenate(rows)
    number = np.repeat(np.arange(len(rows)), [len(x) for x in rows])
    padding = -len(ids) % length
    ids = np.pad(ids, (0, padding), constant_values=padding_id).reshape(-1, length)
    number = np.pad(number, (0, padding), constant_values=-1).reshape(-1, length)
    # Documents are numbered from 1 in each row.
    is_new = np.diff(number, axis=1, prepend=number[:, :1]) != 0
    mask = np.where(number < 0, 0, 1 + np.cumsum(is_new, axis=1))
    return {"token_ids": ids, "padding_mask": mask.astype("int32")}


def _ids(document):
    """A document's ids as int32, which would wrap larger numbers and cut fractions."""
    ids = np.asarray(document)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise unfit("a list of integers for each document", f"{document!r:.80}")
    if ids.size and not 0 <= ids.min() <= ids.max() <= _LARGEST:
        raise unfit(f"token ids from 0 to {_LARGEST}", f"{ids.min()} to {ids.max()}")
    return ids.astype("int32")


def padded_rows(
    rows: Sequence[Sequence[int]], length: int, padding_id: int = 0
) -> dict[str, np.ndarray]:
    """Pads each row of ids on the right."""
    token_ids = np.full((len(rows), length), padding_id, "int32")
    mask = np.zeros((len(rows), length), "int32")
    for row, ids in enumerate(rows):
        token_ids[row, : len(ids)] = _ids(ids)
        mask[row, : len(ids)] = 1
    return {"token_ids": token_ids, "padding_mask": mask}


def is_id_array(value: object) -> bool:
    """Whether `value` is an array of integers (B, N)."""
    return (
        isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype.kind in "iu"
    )
