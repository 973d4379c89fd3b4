"""Training: recipes, schedules, sparse upcycling of dense models, and debiasing."""

from keras_moe.training.adversarial_debiasing import adversarial_debiasing
from keras_moe.training.metrics import MeanAveragePrecision, PrecisionAt1
from keras_moe.training.recipes import (
    Datasets,
    Recipe,
    Training,
    list_recipes,
    load_recipe,
    train,
)
from keras_moe.training.schedules import WarmupLinearDecay, warmup_schedule
from keras_moe.training.upcycling import UpcyclingReport, upcycle

__all__ = [
    "Datasets",
    "MeanAveragePrecision",
    "PrecisionAt1",
    "Recipe",
    "Training",
    "UpcyclingReport",
    "WarmupLinearDecay",
    "adversarial_debiasing",
    "list_recipes",
    "load_recipe",
    "train",
    "upcycle",
    "warmup_schedule",
]
