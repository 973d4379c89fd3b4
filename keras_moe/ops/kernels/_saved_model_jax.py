"""JAX's programs in a version of StableHLO that the installed TensorFlow reads.

JAX writes what was new four weeks before it, which may be newer than TensorFlow's, and
has no argument for it. This can go when it has one, or asks TensorFlow.
"""

import contextlib
import textwrap
from collections.abc import Iterator

from jaxlib.mlir.dialects import stablehlo

_VERSION = "get_version_from_compatibility_requirement"


@contextlib.contextmanager
def readable_by_tensorflow() -> Iterator[None]:
    """Within it, JAX writes programs for TensorFlow, or raises a ValueError."""
    import tensorflow as tf
    from tensorflow.compiler.mlir.stablehlo import stablehlo as of_tensorflow

    readable, own = of_tensorflow.get_current_version(), getattr(stablehlo, _VERSION)

    def version(requirement):
        return of_tensorflow.get_smaller_version(readable, own(requirement))

    setattr(stablehlo, _VERSION, version)
    try:
        yield
    except Exception as error:
        if "StableHLO" not in str(error):
            raise
        raise ValueError(
            f"Expected operations of StableHLO {readable}, which TensorFlow "
            f"{tf.__version__} reads. A newer TensorFlow may have more, and "
            "KERAS_BACKEND=tensorflow exports without StableHLO; received: "
            f"{textwrap.shorten(str(error), 250)}"
        ) from error
    finally:
        setattr(stablehlo, _VERSION, own)
