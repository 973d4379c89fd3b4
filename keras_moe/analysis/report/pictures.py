"""Images of examples, small enough for a page."""

import base64
import io

import numpy as np

# The longer side of an image, in pixels.
_SIDE = 128


def data_uri(image: np.ndarray) -> str:
    """An image as the address of an element `image`.

    Small images keep their pixels; large ones lose some.

    Args:
        image: (height, width, channels) in [-1, 1], channels 1 or 3.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis.report.pictures import data_uri
    >>> data_uri(np.zeros((4, 4, 1)))[:22]
    'data:image/png;base64,'
    """
    from PIL import Image

    pixels = np.rint(np.clip((np.nan_to_num(image) + 1.0) * 127.5, 0, 255))
    pixels = pixels.astype("uint8")
    channels = pixels.shape[-1]
    if channels not in (1, 3):
        # Other channels than light or colours are drawn as their mean.
        pixels = pixels.mean(axis=-1, keepdims=True).astype("uint8")
    picture = Image.fromarray(pixels[..., 0] if channels != 3 else pixels)
    kind = {"format": "PNG", "optimize": True}
    if max(picture.size) > _SIDE:
        picture.thumbnail((_SIDE, _SIDE))
        kind = {"format": "WEBP", "quality": 80}
    content = io.BytesIO()
    picture.save(content, **kind)
    text = base64.b64encode(content.getvalue()).decode("ascii")
    return f"data:image/{kind['format'].lower()};base64,{text}"
