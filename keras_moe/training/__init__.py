"""Training: recipes, schedules, and sparse upcycling of dense models."""

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
    "Recipe",
    "Training",
    "UpcyclingReport",
    "WarmupLinearDecay",
    "list_recipes",
    "load_recipe",
    "train",
    "upcycle",
    "warmup_schedule",
]
