"""The lines that TensorFlow, XLA and CUDA write to stderr, kept in a file.

TensorFlow 2.21 prints some at each start, whatever TF_CPP_MIN_LOG_LEVEL says.
"""

import faulthandler
import os
import sys
import tempfile
from pathlib import Path


def divert_native_log() -> Path:
    """Lets native code write to a file, while `sys.stderr` stays the process's stderr.

    Where native code ends the process, `faulthandler` prints the Python stack, and the
    file is left.
    """
    handle, path = tempfile.mkstemp(prefix="keras-moe-", suffix=".log")
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(handle, 2)
    os.close(handle)
    sys.stderr = os.fdopen(
        stderr, "w", buffering=1, encoding=sys.stderr.encoding, errors="replace"
    )
    faulthandler.enable(sys.stderr)
    return Path(path)
