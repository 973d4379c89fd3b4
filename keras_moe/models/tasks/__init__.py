"""Backbones with a head: classification, contrastive learning, language."""
