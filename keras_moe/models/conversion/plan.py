"""What a naming scheme finds in a checkpoint, before anything is read."""

from dataclasses import dataclass

from keras_moe.models.image_preprocessor import ImagePreprocessor

# The starts of the paths of a classifier's weights: what a new head replaces, and what
# a backbone alone has not.
HEAD = ("predictions/", "pre_logits/")
POOLING = ("pooler/", "pooled_norm/")


@dataclass
class ConversionPlan:
    """What a naming scheme finds in a checkpoint.

    Args:
        scheme: the naming's name.
        backbone: the class's name, `"ViTBackbone"` or `"MixerBackbone"`.
        arguments: of the backbone, as the checkpoint was made.
        rules: for each of our weights, by its path in the model.
        task_arguments: of the classifier; None if there is no head.
        ignored: tensors that are none of the image model's, with the reason.
        notes: what a user should know.
        preprocessing: arguments of `ImagePreprocessor` beside the images' shape; None
            where the source's images are not known.
    """

    scheme: str
    backbone: str
    arguments: dict
    rules: dict
    task_arguments: dict | None = None
    ignored: dict | None = None
    notes: tuple[str, ...] = ()
    preprocessing: dict | None = None

    def preprocessor(self) -> ImagePreprocessor | None:
        """What prepares the source's images, or None where that is not known."""
        if self.preprocessing is None:
            return None
        return ImagePreprocessor(self.arguments["image_shape"], **self.preprocessing)
