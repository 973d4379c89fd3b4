"""Evaluation of frozen models: functions of arrays, and thin drivers for models."""

from keras_moe.evaluation.few_shot import (
    FewShotResult,
    RidgeClassifier,
    best_l2,
    few_shot,
    few_shot_accuracies,
    few_shot_from_model,
    ridge_regression,
    sample_shots,
)

__all__ = [
    "FewShotResult",
    "RidgeClassifier",
    "best_l2",
    "few_shot",
    "few_shot_accuracies",
    "few_shot_from_model",
    "ridge_regression",
    "sample_shots",
]
