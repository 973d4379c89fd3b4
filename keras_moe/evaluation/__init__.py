"""Evaluation of frozen models: functions of arrays, and drivers for models."""

from keras_moe.evaluation.average_precision import (
    average_precision,
    mean_average_precision,
    precision_at_1,
)
from keras_moe.evaluation.confidence import CalibrationResult, calibration
from keras_moe.evaluation.few_shot import (
    FewShotResult,
    extract_features,
    few_shot,
    linear_probe,
)
from keras_moe.evaluation.image_text import (
    PairEmbeddings,
    encode_classes,
    encode_pairs,
    zero_shot_from_model,
)
from keras_moe.evaluation.language import continuation_log_likelihoods, lm_eval_model
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
    "TEMPLATES", "CalibrationResult", "ClassSubset", "ContrastiveAccuracyResult",
    "FewShotResult", "PairEmbeddings", "RetrievalResult", "ZeroShotResult",
    "average_precision", "calibration", "class_embeddings",
    "continuation_log_likelihoods", "contrastive_accuracy", "encode_classes",
    "encode_pairs", "extract_features", "few_shot", "linear_probe", "lm_eval_model",
    "mean_average_precision", "precision_at_1", "prompts", "read_class_names",
    "read_class_subset", "read_templates", "retrieval", "zero_shot",
    "zero_shot_from_model",
]  # fmt: skip
__dir__ = __all__.copy
