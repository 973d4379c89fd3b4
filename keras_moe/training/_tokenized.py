"""Objectives on texts: where their tokenizer comes from."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from keras_moe._checks import check_integer
from keras_moe._files import path_within
from keras_moe._processes import process_index
from keras_moe.models import TextTokenizer
from keras_moe.training.objectives import Objective

_CLIP, _TRAINED = "clip", "trained"
# Tokenizer file in a preset folder.
_TOKENIZER = "text_tokenizer.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizedObjective(Objective):
    """Base class of objectives with a tokenizer; see `Contrastive` for its settings."""

    # Whether SentencePiece tokenizers lower-case texts.
    lower_case: ClassVar[bool] = True

    tokenizer: str | None = None
    vocabulary_size: int | None = None
    max_length: int | None = None

    def __post_init__(self):
        super().__post_init__()
        for name in ("vocabulary_size", "max_length"):
            check_integer(name, getattr(self, name), optional=True)
        if self.tokenizer not in (None, _TRAINED):
            self._check_no_size(f"tokenizer={self.tokenizer!r}")

    def texts(self, config: Any, data_dir: str | None) -> Sequence[str]:
        """Returns the texts to train a tokenizer on."""
        raise NotImplementedError

    def prepare(self, model, config, data_dir=None, run_folder=None):
        """Sets the model's tokenizer; `run_folder` keeps a trained one."""
        if self.tokenizer is None and model.preprocessor is not None:
            self._check_no_size("the preset's tokenizer")
            self._check_length(model.preprocessor)
            return
        kept = None
        if run_folder is not None and self.tokenizer in (None, _TRAINED):
            kept = run_folder / "tokenizer"
            for path in (kept, *kept.rglob("*")):
                path_within(path, run_folder)
        if kept is not None and (kept / _TOKENIZER).is_file():
            tokenizer = TextTokenizer.from_preset(kept)
        else:
            tokenizer = self._new_tokenizer(model.backbone, config, data_dir)
            if kept is not None and process_index() == 0:
                tokenizer.save_to_preset(kept)
        tokenizer.check_fits(model.backbone)
        model.preprocessor = tokenizer

    def _new_tokenizer(self, backbone, config, data_dir):
        """Returns the configured tokenizer, trained on the texts if needed."""
        length = self.max_length or backbone.max_length
        name = self.tokenizer
        if name in (None, _TRAINED):
            size = self.vocabulary_size or backbone.vocabulary_size
            texts = self.texts(config, data_dir)
            return TextTokenizer.trained(texts, size, length)
        if name == _CLIP:
            return TextTokenizer.clip(max_length=length)
        path = Path(name)
        if "://" in name or (path / _TOKENIZER).is_file():
            return self._check_length(TextTokenizer.from_preset(name))
        if path.suffix == ".model":
            return TextTokenizer.sentence_piece(path, length, self.lower_case)
        return TextTokenizer.clip(path, length)

    def _check_no_size(self, received):
        if self.vocabulary_size is not None:
            raise ValueError(
                "Expected vocabulary_size with tokenizer='trained' alone; received: "
                f"vocabulary_size={self.vocabulary_size} with {received}"
            )

    def _check_length(self, tokenizer):
        if self.max_length not in (None, tokenizer.max_length):
            raise ValueError(
                f"Expected the preset's own max_length={tokenizer.max_length}, or "
                f"tokenizer='trained'; received: max_length={self.max_length}"
            )
        return tokenizer

    def taken_from_data(self, model, config):
        """Returns the digest of a byte-pair vocabulary, which may have been trained."""
        tokenizer = getattr(model.preprocessor, "tokenizer", None)
        merges = getattr(tokenizer, "merges", None)
        if self.tokenizer not in (None, _TRAINED) or merges is None:
            return {}
        digest = hashlib.sha256("\n".join(map(str, merges)).encode())
        return {"tokenizer_sha256": digest.hexdigest()}
