"""The states of PyTorch's own generators, from which dropout without a seed draws."""

import torch


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
