"""Routing of single examples, packed for the page's script.

Axes: N tokens, E experts, K entries that are kept of each token.
"""

import base64
from typing import Any, NamedTuple

import numpy as np

# An entry is an unsigned integer: the expert above, then one bit that says whether the
# expert serves the token, then the value as a part of the largest.
VALUE_BITS = 15
_LARGEST = 2**VALUE_BITS - 1


class TokenRouting(NamedTuple):
    """The experts of one example's tokens in one layer.

    Attributes:
        values: (N, E), gates; of soft routers, a token's share of an expert's slots,
            which sum to 1 over tokens; of muMoE, coefficients.
        served: boolean (N, E), whether the expert has a part in the token's output.
        weights: (N, E), weights of the experts in the token's output.
    """

    values: np.ndarray
    served: np.ndarray
    weights: np.ndarray

    def heaviest(self) -> np.ndarray:
        """(N,), the expert of largest weight, or -1 of a token that none serves."""
        best = np.where(self.served, self.weights, -np.inf).argmax(axis=-1)
        return np.where(self.served.any(axis=-1), best, -1)


def token_routing(record: Any, kind: str, index: int) -> TokenRouting:
    """The routing of one example."""
    gates, dispatched, combined = (
        np.array(x[index], "float32")
        for x in (record.gates, record.dispatched, record.combined)
    )
    if kind == "soft":
        slots = np.maximum(dispatched.sum(axis=0, keepdims=True), 1e-9)
        return TokenRouting(dispatched / slots, np.ones(gates.shape, bool), combined)
    served = gates > 0 if kind == "mumoe" else dispatched > 0
    return TokenRouting(gates, served, gates if kind == "mumoe" else combined)


def pack(routing: TokenRouting, kept: int) -> dict:
    """The routing as JSON: entries by token, the heaviest first."""
    values, kept = np.nan_to_num(routing.values), min(kept, routing.values.shape[-1])
    largest = float(max(values.max(initial=0.0), 1e-9))
    # Those that serve by weight, then the others by value.
    rank = np.where(routing.served, routing.weights, values)
    order = np.lexsort((-rank, ~routing.served), axis=-1)[:, :kept]
    parts = np.clip(np.take_along_axis(values, order, axis=-1) / largest, 0, 1)
    served = np.take_along_axis(routing.served, order, axis=-1)
    entries = np.rint(parts * _LARGEST).astype("<u4")
    entries |= served.astype("<u4") << np.uint32(VALUE_BITS)
    entries |= order.astype("<u4") << np.uint32(VALUE_BITS + 1)
    text = base64.b64encode(entries.astype("<u4").tobytes()).decode("ascii")
    return {"entries": text, "largest": round(largest, 6)}


def unpack(packed: dict, kept: int) -> list[list[tuple[int, bool, float]]]:
    """The entries of `pack` by token: expert, whether it serves, value."""
    entries = np.frombuffer(base64.b64decode(packed["entries"]), "<u4")
    return [
        [
            (
                int(entry >> (VALUE_BITS + 1)),
                bool(entry >> VALUE_BITS & 1),
                round(int(entry & _LARGEST) / _LARGEST * packed["largest"], 6),
            )
            for entry in row.tolist()
        ]
        for row in entries.reshape(-1, kept)
    ]
