"""What a platform computes in its own way is traced for that platform alone."""

import keras
import numpy as np
import pytest

from keras_moe.ops.grouped import grouped_mlp
from tests.compare import assert_close
from tests.forks import ROOT, run_python
from tests.ops.programs import normal

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="kernels of JAX"),
]
KERNELS = ROOT / "keras_moe" / "ops" / "kernels"


def test_a_cpu_traces_no_kernel_of_another_platform():
    done = run_python("-m", "tests.ops.other_platforms")
    assert done.returncode == 0, done.stderr[-3000:]
    sources = {path.name: path.read_text("utf-8") for path in KERNELS.glob("*_jax.py")}
    choosing = [name for name, text in sources.items() if "by_platform" in text]
    assert done.stdout.split() == sorted(choosing)
    assert not any("platform_dep" in text for text in sources.values())


def experts(rows, sizes, hidden, output):
    return grouped_mlp(rows, sizes, hidden, output, activation=keras.activations.relu)


SIZES = np.array([5, 6], "int32")
INPUTS = normal(0, 12, 8), SIZES, normal(1, 2, 8, 4), normal(2, 2, 4, 8)


def test_other_platforms_have_theirs_when_they_are_asked_for():
    import jax

    from keras_moe._backends.jax import traced_for
    from keras_moe.ops.kernels import _grouped_jax

    def traced():
        program = str(jax.make_jaxpr(jax.grad(lambda *x: experts(*x).sum()))(*INPUTS))
        assert "while" in program
        return {form for form in ("pallas_call", "ragged_dot") if form in program}

    # Old versions of JAX have no masked loads in Pallas.
    of_gpus = "pallas_call" if "float32" in _grouped_jax.pallas()[0] else "ragged_dot"
    assert traced() == set()
    with traced_for("tpu"):
        assert traced() == {"ragged_dot"}
    with traced_for("cuda"):
        assert traced() == {of_gpus}
    with traced_for("cuda", "tpu"):
        assert traced() == {of_gpus, "ragged_dot"}
    assert traced() == set()


@pytest.mark.parametrize("asked", [(), ("tpu",)])
def test_one_program_for_several_platforms(asked):
    import jax

    from keras_moe._backends.jax import traced_for

    with traced_for(*asked):
        exported = jax.export.export(jax.jit(experts), platforms=("cpu", "cuda", "tpu"))
        exported = exported(*INPUTS)
    assert exported.platforms == ("cpu", "cuda", "tpu")
    rows, (first, second), hidden, output = INPUTS
    bounds = np.cumsum([0, first, second])
    expected = np.zeros_like(rows)
    for expert, own in enumerate(map(slice, bounds, bounds[1:])):
        expected[own] = np.maximum(rows[own] @ hidden[expert], 0) @ output[expert]
    assert_close(exported.call(*INPUTS), expected, 1e-4, 1e-5)
