"""Emoji as pairs of images and captions, with held-out combinations."""

from keras_moe.data.emoji.loading import EMOJI_CREDIT, EmojiPairs, load_emoji

__all__ = ["EMOJI_CREDIT", "EmojiPairs", "load_emoji"]
