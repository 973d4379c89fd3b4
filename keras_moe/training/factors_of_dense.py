"""A dense layer's matrix as the factors of muMoE experts that all do what it does.

Axes: N_l experts of a level, I inputs, O units, R ranks.
"""

import numpy as np

from keras_moe.layers import MultilinearExperts


def factors_of_dense(
    kernel: np.ndarray,
    bias: np.ndarray,
    experts: MultilinearExperts,
    noise: float = 0.0,
    generator: np.random.Generator | None = None,
) -> list[np.ndarray]:
    """Factors with which each expert is the dense layer's best approximation.

    The matrix with its bias as the last row has a truncated singular value
    decomposition of as many components as the ranks hold. Coefficients that sum to 1
    then give the dense layer, to rounding where all its components fit.
    """
    generator = np.random.default_rng(0) if generator is None else generator
    if not experts.use_bias:
        raise ValueError(
            "Expected experts with a bias, as the dense layer has; "
            "received: use_bias=False"
        )
    matrix = np.concatenate([kernel, bias[None]]).astype("float64")
    shapes = [tuple(factor.shape) for factor in experts.factors]
    levels = len(experts.num_experts)
    kind = experts.factorization
    if matrix.shape != (experts._inputs + 1, experts.units):
        raise ValueError(
            f"Expected a kernel {(experts._inputs, experts.units)}; "
            f"received: shape={kernel.shape}"
        )
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    root = np.sqrt(values)
    of_input, of_output = left * root, right.T * root

    def component(index):
        """(I + 1,) and (O,). Beyond the matrix's they add nothing, but may learn."""
        if index < len(values):
            return of_input[:, index], of_output[:, index]
        scale = root[0] / np.sqrt(len(left))
        return generator.normal(scale=scale, size=len(left)), 0.0

    factors = [np.zeros(shape) for shape in shapes]
    if kind is None:
        factors[0][...] = matrix
    elif kind == "cp":
        for factor in factors[:levels]:
            factor[...] = 1.0
        for rank in range(shapes[-1][1]):
            factors[-2][:, rank], factors[-1][:, rank] = component(rank)
    elif kind == "tr":
        # The experts' chain is an identity of the narrowest rank.
        width = min(min(shape[0], shape[2]) for shape in shapes[:levels])
        for factor in factors[:levels]:
            for place in range(min(factor.shape[0], factor.shape[2])):
                factor[place, :, place] = 1.0
        for index in range(width * shapes[-1][0]):
            column, row = divmod(index, width)
            first, second = component(index)
            factors[-2][row, :, column], factors[-1][column, :, row] = first, second
    else:
        for factor in factors[:levels]:
            factor[:, 0] = 1.0
        core, first = factors[-1], (0,) * levels
        for rank in range(min(shapes[levels][1], shapes[levels + 1][1])):
            factors[levels][:, rank], factors[levels + 1][:, rank] = component(rank)
            core[(*first, rank, rank)] = 1.0
    if noise:
        # Noise goes to expert factors that are not zero, or to each matrix of a tensor.
        draw = generator.normal(scale=noise, size=factors[0].shape)
        factors[0] = factors[0] * (1.0 + draw)
    return [factor.astype("float32") for factor in factors]
