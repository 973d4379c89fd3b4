"""What a checkpoint's images went through, from what its publisher says."""

import math
from typing import NamedTuple


class Normalization(NamedTuple):
    """What a checkpoint's images went through: (pixels in [0, 1] - mean) / std."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def is_ours(self) -> bool:
        """Whether it gives the range [-1, 1] that our models take."""
        return all(abs(x - 0.5) < 1e-6 for x in (*self.mean, *self.std))


def normalization(
    channels: int,
    mean: list | None,
    std: list | None,
    preprocessor: dict,
    default: Normalization | None = None,
) -> Normalization | None:
    """What images went through, or None if it is what our models take.

    Args:
        channels: of the images.
        mean: as the publisher says, or None.
        std: as the publisher says, or None.
        preprocessor: the content of transformers' `preprocessor_config.json`, which
            may switch off normalisation or the division by 255; `{}` without.
        default: without mean and std; None is what our models take.

    Raises:
        ValueError: if mean and std are of another number of channels.
    """
    found = default or Normalization((0.5,) * channels, (0.5,) * channels)
    if mean is not None and std is not None:
        found = Normalization(tuple(mean), tuple(std))
    if not preprocessor.get("do_normalize", True):
        found = Normalization((0.0,) * channels, (1.0,) * channels)
    if len(found.mean) != channels or len(found.std) != channels:
        raise ValueError(
            f"Expected mean and std of {channels} channels; received: "
            f"mean={list(found.mean)}, std={list(found.std)}"
        )
    # What a white pixel becomes before it is normalised.
    white = 255 * preprocessor.get("rescale_factor", 1 / 255)
    if not preprocessor.get("do_rescale", True):
        white = 255
    if not math.isclose(white, 1, rel_tol=1e-6):
        found = Normalization(*(tuple(x / white for x in part) for part in found))
    return None if found.is_ours else found
