"""Evaluation of frozen models: functions of arrays, and thin drivers for models."""

from keras_moe.evaluation.average_precision import (
    average_precision,
    mean_average_precision,
    precision_at_1,
    streamed_average_precision,
)
from keras_moe.evaluation.few_shot import (
    FewShotResult,
    best_l2,
    few_shot,
    few_shot_from_model,
    sample_shots,
)
from keras_moe.evaluation.ridge_regression import (
    RidgeClassifier,
    few_shot_accuracies,
    ridge_regression,
)

__all__ = [
    "FewShotResult",
    "RidgeClassifier",
    "average_precision",
    "best_l2",
    "few_shot",
    "few_shot_accuracies",
    "few_shot_from_model",
    "mean_average_precision",
    "precision_at_1",
    "ridge_regression",
    "sample_shots",
    "streamed_average_precision",
]
