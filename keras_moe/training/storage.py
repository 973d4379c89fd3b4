"""The seam between a run and the place of its checkpoints.

A checkpoint is a folder `step-00000120` with a `manifest.json`, which is written last:
it is there as a whole, or not at all. How arrays are written differs by storage.
"""

import abc
import dataclasses
import json
import os
import re
import warnings
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import keras

from keras_moe.checks import check_integer
from keras_moe.training.agreement import agreed, first_decides, shared_by
from keras_moe.training.manifest import step_name

_STEP = re.compile(r"step-\d{8,}")
# `pathlib` makes one slash of two.
_REMOTE = re.compile(r"(?P<scheme>[a-z][a-z0-9]+):/+(?P<rest>.*)")


class Retention(NamedTuple):
    """Which checkpoints of a run stay when a new one is written.

    Attributes:
        newest: number of the newest ones that stay.
        every: those of steps that this divides stay, too; None for none.
        steps: those of these steps stay, too.

    Example:

    >>> from keras_moe.training import Retention
    >>> [step for step in range(0, 50, 10) if Retention(every=20).keeps(step)]
    [0, 20, 40]
    """

    newest: int = 3
    every: int | None = None
    steps: Collection[int] = ()

    def check(self) -> "Retention":
        """These rules, if they are in range."""
        check_integer("keep", self.newest)
        if self.every is not None:
            check_integer("keep_every", self.every)
        return self

    def keeps(self, step: int) -> bool:
        """Whether the checkpoint of a step stays that is not among the newest."""
        return step in self.steps or (self.every is not None and step % self.every == 0)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are what was written.

    Args:
        path: its folder.
        step: number of steps made before it.
        state: everything but arrays, see `save_checkpoint`.
        variables: path, shape and dtype of each variable, by group.
        files: the names of its files.
        storage: the storage that reads its arrays.

    Example: see `save_checkpoint`.
    """

    path: Any
    step: int
    state: dict
    variables: dict[str, list[dict]]
    files: tuple[str, ...]
    storage: "Storage" = dataclasses.field(repr=False, compare=False)


class Storage(abc.ABC):
    """A folder of checkpoints, and how they are written and read.

    Args:
        folder: folder of all checkpoints of a run.

    Example: see `LocalStorage`.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = self.as_path(folder)

    @staticmethod
    @abc.abstractmethod
    def as_path(folder: str | os.PathLike) -> Any:
        """The path object of a folder."""

    @abc.abstractmethod
    def write(
        self,
        path: Any,
        step: int,
        groups: dict[str, Sequence[keras.Variable]],
        text: str,
    ) -> None:
        """Writes a checkpoint as a whole, or leaves nothing.

        Args:
            path: the checkpoint's folder.
            step: number of steps made.
            groups: the variables.
            text: the content of `state.json`.
        """

    @abc.abstractmethod
    def read(self, path: Any) -> Checkpoint:
        """A checkpoint, if the files that this process looks at are what was written.

        Raises:
            ValueError: if they are not.
            OSError: if they cannot be read.
        """

    @abc.abstractmethod
    def assign(
        self, checkpoint: Checkpoint, groups: dict[str, Sequence[keras.Variable]]
    ) -> None:
        """Gives variables, which were checked, the values of a checkpoint."""

    @abc.abstractmethod
    def remove(self, path: Any) -> None:
        """Removes a checkpoint at once: half of one must never be taken for one."""

    @abc.abstractmethod
    def clean(self, everything: bool = False) -> None:
        """Removes what writing left behind that never came to its end.

        Args:
            everything: whether to remove all checkpoints, too.
        """

    @property
    def writes_alone(self) -> bool:
        """Whether this process writes what is written once, and removes."""
        return shared_by()[0] == 0

    def paths(self) -> list[Any]:
        """The checkpoints' folders, oldest first; they are not looked into."""
        if not self.folder.exists():
            return []
        names = [path for path in self.folder.iterdir() if _STEP.fullmatch(path.name)]
        return sorted(names, key=step_of)

    def verified(self, path: Any) -> Checkpoint:
        """A checkpoint, if its files are what was written, in each process the same.

        Raises:
            ValueError: if they are not.
            OSError: if they cannot be read.
        """
        checkpoints = []
        agreed(lambda: checkpoints.append(self.read(path)))
        return checkpoints[0]

    def path_of(self, step: int) -> Any:
        """The folder of a step's checkpoint."""
        return self.folder / step_name(step)

    def save(
        self,
        step: int,
        groups: dict[str, Sequence[keras.Variable]],
        state: dict,
        retention: Retention = Retention(),  # noqa: B008
    ) -> Any:
        """Writes a checkpoint, and removes older ones once it is there.

        All processes that share the variables call this.

        Args:
            step: number of steps made.
            groups: variables in the order in which they will be restored.
            state: further state, JSON.
            retention: rules for the checkpoints that stay.

        Returns:
            The checkpoint's folder.

        Raises:
            NonFiniteValues: a ValueError, if a value is not finite.
            ValueError: if the state is not JSON.
            OSError: if it cannot be written.
        """
        step = check_integer("step", step, minimum=0)
        retention.check()
        path = self.path_of(step)
        described = {
            group: [
                {"path": v.path, "shape": list(v.shape), "dtype": str(v.dtype)}
                for v in variables
            ]
            for group, variables in groups.items()
        }
        # Figures, unlike weights, may be NaN.
        try:
            text = json.dumps({"state": state, "variables": described}, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Expected a state that JSON can hold; received: state={state!r:.200} "
                f"({error})"
            ) from error
        self.write(path, step, groups, text)
        if self.writes_alone:
            try:
                self._remove_older(path, retention)
            except OSError as error:
                # The new one is whole all the same.
                warnings.warn(
                    f"Older checkpoints could not be removed: {error}", stacklevel=3
                )
        return path

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole.

        Returns:
            The checkpoint, or None if there never was any. A warning names newer ones
            whose files are missing or are not what was written.

        Raises:
            ValueError: if there are checkpoints, and none is whole.
        """
        corrupt = []
        # Another process may see what the first is about to remove.
        names = first_decides(lambda: [path.name for path in self.paths()])
        for path in reversed([self.folder / name for name in names]):
            try:
                checkpoint = self.verified(path)
            except (OSError, RecursionError, ValueError) as error:
                corrupt.append(f"{path} ({error})")
                continue
            if corrupt:
                warnings.warn(
                    f"Corrupt checkpoints are skipped: {'; '.join(corrupt)}. "
                    f"{path} is whole, and is used",
                    stacklevel=3,
                )
            return checkpoint
        if corrupt:
            raise ValueError(
                "Expected at least one checkpoint that is whole; received: "
                f"{'; '.join(corrupt)}. Remove them to begin anew"
            )
        return None

    def open(self, path: Any) -> Checkpoint:
        """One checkpoint, if it is whole.

        Args:
            path: its folder.

        Raises:
            ValueError: if there is none, or its files are not what was written.
        """
        path = self.as_path(path)
        try:
            return self.verified(path)
        except (OSError, RecursionError, ValueError) as error:
            raise ValueError(
                f"Expected a checkpoint that is whole; received: {path} ({error})"
            ) from error

    def restore(
        self, checkpoint: Checkpoint, groups: dict[str, Sequence[keras.Variable]]
    ) -> None:
        """Gives variables the values of a checkpoint.

        They may lie on other devices, or other numbers of devices, than those that were
        saved; each process reads the pieces that it needs.

        Args:
            checkpoint: a checkpoint of this storage.
            groups: the groups to restore, their variables in the order of saving. There
                may be fewer groups than were saved.

        Raises:
            ValueError: if a group is not there, or variables differ in number or shape.
        """
        for group, variables in groups.items():
            saved = checkpoint.variables.get(group)
            if saved is None or len(saved) != len(variables):
                raise ValueError(
                    f"Expected {len(variables)} variables of {group!r} in "
                    f"{checkpoint.path}; received: {saved and len(saved)}"
                )
            for entry, variable in zip(saved, variables):
                if not _fits(group, entry, variable):
                    raise ValueError(
                        f"Expected shape {tuple(variable.shape)} and {variable.dtype} "
                        f"of {variable.path} in {checkpoint.path}; received: {entry}"
                    )
        self.assign(checkpoint, groups)

    def _remove_older(self, newest, retention):
        # Newer ones are corrupt: the run went on from before them.
        for path in self.paths():
            if step_of(path) > step_of(newest):
                self.remove(path)
        for path in self.paths()[: -retention.newest]:
            if not retention.keeps(step_of(path)):
                self.remove(path)


def is_remote(folder: str | os.PathLike) -> bool:
    """Whether a folder is in a store of objects, such as `gs://bucket/run`."""
    return _REMOTE.fullmatch(os.fspath(folder)) is not None


def remote_name(folder: str | os.PathLike) -> str:
    """The name of a remote folder, whose slashes `pathlib` may have lost."""
    match = _REMOTE.fullmatch(os.fspath(folder))
    return f"{match['scheme']}://{match['rest']}"


def step_of(path: Any) -> int:
    """The step of a checkpoint's folder, by its name."""
    return int(path.name.removeprefix("step-"))


def _fits(group, entry, variable):
    same = tuple(entry["shape"]) == tuple(variable.shape)
    same = same and _is_float(entry["dtype"]) == _is_float(variable.dtype)
    if group != "model":
        return same
    # Keras names "variable" those without a name.
    names = {_name(entry["path"]), _name(variable.path)} - {"variable"}
    return same and len(names) < 2


def _is_float(dtype):
    return "float" in keras.backend.standardize_dtype(dtype)


def _name(path):
    # Keras numbers layers, and what has no name, anew in each process.
    return path.rpartition("/")[2].rstrip("0123456789").rstrip("_")
