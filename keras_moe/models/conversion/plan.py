"""The plan of a conversion, which a naming scheme makes before anything is read."""

from dataclasses import dataclass

from keras_moe.models.image_preprocessor import ImagePreprocessor

# Prefixes of the paths of a classifier's weights: those that a new head replaces, and
# those that a backbone alone has not.
HEAD = ("predictions/", "pre_logits/")
POOLING = ("pooler/", "pooled_norm/")


@dataclass
class ConversionPlan:
    """The model in a checkpoint, and the rules for its weights.

    Args:
        scheme: name of the naming scheme.
        backbone: name of the class, such as `"ViTBackbone"`.
        arguments: arguments of the backbone, as the checkpoint was made.
        rules: rule for each weight of the model, by its path.
        task_arguments: arguments of the classifier; None if there is no head.
        ignored: tensors that are none of the model's, with the reason.
        notes: remarks for the user.
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
        """The preprocessor of the source's images, or None where it is not known."""
        if self.preprocessing is None:
            return None
        image = self.arguments.get("image", self.arguments)
        return ImagePreprocessor(image["image_shape"], **self.preprocessing)
