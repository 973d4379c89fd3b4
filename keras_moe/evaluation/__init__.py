"""Evaluation of frozen models: functions of arrays, and thin drivers for models."""

from keras_moe.evaluation.average_precision import (
    average_precision,
    mean_average_precision,
    precision_at_1,
    streamed_average_precision,
)
from keras_moe.evaluation.class_subsets import ClassSubset, read_class_subset
from keras_moe.evaluation.few_shot import (
    FewShotResult,
    best_l2,
    few_shot,
    few_shot_from_model,
    sample_shots,
)
from keras_moe.evaluation.pair_baselines import (
    kernel_ridge_embeddings,
    nearest_caption_embeddings,
)
from keras_moe.evaluation.pair_models import (
    PairEmbeddings,
    contrastive_accuracy_from_model,
    encode_classes,
    encode_pairs,
    retrieval_from_model,
    zero_shot_from_model,
)
from keras_moe.evaluation.prompts import (
    TEMPLATES,
    prompts,
    read_class_names,
    read_templates,
)
from keras_moe.evaluation.retrieval import (
    ContrastiveAccuracyResult,
    RetrievalResult,
    contrastive_accuracy,
    retrieval,
)
from keras_moe.evaluation.ridge_regression import (
    RidgeClassifier,
    few_shot_accuracies,
    ridge_regression,
)
from keras_moe.evaluation.zero_shot import (
    ZeroShotResult,
    class_embeddings,
    zero_shot,
)

__all__ = [
    "TEMPLATES",
    "ClassSubset",
    "ContrastiveAccuracyResult",
    "FewShotResult",
    "PairEmbeddings",
    "RetrievalResult",
    "RidgeClassifier",
    "ZeroShotResult",
    "average_precision",
    "best_l2",
    "class_embeddings",
    "contrastive_accuracy",
    "contrastive_accuracy_from_model",
    "encode_classes",
    "encode_pairs",
    "few_shot",
    "few_shot_accuracies",
    "few_shot_from_model",
    "kernel_ridge_embeddings",
    "mean_average_precision",
    "nearest_caption_embeddings",
    "precision_at_1",
    "prompts",
    "read_class_names",
    "read_class_subset",
    "read_templates",
    "retrieval",
    "retrieval_from_model",
    "ridge_regression",
    "sample_shots",
    "streamed_average_precision",
    "zero_shot",
    "zero_shot_from_model",
]
