"""One backend, on the CPU, quiet and repeatable, whatever the machine."""

import contextlib
import gc
import os
import re
import zlib
from collections import defaultdict
from importlib import metadata
from unittest import mock

# Imports and collection make a million objects that stay: Python's garbage collector
# would walk through all of them again and again. It is switched on when they are made.
gc.disable()


def _at_least(package, *wanted):
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return True
    return tuple(int(part) for part in version.split(".")[:2]) >= wanted


# On JAX a small test is mostly compilation, and this takes a quarter off it. Programs
# are compiled in one piece: pieces are for several cores, and each costs something.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
)
# Without XLA's newest emitters the rest takes half the time, on PyTorch in the programs
# on JAX that tests start. XLA ends the process over a flag that it does not know;
# TensorFlow's XLA, which runs on JAX, too, reads them.
if os.environ.get("KERAS_BACKEND", "jax") != "tensorflow" and (
    _at_least("jax", 0, 7) and _at_least("tensorflow", 2, 20)
):
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"

# Before Keras is imported. The environment wins: CUDA_VISIBLE_DEVICES=0 and
# KERAS_TORCH_DEVICE=cuda run the suite on a GPU.
for name, value in {
    "KERAS_BACKEND": "jax",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    "KERAS_TORCH_DEVICE": "cpu",
    "MPLBACKEND": "Agg",
    # PyTorch's idle threads would spin, and stand still beside other work.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "XLA_FLAGS": XLA_FLAGS,
}.items():
    os.environ.setdefault(name, value)

import functools  # noqa: E402

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

# A comparison of NaN with NaN proves nothing, unless a test says that it wants it.
np.testing.assert_allclose = functools.partial(
    np.testing.assert_allclose, equal_nan=False
)

# Optimizing a graph takes a fifth of the time of a small model's tracing and steps. The
# tests that start programs run them as users do, with it.
if keras.backend.backend() == "tensorflow":
    import tensorflow

    tensorflow.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )

# A user's keras.json may say otherwise.
keras.config.set_floatx("float32")
keras.config.set_image_data_format("channels_last")


def pytest_addoption(parser):
    parser.addoption(
        "--skip-backend-free",
        action="store_true",
        help="deselect what another backend's run has: the tests marked backend_free, "
        "and the cases that are not dealt to this backend",
    )
    parser.addoption(
        "--whole",
        action="store_true",
        help="deal no cases: all tests but those marked backend_free run everywhere",
    )
    parser.addoption(
        "--part",
        type=_part,
        default=(1, 1),
        metavar="K/N",
        help="run only the K-th of N parts of the suite, into which files are dealt",
    )


def _part(text):
    number, count = (int(word) for word in text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"Expected K/N with 1 <= K <= N; received: {text}")
    return number, count


def pytest_ignore_collect(collection_path, config):
    """Leaves the files alone that another run has as a whole: imports take seconds."""
    if (
        config.getoption("--skip-backend-free")
        and collection_path.match("test_*.py")
        and _ONCE.search(collection_path.read_text(encoding="utf-8"))
    ):
        config.stash[_FILES_LEFT_OUT] = True
        return True
    # Others may say no.
    return None


# Last, so that -k and -m have deselected what they do.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    chosen = items[:]
    if config.getoption("--skip-backend-free"):
        chosen = [x for x in items if not x.get_closest_marker("backend_free")]
        if not config.getoption("--whole"):
            chosen = _dealt(chosen, keras.backend.backend())
    number, count = config.getoption("--part")
    files = list(dict.fromkeys(item.path for item in chosen))
    mine = set(files[number - 1 :: count])
    kept = [item for item in chosen if item.path in mine]
    elsewhere = set(items) - set(kept)
    config.hook.pytest_deselected(items=[x for x in items if x in elsewhere])
    left_out = config.stash.get(_FILES_LEFT_OUT, False)
    config.stash[_NOTHING_LEFT] = (bool(elsewhere) or left_out) and not kept
    items[:] = kept


def pytest_collection_finish(session):
    _collect_garbage()
    # Seldom, for each file ends with a full collection.
    gc.set_threshold(20_000, 20, 1_000)
    gc.enable()


def _collect_garbage():
    """Frees what no name reaches, and sets aside what is left for good."""
    gc.collect()
    gc.freeze()


