"""Files of a source by a folder or a glob, and their splits by words of their names."""

import glob
import os
import re
from pathlib import Path


def matching_files(pattern: str, names: str) -> list[Path]:
    """The files of a folder or a glob, sorted."""
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), names)
    paths = [Path(path) for path in sorted(glob.glob(pattern))]
    return [path for path in paths if path.is_file()]


def is_of_split(path: Path, split: str) -> bool:
    """Whether a file's name has the split as a word, as "train-00000-of-00008" has."""
    return split in re.split(r"[-_.]", path.name)
