"""Texts of errors, for programs that must not wait for Keras."""


def install(extra: str) -> str:
    """How to install what an extra needs; no package index has keras_moe yet."""
    return f'pip install ".[{extra}]" in a clone of keras_moe'


def unfit(expected: str, /, *texts: object, **received: object) -> ValueError:
    """Returns the error that names what was expected and what was received."""
    values = [*map(str, texts), *(f"{name}={x!r}" for name, x in received.items())]
    return ValueError(f"Expected {expected}; received: {', '.join(values)}")
