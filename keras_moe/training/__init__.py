"""Training: recipes, schedules, sparse upcycling of dense models, and debiasing."""

from keras_moe.training.adversarial_debiasing import adversarial_debiasing
from keras_moe.training.recipes import (
    Datasets,
    Recipe,
    list_recipes,
    load_recipe,
)
from keras_moe.training.run import Training, train
from keras_moe.training.schedules import WarmupLinearDecay, warmup_schedule
from keras_moe.training.upcycling import UpcyclingReport, upcycle

__all__ = [
    "Datasets",
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
