"""Evaluation of frozen models: functions of arrays, and drivers for models."""

from keras_moe.evaluation.average_precision import (
    average_precision,
    mean_average_precision,
    precision_at_1,
    streamed_average_precision,
)
from keras_moe.evaluation.few_shot import (
    FewShotResult,
    few_shot,
    few_shot_from_model,
    linear_probe,
    linear_probe_from_model,
)
from keras_moe.evaluation.image_text import (
    PairEmbeddings,
    encode_classes,
    encode_pairs,
    zero_shot_from_model,
)
from keras_moe.evaluation.language import (
    MultipleChoiceResult,
    continuation_log_likelihoods,
    lm_eval_model,
    multiple_choice,
)
from keras_moe.evaluation.retrieval import (
    ContrastiveAccuracyResult,
    RetrievalResult,
    contrastive_accuracy,
    retrieval,
)
from keras_moe.evaluation.zero_shot import (
    TEMPLATES,
    ClassSubset,
    ZeroShotResult,
    class_embeddings,
    prompts,
    read_class_names,
    read_class_subset,
    read_templates,
    zero_shot,
)

__all__ = [
    "TEMPLATES",
    "ClassSubset",
    "ContrastiveAccuracyResult",
    "FewShotResult",
    "MultipleChoiceResult",
    "PairEmbeddings",
    "RetrievalResult",
    "ZeroShotResult",
    "average_precision",
    "class_embeddings",
    "continuation_log_likelihoods",
    "contrastive_accuracy",
    "encode_classes",
    "encode_pairs",
    "few_shot",
    "few_shot_from_model",
    "linear_probe",
    "linear_probe_from_model",
    "lm_eval_model",
    "mean_average_precision",
    "multiple_choice",
    "precision_at_1",
    "prompts",
    "read_class_names",
    "read_class_subset",
    "read_templates",
    "retrieval",
    "streamed_average_precision",
    "zero_shot",
    "zero_shot_from_model",
]
