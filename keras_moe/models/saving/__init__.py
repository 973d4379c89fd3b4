"""Preset folders, files of weights, and what LoRA adds to both."""
