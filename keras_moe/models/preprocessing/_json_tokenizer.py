"""KerasHub's interface to a `tokenizer.json`, such as that of SigLIP 2."""

from collections.abc import Sequence
from pathlib import Path

import keras
import keras_hub
from tokenizers import Tokenizer

from keras_moe._files import read_text, write_bytes

_ASSET = "vocabulary.json"


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
