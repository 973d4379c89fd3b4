"""Objectives on texts: contrastive learning, and next tokens.

Axes: B batch, N tokens.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from keras_moe import data
from keras_moe._checks import check_bool, check_integer, check_one_of
from keras_moe._files import path_within
from keras_moe._processes import process_index, process_shard
from keras_moe.data import _tokens
from keras_moe.data.sources import read_texts
from keras_moe.losses import SigmoidContrastiveLoss, SoftmaxContrastiveLoss
from keras_moe.losses._pairs import check_similarity
from keras_moe.models import (
    CausalLM,
    ContrastiveAccuracy,
    ContrastiveModel,
    ImagePreprocessor,
    Perplexity,
    TextTokenizer,
)
from keras_moe.training import objectives
from keras_moe.training.sections import DataConfig, Datasets, PairData, TextData

_CLIP, _TRAINED = "clip", "trained"
# Characters of each source of texts on which a tokenizer is trained.
_TRAINED_ON = 2**26
# Tokenizer file in a preset folder.
_TOKENIZER = "text_tokenizer.json"
LOSSES = {"softmax": SoftmaxContrastiveLoss, "sigmoid": SigmoidContrastiveLoss}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizedObjective(objectives.Objective):
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

    def texts(self, config: DataConfig, data_dir: str | None) -> Sequence[str]:
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
            tokenizer = self.new_tokenizer(model.backbone, config, data_dir)
            if kept is not None and process_index() == 0:
                tokenizer.save_to_preset(kept)
        tokenizer.check_fits(model.backbone)
        model.preprocessor = tokenizer

    def new_tokenizer(
        self, backbone: Any, config: DataConfig, data_dir: str | None
    ) -> TextTokenizer:
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


@objectives.register_objective("contrastive")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Contrastive(TokenizedObjective):
    """Matches each image with its caption among the captions of the batch.

    Models are compared by the contrastive accuracy on test batches, see
    `keras_moe.models.ContrastiveAccuracy`, which depends on `evaluation_batch_size`.

    Args:
        loss: `"softmax"` (CLIP), `"sigmoid"` (SigLIP), or `"auto"`: sigmoid if the
            model's similarities have a bias, softmax otherwise.
        multi_positive: whether pairs that share an image or a caption are positives.
        chunk_size: number of captions compared at a time to save memory; None for all.
        similarity_dtype: dtype to which the loss rounds embeddings: `"bfloat16"` in
            LIMoE.
        tokenizer: `"trained"` trains byte pairs on the captions; `"clip"` is CLIP's
            vocabulary of 49,408; otherwise a path: a preset folder or handle, a
            SentencePiece `.model` file, or a file or folder of CLIP merges. None uses
            the preset's tokenizer if it has one, else `"trained"`.
        vocabulary_size: maximum size of a trained vocabulary; None uses the model's.
        max_length: number of tokens in a caption; None uses the model's. A preset's
            tokenizer has a fixed length.
        evaluation_batch_size: pairs in a test batch; None uses the training batch size.

    Example:

    >>> from keras_moe.training import Contrastive
    >>> Contrastive(tokenizer="trained", vocabulary_size=600).monitor.metric
    'val_contrastive_accuracy'
    """

    monitor = objectives.Monitor("val_contrastive_accuracy")
    data_section = PairData

    loss: str = "auto"
    multi_positive: bool = False
    chunk_size: int | None = None
    similarity_dtype: str = "float32"
    evaluation_batch_size: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_one_of("loss", self.loss, ("auto", *LOSSES))
        check_bool("multi_positive", self.multi_positive)
        check_similarity(self.similarity_dtype, self.chunk_size)
        check_integer(
            "evaluation_batch_size", self.evaluation_batch_size, optional=True
        )

    def model_arguments(self, num_classes):
        return {"task": ContrastiveModel.task_name}

    def prepare(self, model, config, data_dir=None, run_folder=None):
        super().prepare(model, config, data_dir, run_folder)
        if model.image_preprocessor is None:
            # Prepares photos as `load_pairs` does.
            prepare = ImagePreprocessor(model.backbone.image_shape)
            object.__setattr__(model, "image_preprocessor", prepare)

    def texts(self, config: PairData, data_dir):
        return data.load_captions(
            config.source,
            config.train_split,
            data_dir,
            exclude=config.exclude or (),
            **config.pair_options(),
        )

    def datasets(
        self, config: PairData, model, batch_size, seed, data_dir=None, start_step=0
    ):
        options, exclude = config.pair_options(), config.exclude or ()
        count = config.epoch_size or data.num_pairs(
            config.source, config.train_split, data_dir, exclude=exclude, **options
        )
        steps = config.steps_per_epoch(count, batch_size)
        common = {
            "tokenizer": model.preprocessor,
            "batch_size": batch_size,
            "seed": seed,
            "data_dir": data_dir,
        }
        of_train = {**common, "exclude": exclude, "start_batch": start_step, **options}
        of_test = {**common, **config.test_pair_options(data_dir)}
        if self.evaluation_batch_size is not None:
            of_test["batch_size"] = self.evaluation_batch_size
        train, test, shuffled = objectives.train_and_test(
            data.load_pairs, config, model, of_train, of_test
        )
        return Datasets(train, test, None, steps, shuffled)

    def loss_and_metrics(self, model, config):
        loss = LOSSES.get(self.loss, type(model.default_loss()))
        return loss(
            multi_positive=self.multi_positive,
            chunk_size=self.chunk_size,
            similarity_dtype=self.similarity_dtype,
        ), [ContrastiveAccuracy(self.chunk_size)]


@objectives.register_objective("next_token")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NextToken(TokenizedObjective):
    """Predicts each token of a text from those before it.

    Models are compared by the perplexity of held-out documents.

    Args:
        tokenizer: see `Contrastive`, also for `vocabulary_size`; `"trained"` trains on
            the training texts, the first 64 million characters of each source, or is
            that of the (first) source if this is a folder of tokens.
        max_length: number of tokens in a row; None uses the model's. A preset's
            tokenizer has a fixed length.

    Example:

    >>> from keras_moe.training import NextToken
    >>> NextToken().monitor
    Monitor(metric='val_perplexity', mode='min')
    """

    monitor = objectives.Monitor("val_perplexity", "min")
    data_section = TextData
    lower_case = False

    def model_arguments(self, num_classes):
        return {"task": CausalLM.task_name}

    def new_tokenizer(self, backbone, config: TextData, data_dir):
        source = next(iter(config.weights))
        if self.tokenizer not in (None, _TRAINED) or not _tokens.is_tokens(source):
            return super().new_tokenizer(backbone, config, data_dir)
        self._check_no_size(source)
        tokenizer = TextTokenizer.from_preset(_tokens.tokenizer_of(source))
        tokenizer.max_length = self.max_length or backbone.max_length
        return tokenizer

    def texts(self, config: TextData, data_dir):
        texts = []
        for source in config.weights:
            left = _TRAINED_ON
            for text in read_texts(source, config.train_split, data_dir):
                texts.append(text)
                left -= len(text)
                if left <= 0:
                    break
        return texts

    def datasets(
        self, config: TextData, model, batch_size, seed, data_dir=None, start_step=0
    ):
        sources, source = tuple(config.weights), config.evaluated_source
        rows = self._rows(config, model, sources, config.train_split, data_dir)
        mixed = len(rows) > 1
        number = sum(x.count for x in rows.values())
        steps = config.steps_per_epoch(config.epoch_size or number, batch_size)
        shard = process_shard()
        train = data.load_rows(
            rows if mixed else rows[sources[0]],
            batch_size,
            config.weights if mixed else None,
            seed=seed,
            repeat=True,
            start_batch=start_step,
            shard=shard,
        )
        test = self._rows(config, model, (source,), config.test_split, data_dir)
        test = test[source].for_evaluation(batch_size)
        test = data.load_rows(test, batch_size, shuffle=False, shard=shard)
        return Datasets(train, test, None, steps)

    def _rows(self, config, model, sources, split, data_dir):
        """Returns the packed rows of a split by source."""
        key = (sources, split, data_dir)
        # A run asks again when it resumes; another run may have another tokenizer.
        owner, rows = config.packed.get(key, (None, None))
        if owner is not model.preprocessor:
            rows = {
                source: _opened(model, source, split, data_dir) for source in sources
            }
            config.packed[key] = model.preprocessor, rows
        return rows

    def loss_and_metrics(self, model, config):
        return "auto", [Perplexity()]

    def taken_from_data(self, model, config):
        """Adds a digest of the packed rows, which another document would move."""
        digest = hashlib.sha256()
        for (_, split, _), (_, rows) in config.packed.items():
            for own in rows.values() if split == config.train_split else ():
                for content in own.digested:
                    digest.update(content)
        found = super().taken_from_data(model, config)
        return {**found, "rows_sha256": digest.hexdigest()}


def _opened(model, source, split, data_dir):
    """Returns the rows of a split: of shards, or of texts that are tokenized now."""
    tokenizer = model.preprocessor
    length, padding_id = model.max_length, tokenizer.padding_id
    if _tokens.is_tokens(source):
        return _tokens.open_tokens(
            source, split, length, padding_id, tokenizer.sha256()
        )
    texts = read_texts(source, split, data_dir)
    documents = (tokenizer.documents(text)[0] for text in texts)
    dtype = _tokens.dtype_of(tokenizer.vocabulary_size)
    return _tokens.rows_in_memory(documents, dtype, length, padding_id)
