"""Sizes that follow from the names and shapes of a checkpoint's tensors."""

import re


def square_grid(num_positions: int, class_token: bool, where: str) -> int:
    """The patches down and across of a table with a row for each token."""
    num_patches = num_positions - class_token
    grid = round(max(num_patches, 0) ** 0.5)
    if grid < 1 or grid * grid != num_patches:
        raise ValueError(
            f"Expected position embeddings of a square of patches in {where}; "
            f"received: {num_patches} patches"
        )
    return grid


# The heads of encoders of a size, for weights and configs that do not have them.
_HEADS = {192: 3, 256: 4, 384: 6, 512: 8, 640: 10, 768: 12, 896: 14, 1024: 16, 1152: 16}
_HEADS.update({1280: 16, 1408: 16, 1664: 16})


def usual_heads(hidden_dim: int, where: str) -> int:
    """The number of heads that published encoders of this size have."""
    if hidden_dim not in _HEADS:
        raise ValueError(
            f"Expected num_heads=..., which the weights in {where} do not tell; "
            f"received: an encoder of hidden_dim={hidden_dim} without it"
        )
    return _HEADS[hidden_dim]


def rank(info_shape: tuple, axes: int, name: str, where: str) -> tuple:
    """A tensor's shape, if it has so many axes."""
    if len(info_shape) != axes:
        raise ValueError(
            f"Expected {axes} axes of {name!r} in {where}; received: shape={info_shape}"
        )
    return info_shape


def required(file, name: str, axes: int) -> tuple:
    """The shape of a tensor that must be there."""
    if name not in file:
        raise ValueError(
            f"Expected the tensor {name!r} in {file.path}; received: "
            f"{len(file)} tensors without it, such as {sorted(file)[:3]}"
        )
    return rank(file[name].shape, axes, name, file.path)


def numbered(file, pattern: str) -> list[int]:
    """The numbers in the names that a pattern with one group matches at the start."""
    numbers = {int(m[1]) for name in file if (m := re.match(pattern, name))}
    if numbers != set(range(len(numbers))) or not numbers:
        raise ValueError(
            f"Expected blocks numbered from 0 in {file.path}; received: "
            f"{sorted(numbers)} for {pattern!r}"
        )
    return sorted(numbers)


def agree(file, config: dict, name: str, **sizes) -> None:
    """Refuses weights whose sizes are not those of their config."""
    for argument, size in sizes.items():
        if config.get(argument, size) != size:
            raise ValueError(
                f"Expected {argument}={config[argument]!r} of the tensors in "
                f"{file.path}, as {name} says; received: {size}"
            )
