"""The use of each expert, in all, by modality or by class.

Axes: B batch, N tokens, E experts, U groups of tokens (modalities or classes).
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_moe.files import write_json

# The group of all tokens.
ALL = "all"
# Figures that a usage may lack.
OPTIONAL = ("contributions", "first_choices")


class BlockUsage(NamedTuple):
    """The use of the experts of one MoE layer by groups of tokens, as sums.

    Attributes:
        tokens: float64 (U, E), numbers of tokens that the experts served.
        mass: float64 (U, E), sums of the experts' weights in these tokens' outputs.
        contributions: float64 (U, E), sums of these weights times the norms of the
            experts' outputs; None if they were not measured.
        first_choices: float64 (U, E), numbers of tokens whose largest gate was the
            expert's, served or not; None if they were not counted.
    """

    tokens: np.ndarray
    mass: np.ndarray
    contributions: np.ndarray | None = None
    first_choices: np.ndarray | None = None


class ExpertUsage(NamedTuple):
    """The use of the experts of a model.

    Attributes:
        groups: names of the U groups of tokens, such as modalities or classes; `"all"`
            where there is one.
        blocks: dict from the name of an MoE block to its `BlockUsage`.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import BlockUsage, ExpertUsage
    >>> block = BlockUsage(np.array([[3.0, 1.0]]), np.array([[2.0, 0.5]]))
    >>> usage = ExpertUsage(["all"], {"block_1": block})
    >>> ExpertUsage.from_dict(usage.to_dict()).blocks["block_1"].tokens.tolist()
    [[3.0, 1.0]]
    """

    groups: list[str]
    blocks: dict[str, BlockUsage]

    def to_dict(self) -> dict:
        """A JSON-serialisable dict."""
        return {
            "groups": list(self.groups),
            "blocks": {
                name: {k: None if x is None else x.tolist() for k, x in fields.items()}
                for name, fields in (
                    (name, block._asdict()) for name, block in self.blocks.items()
                )
            },
        }

    @classmethod
    def from_dict(cls, content: dict) -> "ExpertUsage":
        """The usage of `to_dict`'s result.

        Args:
            content: dict of that form.

        Raises:
            ValueError: if it has another form.
        """
        try:
            groups = [str(name) for name in content["groups"]]
            blocks = {
                str(name): BlockUsage(
                    **{
                        key: None if values is None else np.array(values, "float64")
                        for key, values in fields.items()
                    }
                )
                for name, fields in content["blocks"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "Expected the dict of an ExpertUsage, with groups and blocks; "
                f"received: {type(content).__name__} ({error!r})"
            ) from error
        return checked_usage(cls(groups, blocks))

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file.

        Args:
            path: path of the file.

        Raises:
            OSError: with the path, if it cannot be written.
        """
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "ExpertUsage":
        """Reads a file that `save` has written.

        Args:
            path: path of the file.

        Raises:
            ValueError: naming the file, if it is no such file.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(
                f"Expected a file that ExpertUsage.save has written; received: {path} "
                f"({error})"
            ) from error


def routing_usage(
    routing: Any,
    groups: Any = None,
    num_groups: int | None = None,
    mask: Any = None,
    contributions: Any = None,
) -> BlockUsage:
    """The use of experts in one routing record.

    Args:
        routing: `Routing` of arrays (B, N, E).
        groups: integers (B,) or (B, N), the group of each example or token, such as its
            class or modality; negative ones do not count. None has one group.
        num_groups: U; None is the largest number in `groups` and one.
        mask: boolean (B, N), False for tokens that do not count. First choices need it
            where padding is not routed.
        contributions: float (B, N, E), weights of experts times norms of their outputs,
            or None.

    Returns:
        `BlockUsage`.

    Raises:
        ValueError: if shapes do not fit, groups are out of range, or figures are not
            finite.

    Reference:
        *Multimodal Contrastive Learning with LIMoE*, appendix E.4.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import routing_usage
    >>> from keras_moe.ops import Routing
    >>> served = np.array([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    >>> usage = routing_usage(Routing(*[0.5 * served] * 4, served, 0.5 * served))
    >>> usage.tokens.tolist(), usage.mass.tolist()
    ([[2.0, 1.0]], [[1.0, 0.5]])
    """
    tokens = np.asarray(routing.dispatched, "float64")
    if tokens.ndim != 3:
        raise ValueError(
            "Expected routing arrays of shape (batch, tokens, experts); "
            f"received: shape={tokens.shape}"
        )
    figures = {"tokens": tokens, "mass": routing.combined}
    first = np.argmax(routing.gates, axis=-1)
    figures["first_choices"] = np.eye(tokens.shape[-1])[first]
    if contributions is not None:
        figures["contributions"] = contributions
    owners = _owners(groups, mask, tokens.shape[:2])
    count = _count(owners, num_groups)
    counts = owners >= 0
    sums = {}
    for name, figure in figures.items():
        figure = np.asarray(figure, "float64")
        if figure.shape != tokens.shape:
            raise ValueError(
                f"Expected {name} of shape {tokens.shape}; "
                f"received: shape={figure.shape}"
            )
        if not np.isfinite(figure[counts]).all():
            raise ValueError(f"Expected finite {name}; received: NaN or inf")
        total = np.zeros((count, tokens.shape[-1]))
        np.add.at(total, owners[counts], figure[counts])
        sums[name] = total
    return BlockUsage(**sums)


def _owners(groups, mask, shape):
    """The group of each token (B, N), -1 where it does not count."""
    owners = np.zeros(shape, int) if groups is None else np.asarray(groups)
    if owners.dtype.kind not in "iu" or owners.shape not in (shape, shape[:1]):
        raise ValueError(
            f"Expected groups to be integers of shape {shape[:1]} or {shape}; "
            f"received: shape={owners.shape}, dtype={owners.dtype}"
        )
    if owners.ndim == 1:
        owners = owners[:, None]
    owners = np.broadcast_to(owners, shape)
    if mask is None:
        return owners
    mask = np.asarray(mask)
    if mask.shape != shape:
        raise ValueError(
            f"Expected a mask of shape {shape}; received: shape={mask.shape}"
        )
    return np.where(mask.astype(bool), owners, -1)


def _count(owners, num_groups):
    largest = int(owners.max(initial=-1))
    if num_groups is None:
        return max(largest + 1, 1)
    if largest >= num_groups:
        raise ValueError(
            f"Expected groups below num_groups={num_groups}; received: {largest}"
        )
    return num_groups


def merged_usage(usages: Iterable[ExpertUsage]) -> ExpertUsage:
    """The usage of several passes together, such as those of several batches.

    Args:
        usages: records of one model, with the same groups.

    Returns:
        `ExpertUsage` of the sums.

    Raises:
        ValueError: if there is none, or groups, blocks or experts differ.

    Example:

    >>> import numpy as np
    >>> from keras_moe.analysis import BlockUsage, ExpertUsage, merged_usage
    >>> block = BlockUsage(np.array([[3.0, 1.0]]), np.array([[2.0, 0.5]]))
    >>> usage = ExpertUsage(["all"], {"block_1": block})
    >>> merged_usage([usage, usage]).blocks["block_1"].tokens.tolist()
    [[6.0, 2.0]]
    """
    usages = list(usages)
    if not usages:
        raise ValueError("Expected at least one usage; received: none")
    first = usages[0]
    for other in usages[1:]:
        if _layout(other) != _layout(first):
            raise ValueError(
                "Expected usages with the same groups, blocks and experts; received: "
                f"{_layout(first)} and {_layout(other)}"
            )
    blocks = {
        name: BlockUsage(
            *(
                None if fields[0] is None else np.sum(fields, axis=0)
                for fields in zip(*(usage.blocks[name] for usage in usages))
            )
        )
        for name in first.blocks
    }
    return ExpertUsage(list(first.groups), blocks)


def _layout(usage):
    blocks = {
        name: (block.tokens.shape, *(getattr(block, x) is not None for x in OPTIONAL))
        for name, block in usage.blocks.items()
    }
    return list(usage.groups), blocks


def checked_usage(usage: Any) -> ExpertUsage:
    """`usage`, if its figures can rank experts."""
    if not isinstance(usage, ExpertUsage) or not usage.blocks or not usage.groups:
        raise ValueError(
            "Expected an ExpertUsage of at least one group and block; "
            f"received: {usage!r:.200}"
        )
    for name, block in usage.blocks.items():
        shape = np.shape(block.tokens)
        for field, figure in block._asdict().items():
            if figure is None and field in OPTIONAL:
                continue
            if np.ndim(figure) != 2 or np.shape(figure) != shape:
                raise ValueError(
                    f"Expected {field} of {name} by group and expert, {shape}; "
                    f"received: shape={np.shape(figure)}"
                )
            if len(figure) != len(usage.groups):
                raise ValueError(
                    f"Expected a row of {name} for each of the groups {usage.groups}; "
                    f"received: shape={shape}"
                )
            if not (np.isfinite(figure).all() and np.all(np.asarray(figure) >= 0)):
                raise ValueError(
                    f"Expected finite {field} of {name}, at least 0; received: NaN, "
                    "inf or a negative number"
                )
        if not np.sum(block.tokens):
            raise ValueError(
                f"Expected served tokens in {name}; received: an empty usage"
            )
    return usage
