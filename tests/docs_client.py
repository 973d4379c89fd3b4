"""Runs the Python blocks of pages as they are printed, in order, in one process.

Arguments: the file for what happened, and the pages. Each page has its own names and
an empty working directory.
"""

import contextlib
import gc
import json
import os
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# The first line of a block that needs what a test has not.
NEEDS = "# Needs "
OF_BACKEND = f"{NEEDS}KERAS_BACKEND={os.environ.get('KERAS_BACKEND')}"


def blocks_of(page: Path) -> list[tuple[int, str]]:
    """The line before each block of a page, and its code."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, x.start(1)), x[1]) for x in BLOCK.finditer(text)]


def run(page: Path) -> str | None:
    """Returns the traceback of the first block of a page that fails."""
    names = {"__name__": "__main__"}
    for line, block in blocks_of(page):
        if block.startswith(NEEDS) and not block.startswith(OF_BACKEND):
            continue
        start = time.process_time()
        try:
            # Line numbers are the page's.
            exec(compile("\n" * line + block, page.name, "exec"), names)
        except BaseException:
            return f"{page.name}, line {line + 1}:\n{traceback.format_exc()}"
        finally:
            seconds = time.process_time() - start
            print(f"{page.name}:{line + 1} {seconds:.1f} s", file=sys.stderr)
    return None


def main(file: str, *pages: str) -> None:
    failures = {}
    for page in map(Path, pages):
        os.chdir(tempfile.mkdtemp())
        with contextlib.redirect_stdout(sys.stderr):
            failures[page.name] = run(page)
        gc.collect()
        import keras

        # Of the page on devices.
        keras.distribution.set_distribution(None)
        Path(file).write_text(json.dumps(failures))


if __name__ == "__main__":
    main(*sys.argv[1:])
