"""The normalisation of a checkpoint's images, as its publisher describes it."""

import math
from typing import NamedTuple


class Normalization(NamedTuple):
    """The normalisation of a checkpoint's images: (pixels in [0, 1] - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def is_ours(self) -> bool:
        """Whether it gives the range [-1, 1] of this library's models."""
        return all(abs(x - 0.5) < 1e-6 for x in (*self.mean, *self.std))


def normalization(
    channels: int,
    mean: list | None,
    std: list | None,
    preprocessor: dict,
    default: Normalization | None = None,
) -> Normalization | None:
    """The normalisation of images, or None if it gives this library's range."""
    applied = default or Normalization((0.5,) * channels, (0.5,) * channels)
    if mean is not None and std is not None:
        applied = Normalization(tuple(mean), tuple(std))
    if not preprocessor.get("do_normalize", True):
        applied = Normalization((0.0,) * channels, (1.0,) * channels)
    if len(applied.mean) != channels or len(applied.std) != channels:
        raise ValueError(
            f"Expected mean and std of {channels} channels; received: "
            f"mean={list(applied.mean)}, std={list(applied.std)}"
        )
    # The value of a white pixel before it is normalised.
    white = 255 * preprocessor.get("rescale_factor", 1 / 255)
    if not preprocessor.get("do_rescale", True):
        white = 255
    if not math.isclose(white, 1, rel_tol=1e-6):
        applied = Normalization(*(tuple(x / white for x in part) for part in applied))
    return None if applied.is_ours else applied
