"""The error of what does not fit, for programs that must not wait for Keras."""


def unfit(expected: str, /, *texts: object, **received: object) -> ValueError:
    """Returns the error that names what was expected and what was received."""
    values = [*map(str, texts), *(f"{name}={x!r}" for name, x in received.items())]
    return ValueError(f"Expected {expected}; received: {', '.join(values)}")
