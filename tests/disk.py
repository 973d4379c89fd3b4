"""Files that may not grow, as on a full disk."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def files_up_to(limit: int) -> Iterator[None]:
    """Writing more than `limit` bytes to a file of this process fails within."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
