"""One backend, on the CPU, quiet and repeatable, whatever the machine."""

import gc
import os

# Before Keras is imported. What is set outside wins: CUDA_VISIBLE_DEVICES=0 and
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
    # On JAX a small test is mostly compilation, and this takes a quarter off it.
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}.items():
    os.environ.setdefault(name, value)

import keras  # noqa: E402
import pytest  # noqa: E402

# A user's keras.json may say otherwise.
keras.config.set_floatx("float32")
keras.config.set_image_data_format("channels_last")


def pytest_addoption(parser):
    parser.addoption(
        "--skip-backend-free",
        action="store_true",
        help="deselect the tests marked backend_free: another backend's run has them",
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


# Last, so that -k and -m have deselected what they do.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    chosen = items[:]
    if config.getoption("--skip-backend-free"):
        chosen = [x for x in items if not x.get_closest_marker("backend_free")]
    number, count = config.getoption("--part")
    files = list(dict.fromkeys(item.path for item in chosen))
    mine = set(files[number - 1 :: count])
    kept = [item for item in chosen if item.path in mine]
    elsewhere = set(items) - set(kept)
    config.hook.pytest_deselected(items=[x for x in items if x in elsewhere])
    config.stash[_NOTHING_LEFT] = bool(elsewhere) and not kept
    items[:] = kept


_NOTHING_LEFT = pytest.StashKey[bool]()


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


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Frees JAX's compiled programs after each file.

    Each holds mapped memory, of which a process may have so many pieces only: past
    some thousand programs the compiler aborts.
    """
    yield
    if os.environ.get("KERAS_BACKEND") == "jax":
        import jax

        jax.clear_caches()
        gc.collect()
