"""Towers of blocks: the families."""
