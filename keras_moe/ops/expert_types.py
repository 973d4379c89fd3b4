"""The types of experts of MoE++ and their order: feed-forward, zero, copy, constant."""

from typing import NamedTuple

from keras_moe._checks import check_integer

# In the order of a router's logits.
EXPERT_TYPES = ("ffn", "zero", "copy", "constant")


class ExpertTypes(NamedTuple):
    """The number of experts of each type in an MoE layer.

    Attributes:
        ffn: number of feed-forward experts, which have weights and capacity slots.
        zero: number of experts that give 0.
        copy: number of experts that give the token back.
        constant: number of experts that mix the token and a trained vector.

    Reference: *MoE++*, section 3.1; the last three are its zero-computation experts.

    Example:

    >>> from keras_moe.ops import ExpertTypes
    >>> expert_types = ExpertTypes(ffn=8, zero=1, copy=1, constant=2)
    >>> expert_types.total, expert_types.zero_computation
    (12, 4)
    >>> expert_types.slices()["constant"]
    slice(10, 12, None)
    """

    ffn: int
    zero: int = 0
    copy: int = 0
    constant: int = 0

    @property
    def zero_computation(self) -> int:
        """N_ZC, the experts that act in place."""
        return self.zero + self.copy + self.constant

    @property
    def total(self) -> int:
        """N, all experts."""
        return self.ffn + self.zero_computation

    def slices(self) -> dict[str, slice]:
        """The positions of each type's experts on a router's expert axis."""
        slices, start = {}, 0
        for name, count in zip(EXPERT_TYPES, self):
            slices[name] = slice(start, start + count)
            start += count
        return slices

    def arguments(self) -> dict[str, int]:
        """Counts of zero-computation experts by argument name, as `zero_experts`."""
        counts = zip(EXPERT_TYPES[1:], self[1:])
        return {f"{name}_experts": count for name, count in counts}

    def __str__(self):
        if not self.zero_computation:
            return str(self.ffn)
        return f"{self.ffn}+{self.zero_computation}"


def expert_types(
    num_ffn_experts: int,
    zero_experts: int = 0,
    copy_experts: int = 0,
    constant_experts: int | str = 0,
) -> ExpertTypes:
    """`ExpertTypes` of checked counts.

    Args:
        num_ffn_experts: N_FFN, at least 1.
        zero_experts: n_zero, at least 0.
        copy_experts: n_copy, at least 0.
        constant_experts: n_const, at least 0, or `"auto"`: max(N_FFN // 4 - n_zero -
            n_copy, 1), equation 10 of *MoE++* (1 for 8 FFN experts, 2 in its Table 2).

    Example:

    >>> from keras_moe.ops import expert_types
    >>> expert_types(32, zero_experts=1, copy_experts=1, constant_experts="auto")
    ExpertTypes(ffn=32, zero=1, copy=1, constant=6)
    """
    ffn = check_integer("num_experts", num_ffn_experts)
    zero = check_integer("zero_experts", zero_experts, minimum=0)
    copy = check_integer("copy_experts", copy_experts, minimum=0)
    if constant_experts == "auto":
        constant_experts = max(ffn // 4 - zero - copy, 1)
    constant = check_integer("constant_experts", constant_experts, minimum=0)
    return ExpertTypes(ffn, zero, copy, constant)
