"""Routers: the class is the allocation, the affinity is an argument."""

from keras_moe.routers.router import Router
from keras_moe.routers.token_choice import TokenChoiceRouter

__all__ = ["Router", "TokenChoiceRouter"]
