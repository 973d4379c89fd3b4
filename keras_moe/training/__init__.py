"""Training: recipes, schedules, sparse upcycling of dense models, and debiasing."""

from keras_moe.training.adafactor import ViTGAdafactor
from keras_moe.training.adversarial_debiasing import adversarial_debiasing
from keras_moe.training.optimizers import optimizer_class
from keras_moe.training.recipes import (
    Datasets,
    Recipe,
    Training,
    list_recipes,
    load_recipe,
    train,
)
from keras_moe.training.schedules import (
    WarmupCooldown,
    WarmupLinearDecay,
    warmup_schedule,
)
from keras_moe.training.souping import Soup, cooldown_branch, greedy_soup
from keras_moe.training.upcycling import UpcyclingReport, upcycle

__all__ = [
    "Datasets",
    "Recipe",
    "Soup",
    "Training",
    "UpcyclingReport",
    "ViTGAdafactor",
    "WarmupCooldown",
    "WarmupLinearDecay",
    "adversarial_debiasing",
    "cooldown_branch",
    "greedy_soup",
    "list_recipes",
    "load_recipe",
    "optimizer_class",
    "train",
    "upcycle",
    "warmup_schedule",
]
