"""Exclusion of experts from the choice of a trained model's routers."""

import contextlib
from collections.abc import Iterator
from typing import Any

from keras_moe.checks import check_integer
from keras_moe.ops.expert_types import EXPERT_TYPES, ExpertTypes


def exclude_experts(model: Any, experts: Any) -> Any:
    """A new model whose routers never choose some of their experts.

    The tokens of an excluded expert go to the best of the others, whose gates are a
    softmax without it. *MoE++* removes its zero experts in this way in Table C and
    loses accuracy, which zeroing a zero expert's output could not cause. The logits
    that gating residuals pass on to the next layer are unchanged, and so are those
    that auxiliary losses read: unless the router is retrained, train such a model with
    `auxiliary_losses=None`.

    Args:
        model: backbone or classifier with token choice routers; it is not changed.
        experts: experts to exclude from every MoE block, beside those that already
            are: an expert's number, a kind of experts (`"ffn"`, `"zero"`, `"copy"`,
            `"constant"`), or a sequence of these.

    Returns:
        A model of the same class, which saves and loads as any other.

    Raises:
        ValueError: if there is no such expert, fewer than K experts are left, or the
            model has no token choice routers.

    Reference:
        *MoE++*, appendix A.4 and Table C.

    Example:

    >>> import keras, numpy as np
    >>> from keras_moe import analysis, models
    >>> model = models.from_preset("moepp_digits", task="backbone")
    >>> without = analysis.exclude_experts(model, ["zero", "copy"])
    >>> routing = keras.Model(without.input, without.routing["block_0"])
    >>> images = np.zeros((1, 16, 16, 1), "float32")
    >>> served = routing.predict(images, verbose=0).dispatched
    >>> float(served[..., 8:10].sum())
    0.0
    """
    expert_types = getattr(getattr(model, "backbone", model), "expert_types", None)
    if expert_types is None:
        raise ValueError(
            f"Expected a model with MoE blocks; received: {type(model).__name__} "
            "without"
        )
    options = getattr(model, "backbone", model).moe.router_options or {}
    before = options.get("excluded_experts", ())
    excluded = {*before, *numbers_of(experts, expert_types)}
    return model.with_router_options(excluded_experts=sorted(excluded))


def numbers_of(experts: Any, expert_types: ExpertTypes) -> tuple[int, ...]:
    """The numbers of experts that are named by number or kind."""
    if isinstance(experts, str):
        if experts not in EXPERT_TYPES or not getattr(expert_types, experts):
            own = [kind for kind in EXPERT_TYPES if getattr(expert_types, kind)]
            raise ValueError(
                f"Expected types of experts among {own}; received: experts={experts!r}"
            )
        return tuple(range(expert_types.total)[expert_types.slices()[experts]])
    if isinstance(experts, (list, tuple)):
        numbers = [
            number for each in experts for number in numbers_of(each, expert_types)
        ]
        if not numbers or len(set(numbers)) < len(numbers):
            raise ValueError(
                f"Expected different experts, at least one; received: {experts!r}"
            )
        return tuple(numbers)
    number = check_integer("experts", experts, 0)
    if number >= expert_types.total:
        raise ValueError(
            f"Expected different experts below {expert_types.total}; "
            f"received: experts={experts}"
        )
    return (number,)


@contextlib.contextmanager
def excluded(routers: list, experts: tuple[int, ...]) -> Iterator[None]:
    """Keeps routers from choosing some experts within the context.

    Functions that were compiled before the context still choose them.
    """
    with contextlib.ExitStack() as stack:
        for router in routers:
            if not hasattr(router, "excluding"):
                raise ValueError(
                    "Expected token choice routers, whose tokens may choose others; "
                    f"received: {type(router).__name__}"
                )
            stack.enter_context(router.excluding(experts))
        yield
