"""Two towers, one of images and one of texts, as in CLIP, SigLIP and CLIP-UP."""

from keras_moe.models.clip.backbone import CLIPBackbone

__all__ = ["CLIPBackbone"]
