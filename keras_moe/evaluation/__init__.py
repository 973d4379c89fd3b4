"""Evaluation of frozen models: functions of arrays, and drivers for models."""

from keras_moe.evaluation.average_precision import (
    average_precision,
    mean_average_precision,
    precision_at_1,
)
from keras_moe.evaluation.confidence import (
    CalibrationResult,
    OutOfDistributionResult,
    calibration,
    out_of_distribution,
)
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
    mteb_model,
    zero_shot_from_model,
)
from keras_moe.evaluation.language import (
    MultipleChoiceResult,
    continuation_log_likelihoods,
    lm_eval_model,
    multiple_choice,
)
from keras_moe.evaluation.nearest_neighbours import (
    NearestNeighboursResult,
    nearest_neighbours,
)
from keras_moe.evaluation.retrieval import (
    ContrastiveAccuracyResult,
    RetrievalResult,
    contrastive_accuracy,
    retrieval,
)
from keras_moe.evaluation.segmentation import SegmentationResult, segmentation_probe
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
    "CalibrationResult",
    "ClassSubset",
    "ContrastiveAccuracyResult",
    "FewShotResult",
    "MultipleChoiceResult",
    "NearestNeighboursResult",
    "OutOfDistributionResult",
    "PairEmbeddings",
    "RetrievalResult",
    "SegmentationResult",
    "ZeroShotResult",
    "average_precision",
    "calibration",
    "class_embeddings",
    "continuation_log_likelihoods",
    "contrastive_accuracy",
    "encode_classes",
    "encode_pairs",
    "extract_features",
    "few_shot",
    "linear_probe",
    "lm_eval_model",
    "mean_average_precision",
    "mteb_model",
    "multiple_choice",
    "nearest_neighbours",
    "out_of_distribution",
    "precision_at_1",
    "prompts",
    "read_class_names",
    "read_class_subset",
    "read_templates",
    "retrieval",
    "segmentation_probe",
    "zero_shot",
    "zero_shot_from_model",
]
__dir__ = __all__.copy
