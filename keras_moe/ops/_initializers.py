"""Initial values, by the model's seed and the weight's path.

Keras's initializers are stateless: one object that serves several weights gives all of
them the same numbers, and each backend draws other ones. Here every weight has its own
stream of NumPy's Philox generator, so that no two weights start alike, and a seed means
the same values on all backends and in every process.

`skip_init` is for weights that are loaded anyway.
"""

import contextlib
import contextvars
import hashlib
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import initializers, ops

from keras_moe._backends import host_memory
from keras_moe._checks import check_initializer
from keras_moe._compat import compute_fans
from keras_moe._types import Initializer, Tensor
from keras_moe.ops._primitives import on_several_devices

# The spread of a normal distribution that is cut at two standard deviations.
_TRUNCATED_STDDEV = 0.87962566103423978


class _Start(NamedTuple):
    """Where the weights of a model start: its seed, its name and its own rules."""

    seed: int
    name: str
    rules: Mapping[str, Initializer]
    used: set[str]


_SKIPS = contextvars.ContextVar("skips", default=False)
_START: contextvars.ContextVar[_Start | None] = contextvars.ContextVar(
    "start", default=None
)


@contextlib.contextmanager
def skip_init(wanted: bool = True) -> Iterator[None]:
    """Weights made within the context are zeros that take no memory until written."""
    token = _SKIPS.set(wanted)
    try:
        yield
    finally:
        _SKIPS.reset(token)


@contextlib.contextmanager
def initial_values(
    seed: int | None, name: str, rules: Mapping[str, Initializer] | None = None
) -> Iterator[set[str]]:
    """Weights made within start by this seed and their path; gives matched rules."""
    # `name` tells models with the same seed and paths apart, such as the towers of a
    # pair. `rules` maps patterns of paths to initializers, which come before the
    # layers' own. `keras.utils.set_random_seed` seeds Python's generator.
    seed = random.getrandbits(64) if seed is None else seed
    start = _Start(seed, name, rules or {}, set())
    token = _START.set(start)
    try:
        yield start.used
    finally:
        _START.reset(token)


@keras.saving.register_keras_serializable("keras_moe")
class PathInitializer(keras.initializers.Initializer):
    """Draws from another initializer's distribution, for the weight at one path."""

    # The stream is settled here and not when it is called, since Keras may make a
    # variable long after its layer was built.
    def __init__(self, initializer: Initializer, path: str = ""):
        self._given = chosen = keras.initializers.get(initializer)
        start = _START.get()
        rules, used = ({}, set()) if start is None else (start.rules, start.used)
        for pattern, rule in rules.items():
            if re.fullmatch(pattern, path):
                used.add(pattern)
                other: Any = keras.initializers.get(rule)
                # Experts keep their number of different starts.
                is_per_expert = isinstance(chosen, PerExpert)
                chosen = PerExpert(other, chosen.shared) if is_per_expert else other
                break
        self.initializer: Any = chosen
        self.path = path
        seed = _own_seed(chosen)
        if start is not None:
            seed = start.seed if seed is None else seed
            self._stream = f"{seed}/{start.name}/{path}"
        elif seed is None:
            # Paths have names here that count the layers of the process.
            self._stream = f"{random.getrandbits(64)}"
        else:
            self._stream = f"{seed}/{path.partition('/')[2]}"

    def __call__(self, shape, dtype=None):
        dtype = keras.backend.standardize_dtype(dtype or keras.config.floatx())
        # Rules are for numbers that train, not for those of int8 kernels.
        initializer = self.initializer if "float" in dtype else self._given
        if _SKIPS.get() and not _advances(initializer):
            zeros = host_memory.lazy_zeros(tuple(shape), dtype)
            if zeros is not None:
                return zeros
        return _drawn(initializer, tuple(shape), dtype, self._stream)

    def get_config(self):
        stored = keras.initializers.serialize(self.initializer)
        return {"initializer": stored, "path": self.path}


@keras.saving.register_keras_serializable("keras_moe")
class PerExpert(keras.initializers.Initializer):
    """Initialises each expert's slice as a separate matrix.

    Given (E, D, H), an initializer would count E as a receptive field.

    Args:
        initializer: initializer of one expert's slice.
        shared: whether all experts start from the same values, as in V-MoE.

    Example:

    >>> from keras_moe.layers import PerExpert
    >>> PerExpert("glorot_uniform")((4, 8, 16)).shape == (4, 8, 16)
    True
    """

    def __init__(self, initializer: Initializer, shared: bool = False):
        self.initializer = check_initializer("initializer", initializer)
        self.shared = shared

    @property
    def seed(self) -> int | keras.random.SeedGenerator | None:
        return getattr(self.initializer, "seed", None)

    def __call__(self, shape, dtype=None):
        dtype = keras.backend.standardize_dtype(dtype or keras.config.floatx())
        return _drawn(self, tuple(shape), dtype, str(self.seed))

    def host_values(self, shape: tuple[int, ...], stream: str) -> np.ndarray | None:
        """All experts, written in place, so that only one copy is in memory."""
        values = host_memory.zeros(shape, "float32")
        for index in range(shape[0]):
            if self.shared and index:
                values[1:] = values[0]
                break
            drawn = host_values(self.initializer, shape[1:], f"{stream}/{index}")
            if drawn is None:
                return None
            values[index] = drawn
        return values

    def tensor(self, shape: tuple[int, ...], dtype: str, stream: str) -> Tensor:
        """All experts, by an initializer that only makes tensors."""
        num_experts = shape[0]
        slices = [
            _tensor(self.initializer, shape[1:], dtype, f"{stream}/{index}")
            for index in range(1 if self.shared else num_experts)
        ]
        if self.shared:
            return ops.tile(slices[0][None], [num_experts] + [1] * len(shape[1:]))
        if not on_several_devices():
            return ops.stack(slices)
        # `ops.stack` would make XLA build the whole stack on every device.
        experts = ops.reshape(
            ops.arange(num_experts, dtype="int32"), (-1, *[1] * len(shape[1:]))
        )
        value = 0.0
        for index, matrix in enumerate(slices):
            value = ops.where(experts == index, matrix, value)
        return ops.cast(value, dtype)

    def get_config(self):
        return {
            "initializer": keras.initializers.serialize(self.initializer),
            "shared": self.shared,
        }


