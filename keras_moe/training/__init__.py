"""Training: sparse upcycling of dense models."""

from keras_moe.training.upcycling import UpcyclingReport, upcycle

__all__ = ["UpcyclingReport", "upcycle"]
