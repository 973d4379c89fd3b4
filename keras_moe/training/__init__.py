"""Training: sparse upcycling of dense models, and debiasing."""

from keras_moe.training.adversarial_debiasing import adversarial_debiasing
from keras_moe.training.upcycling import UpcyclingReport, upcycle

__all__ = ["UpcyclingReport", "adversarial_debiasing", "upcycle"]
