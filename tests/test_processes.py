"""Batches that processes share, in one process."""

import numpy as np
import pytest

from keras_moe.processes import gathered_batch

pytestmark = pytest.mark.backend_free


def test_objects_cannot_be_gathered():
    with pytest.raises(ValueError, match="arrays of numbers; received: dtype=object"):
        gathered_batch({"captions": np.array([b"a", b"bc"], object)})
