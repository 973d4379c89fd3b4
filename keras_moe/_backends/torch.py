"""PyTorch: modules' hooks, indexing that can be transformed, its own generators."""

from typing import Any

import torch
from keras import tree
from torch.nn.modules import module as modules  # noqa: F401

# Indexing where Keras's forms are in the way of a transformation: `torch.export` fixes
# the number of groups (`take_along_dim` compares the shapes, and `searchsorted` asks
# whether the size fits into an int32), and `torch.func.vmap` cannot write in place.
# They can go when Keras's can be transformed.


def take_along_axis(x, indices, axis):
    """See `keras_moe.ops._primitives.take_along_axis`."""
    shape = list(x.shape)
    shape[axis] = indices.shape[axis]
    return torch.gather(x, axis, indices.long().expand(shape))


def scatter(x, places, values):
    """See `keras_moe.ops._primitives.scatter`."""
    return x.scatter(0, places.long(), values)


def searchsorted(edges, values):
    """See `keras_moe.ops._primitives.searchsorted`."""
    return torch.searchsorted(edges, values, out_int32=True)


# The states of PyTorch's own generators, from which dropout without a seed draws.


def generator_states() -> list[str]:
    """Returns the state of the CPU's generator, then of each GPU's in use, as text."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return [state.numpy().tobytes().hex() for state in states]


def set_generator_states(states: list[str]) -> None:
    """Sets the states, those of GPUs as far as there are as many here."""
    cpu, *gpus = (
        torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
        for state in states
    )
    torch.set_rng_state(cpu)
    for number, state in zip(range(torch.cuda.device_count()), gpus):
        torch.cuda.set_rng_state(state, number)


def replica_sum(x):
    """See `keras_moe.ops._primitives.replica_sum`; for DistributedDataParallel."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return x
    total = x.clone()
    torch.distributed.all_reduce(total)
    return total


def any_batch(inputs: Any) -> Any:
    """The `dynamic_shapes` of a program for any number of a model's inputs."""
    batch = torch.export.Dim("batch")
    return tree.map_structure(lambda _: {0: batch}, inputs)