def _own_seed(initializer):
    if isinstance(initializer, PerExpert):
        return _own_seed(initializer.initializer)
    if not isinstance(initializer, keras.initializers.Initializer):
        return None
    seed = initializer.get_config().get("seed")
    return seed if isinstance(seed, int) else None


def _advances(initializer):
    """Whether drawing advances a generator, which other layers may share."""
    seed = getattr(initializer, "seed", None)
    return isinstance(seed, keras.random.SeedGenerator)


def _drawn(initializer, shape, dtype, stream):
    """A tensor of an initializer's values."""
    values = None
    # Large weights that are split over devices are drawn there.
    if host_memory.holds_values():
        values = host_values(initializer, shape, stream)
    if values is None:
        return _tensor(initializer, shape, dtype, stream)
    tensor = host_memory.to_tensor(values)
    return tensor if dtype == "float32" else ops.cast(tensor, dtype)


def _tensor(initializer, shape, dtype, stream):
    """What Keras's initializer makes, with a seed of the stream."""
    if isinstance(initializer, PerExpert):
        return initializer.tensor(shape, dtype, stream)
    if hasattr(initializer, "seed") and not _advances(initializer):
        seed = int(_generator(stream).integers(2**31))
        config = {**initializer.get_config(), "seed": seed}
        initializer = type(initializer).from_config(config)
    return initializer(shape, dtype=dtype)


def _generator(stream):
    digest = hashlib.blake2b(stream.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def host_values(
    initializer: Any, shape: tuple[int, ...], stream: str
) -> np.ndarray | None:
    """An initializer's values, float32; None where only itself can make them."""
    if hasattr(initializer, "host_values"):
        return initializer.host_values(shape, stream)
    # A subclass with its own `__call__` has other values.
    call = type(initializer).__call__
    if _advances(initializer):
        return None
    if call is initializers.RandomUniform.__call__:
        return _uniform(shape, initializer.minval, initializer.maxval, stream)
    if call is initializers.RandomNormal.__call__:
        return _normal(shape, initializer.mean, initializer.stddev, stream)
    if call is initializers.TruncatedNormal.__call__:
        return _normal(shape, initializer.mean, initializer.stddev, stream, cut=True)
    if call is initializers.VarianceScaling.__call__:
        return _variance_scaling(initializer, shape, stream)
    constants = {
        initializers.Zeros.__call__: 0.0,
        initializers.Ones.__call__: 1.0,
        initializers.Constant.__call__: getattr(initializer, "value", None),
    }
    value = constants.get(call)
    if not isinstance(value, (int, float)):
        return None
    values = host_memory.zeros(shape, "float32")
    if value:
        values[...] = value
    return values


def _variance_scaling(initializer, shape, stream):
    axes = initializer.input_axes, initializer.output_axes
    fan_in, fan_out = compute_fans(shape, *axes)
    fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2.0}
    variance = initializer.scale / max(1.0, fans[initializer.mode])
    if initializer.distribution == "uniform":
        limit = (3.0 * variance) ** 0.5
        return _uniform(shape, -limit, limit, stream)
    cut = initializer.distribution == "truncated_normal"
    stddev = variance**0.5 / (_TRUNCATED_STDDEV if cut else 1.0)
    return _normal(shape, 0.0, stddev, stream, cut)


def _uniform(shape, lower, upper, stream):
    values = host_memory.zeros(shape, "float32")
    _generator(stream).random(dtype="float32", out=values)
    values *= np.float32(upper - lower)
    values += np.float32(lower)
    return values


def _normal(shape, mean, stddev, stream, cut=False):
    generator = _generator(stream)
    values = host_memory.zeros(shape, "float32")
    generator.standard_normal(dtype="float32", out=values)
    flat = values.reshape(-1)
    # What lies beyond two standard deviations is drawn again.
    beyond = np.flatnonzero(np.abs(flat) > 2) if cut else np.zeros(0, "int64")
    while len(beyond):
        flat[beyond] = generator.standard_normal(len(beyond), dtype="float32")
        beyond = beyond[np.abs(flat[beyond]) > 2]
    values *= np.float32(stddev)
    values += np.float32(mean)
    return values
