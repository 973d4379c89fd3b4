"""Weights of the preset limoe_emoji of keras_moe, under CC BY-SA 4.0."""