def _dealt(items, backend):
    """Deals cases to JAX and TensorFlow, one to each where a test has two or more.

    One of the runs has all tests (see `tools/run_tests.py`), so that each test runs on
    two backends at least. Each case of up to three runs on one further backend, of more
    every second one, and of a dozen every fourth. Tests marked `every_backend` have
    each case of up to seven on JAX and TensorFlow, and else one half on each. A test
    that a backend skips runs everywhere, for another has to run it; one marked
    `dealt_to` runs on the backend that the mark names. Digests of names decide about
    all others, so that a new test leaves them where they are.
    """
    cases = defaultdict(list)
    for item in items:
        cases[item.path, item.originalname].append(item)
    elsewhere = set()
    for test in cases.values():
        chosen = test[0].get_closest_marker("dealt_to")
        if chosen:
            elsewhere.update(test if backend not in chosen.args else ())
            continue
        turns = _turns(test[0], len(test))
        mine = (_digest(test[0].nodeid.partition("[")[0]) + (backend == "jax")) % 2
        # Cases next to each other have arguments in common: a digest mixes them.
        for turn, case in enumerate(sorted(test, key=lambda x: _digest(x.nodeid))):
            if turns and turn % turns != mine:
                elsewhere.add(case)
    return [item for item in items if item not in elsewhere]


def _turns(item, cases):
    """JAX and TensorFlow each run one case of so many of a test; 0 for all cases."""
    if item.get_closest_marker("skipif"):
        return 0
    if item.get_closest_marker("every_backend"):
        return 0 if cases < 8 else 2
    return 2 if cases < 4 else 4 if cases < 12 else 8


def _digest(name):
    return zlib.crc32(name.encode())


_FILES_LEFT_OUT = pytest.StashKey[bool]()
_NOTHING_LEFT = pytest.StashKey[bool]()
# The mark of a file whose tests run once.
_ONCE = re.compile(r"^pytestmark = .*\bbackend_free\b", re.MULTILINE)


def pytest_sessionfinish(session, exitstatus):
    # `-k lint` picks tests that another backend or part runs: no failure.
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.stash.get(
        _NOTHING_LEFT, False
    ):
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(autouse=True)
def same_start():
    """Every test starts with the same seed and the float32 policy."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32")


@pytest.fixture(autouse=True, scope="session")
def optimizers_before_training():
    """On TensorFlow, makes an optimizer's variables before training is traced.

    Where tracing makes them, it takes twice as long. Only the suite does it: the
    test of `keras-moe train` trains as users do.
    """
    if keras.backend.backend() != "tensorflow":
        yield None
        return
    make = keras.Model.make_train_function

    def make_train_function(self, force=False):
        if self.built and self.trainable_variables and not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)
        return make(self, force)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.Model, "make_train_function", make_train_function)
        yield make


@pytest.fixture(scope="module")
def op_by_op():
    """On TensorFlow, traces nothing: for files about what weights and configs become.

    Tracing a small model takes ten times as long as running it. That models work when
    they are traced is for `test_vit.py` and others to show.
    """
    with _functions_run_eagerly(True):
        yield


@pytest.fixture
def traced(op_by_op):
    """Traces after all: what takes many steps, and numbers of a reference."""
    with _functions_run_eagerly(False):
        yield


@contextlib.contextmanager
def _functions_run_eagerly(eagerly):
    if keras.backend.backend() != "tensorflow":
        yield
        return
    import tensorflow as tf

    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(eagerly)
    yield
    tf.config.run_functions_eagerly(before)


@pytest.fixture(autouse=True, scope="module")
def own_names():
    """Forgets the families, presets and routers that a file's tests have registered.

    Other files list what is known, and find the same in whatever order they run.
    """
    from keras_moe.models import registry
    from keras_moe.routers import ROUTERS

    with contextlib.ExitStack() as stack:
        for names in (registry._BACKBONES, registry._TASKS, registry._PRESETS, ROUTERS):
            stack.enter_context(mock.patch.dict(names))
        yield


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Frees JAX's compiled programs, and all garbage, after each file.

    Each program holds mapped memory, of which a process may have so many pieces only:
    past some thousand programs the compiler aborts.
    """
    yield
    if os.environ.get("KERAS_BACKEND") == "jax":
        import jax

        jax.clear_caches()
    _collect_garbage()
