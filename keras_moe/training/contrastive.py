"""The contrastive objective of image-text models."""

import dataclasses

from keras_moe import data
from keras_moe._checks import check_bool, check_integer, check_one_of
from keras_moe._processes import process_shard
from keras_moe.losses import SigmoidContrastiveLoss, SoftmaxContrastiveLoss
from keras_moe.losses._pairs import check_similarity
from keras_moe.models import ContrastiveAccuracy, ContrastiveModel
from keras_moe.training._tokenized import TokenizedObjective
from keras_moe.training.data_sections import Datasets, PairData
from keras_moe.training.objectives import Monitor, register_objective

LOSSES = {"softmax": SoftmaxContrastiveLoss, "sigmoid": SigmoidContrastiveLoss}


@register_objective("contrastive")
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

    monitor = Monitor("val_contrastive_accuracy")
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

    def texts(self, config, data_dir):
        return data.load_captions(
            config.source,
            config.train_split,
            data_dir,
            exclude=config.exclude or (),
            **config.pair_options(),
        )

    def datasets(self, config, model, batch_size, seed, data_dir=None, start_step=0):
        options, exclude = config.pair_options(), config.exclude or ()
        count = config.epoch_size or data.num_pairs(
            config.source, config.train_split, data_dir, exclude=exclude, **options
        )
        steps = config.steps_per_epoch(count, batch_size)
        common = {
            "image_shape": tuple(model.backbone.image_shape),
            "tokenizer": model.preprocessor,
            "seed": seed,
            "data_dir": data_dir,
            "shard": process_shard(),
        }
        train = data.load_pairs(
            config.source,
            config.train_split,
            batch_size=batch_size,
            augment=config.augment,
            shuffle=True,
            repeat=True,
            start_batch=start_step,
            exclude=exclude,
            **common,
            **options,
        )
        test = data.load_pairs(
            config.evaluated_source,
            config.test_split,
            batch_size=self.evaluation_batch_size or batch_size,
            shuffle=False,
            **common,
            **config.test_pair_options(data_dir),
        )
        return Datasets(train, test, None, steps)

    def loss_and_metrics(self, model, config):
        loss = LOSSES.get(self.loss, type(model.default_loss()))
        return loss(
            multi_positive=self.multi_positive,
            chunk_size=self.chunk_size,
            similarity_dtype=self.similarity_dtype,
        ), [ContrastiveAccuracy(self.chunk_size)]
