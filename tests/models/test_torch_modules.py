"""Our models as PyTorch modules: parameters, optimizers of torch, two processes."""

import sys
from datetime import timedelta
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops

from keras_moe.models import ViTImageClassifier
from tests.compare import assert_close
from tests.forks import run_forked, run_script
from tests.small_models import SMALL, images, vit, with_weights

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="modules exist on PyTorch alone"
)

IMAGES = images(4, *SMALL["image_shape"])
LABELS = np.array([0, 1, 2, 0])


def classifier():
    # The bias moves by the load of all processes.
    backbone = vit(noise_std=0.0, examples_per_group=1, selection_bias_rate=0.01)
    model = with_weights(ViTImageClassifier(backbone, 3))
    model.compile(keras.optimizers.SGD(0.1))
    return model


def values(model):
    return [np.array(ops.convert_to_numpy(w)) for w in model.weights]


def close(actual, expected, tolerance=1e-6):
    assert_close(actual, expected, 0.0001, tolerance)


@pytest.mark.parametrize("part", ["task", "backbone"])
def test_parameters_are_the_variables(part):
    model = classifier()
    model = model if part == "task" else model.backbone
    named = dict(model.named_parameters())
    assert [id(p) for p in named.values()] == [id(p) for p in model.parameters()]
    assert {id(p) for p in named.values()} == {id(v.value) for v in model.variables}
    trained = {id(p) for p in named.values() if p.requires_grad}
    assert trained == {id(v.value) for v in model.trainable_variables}
    assert "_torch_params.block_1/moe/router/kernel" in named
    assert set(model.state_dict()) == set(named)
    assert "_torch_params.seed_generator_0/seed_generator_state" in named


def test_moving_keeps_the_variables():
    model = classifier()
    before = values(model)
    model.to("cpu", torch.float64)
    assert model.weights[0].value.dtype == torch.float64
    model.to(torch.float32)
    close(values(model), before)
    assert {id(p) for p in model.parameters()} == {id(v.value) for v in model.variables}


def test_adapters_and_quantised_weights_become_parameters():
    model = classifier()
    model.fit(IMAGES, LABELS, verbose=0)
    model.backbone.enable_lora(2)
    names = [name for name, _ in model.named_parameters() if "lora" in name]
    assert len(names) == 2 * 2 * SMALL["num_layers"]
    assert {id(p) for p in model.parameters()} == {id(v.value) for v in model.variables}
    # Gradients are cleared between steps, those of the adapters as well.
    model.compile(keras.optimizers.SGD(0.1))
    model.fit(IMAGES, LABELS, verbose=0)
    model.zero_grad()
    assert all(v.value.grad is None for v in model.trainable_variables)
    quantised = classifier()
    quantised.backbone.quantize("int8")
    parameters = list(quantised.parameters())
    assert {id(p) for p in parameters} == {id(v.value) for v in quantised.variables}
    assert any(p.dtype == torch.int8 for p in parameters)


def test_saving_and_loading(tmp_path):
    model = classifier()
    list(model.parameters())
    model.save_to_preset(tmp_path / "preset")
    model.save_weights(tmp_path / "mine.weights.h5")
    parameters = list(model.parameters())
    before = values(model)
    for weight in model.weights:
        weight.assign(ops.zeros_like(weight))
    other = classifier()
    other.load_state_dict(model.state_dict())
    close(values(other), values(model))
    model.load_weights(tmp_path / "mine.weights.h5")
    close(values(model), before)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    again = ViTImageClassifier.from_preset(str(tmp_path / "preset"))
    close(values(again), before)


def test_a_dense_model_compiles_as_one_graph():
    model = with_weights(vit(moe_layers=None))
    inputs = torch.tensor(images(2, *SMALL["image_shape"]))
    # Without the compiler of C++ code, which takes most of the time and has no part
    # in whether a model can be read as one graph.
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        actual, expected = (
            keras.ops.convert_to_numpy(function(inputs, training=False))
            for function in (compiled, model)
        )
    assert_close(actual, expected, 1e-5, 1e-5)


def step(model, module, optimizer, x, y):
    optimizer.zero_grad()
    logits = module(x, training=True)
    loss = torch.nn.functional.cross_entropy(logits, y) + sum(model.losses)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_a_loop_of_torch_makes_the_steps_of_keras():
    model, by_keras = classifier(), classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.from_numpy(IMAGES), torch.from_numpy(LABELS)
    losses = [step(model, model, optimizer, x, y) for _ in range(2)]
    for _ in losses:
        by_keras.train_on_batch(IMAGES, LABELS)
    close(values(model), values(by_keras), 1e-5)
    losses += [step(model, model, optimizer, x, y) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_two_processes_make_the_step_of_one(tmp_path, monkeypatch):
    environment = {
        "KERAS_BACKEND": "torch", "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run_script(Path(__file__), tmp_path)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.from_numpy(IMAGES), torch.from_numpy(LABELS)
    for _ in range(2):
        step(model, model, optimizer, x, y)
    expected = values(model)
    for rank in range(2):
        with np.load(tmp_path / f"{rank}.npz") as file:
            close([file[f"arr_{i}"] for i in range(len(expected))], expected, 1e-5)


def train_as_one_of_two(rank):
    """Two steps on this process's half of the images, by DistributedDataParallel."""
    import torch.distributed

    folder = Path(sys.argv[1])
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        # An answer that does not come is an error that names what waits for it.
        timeout=timedelta(minutes=2),
    )
    model = classifier()
    module = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = torch.from_numpy(IMAGES[rank::2]), torch.from_numpy(LABELS[rank::2])
    for _ in range(2):
        step(model, module, optimizer, x, y)
    np.savez(folder / f"{rank}.npz", *values(model))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    # Keras imports it to look for its kinds of shapes: two seconds for nothing.
    sys.modules["tensorflow"] = None
    # Imported once for both.
    run_forked(train_as_one_of_two, 2)
