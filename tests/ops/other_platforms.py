"""Trains layers on CPUs where what other platforms compute cannot even be traced.

Prints the files of kernels that had a choice. A process of its own, since programs are
traced once.
"""

import sys
from pathlib import Path

import keras
import numpy as np

from keras_moe import layers, ops, routers
from keras_moe._backends import jax as _platform_jax

FILES = set()
choose = _platform_jax.by_platform


def strict(*inputs, default, **forms):
    """`by_platform` where all forms fail but that of CPUs."""
    FILES.add(Path(sys._getframe(1).f_code.co_filename).name)
    own = forms.pop("cpu", default)
    forms = dict.fromkeys(("tpu", "cuda", *forms), fails)
    return choose(*inputs, cpu=own, default=fails, **forms)


def fails(*inputs):
    raise AssertionError("traced for a platform that is not there")


def main() -> None:
    # JAX may have no such module, or one without what the kernels take from it.
    sys.modules["jax.experimental.pallas"] = None
    _platform_jax.by_platform = strict
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = np.random.default_rng(0).normal(size=(2, 16, 8)).astype("float32")
    for router in (
        routers.TokenChoiceRouter(4, capacity_factor=1.0),
        routers.TokenChoiceRouter(4, dropless=True),
        routers.ExpertChoiceRouter(4),
    ):
        moe = layers.MoE(router, layers.Experts(4, 16), group_size=16)
        inputs = keras.Input((16, 8))
        model = keras.Model(inputs, moe(inputs)[0])
        model.compile("sgd", "mse")
        model.fit(tokens, tokens, verbose=0)
        assert np.isfinite(model.predict(tokens, verbose=0)).all()
    kernels = keras.ops.ones((2, 8, 5), "bfloat16")
    rows = keras.ops.cast(tokens[0], "bfloat16")
    ops.grouped_matmul(rows, kernels, np.array([3, 2], "int32"))
    print(*sorted(FILES))


if __name__ == "__main__":
    main()
