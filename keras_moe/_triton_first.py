"""Imports Triton before TensorFlow: the other way round ends the process.

Seen with TensorFlow 2.21 and Triton 3.7, which comes with PyTorch for CUDA; models of
transformers and `torch.compile` import it. This can go when both can be imported.
"""

import contextlib
import sys


class TritonFirst:
    """Finder that makes anyone's first import of TensorFlow that of Triton."""

    def find_spec(self, name, path=None, target=None):
        """TensorFlow as the other finders find it, with a loader that loads Triton."""
        if name != "tensorflow":
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.create_module = _after_triton(spec.loader.create_module)
        return spec


def _after_triton(create):
    def create_module(spec):
        # One that is broken is not needed here, and says so to those who need it.
        with contextlib.suppress(Exception):
            import triton  # noqa: F401
        return create(spec)

    return create_module


def install() -> None:
    """From now on, TensorFlow is imported after Triton."""
    if "tensorflow" not in sys.modules:
        sys.meta_path.insert(0, TritonFirst())
