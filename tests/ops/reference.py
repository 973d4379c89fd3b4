"""Token choice and expert choice written the slow and obvious way."""

import numpy as np


def token_choice(
    affinity, gates, num_selected_experts, capacity, priority="first_come", mask=None
):
    """Returns slot_tokens, token_slots and combine_weights, like `RoutingPlan`.

    The priority may be numbers (G, S), of which the smallest goes first.
    """
    groups, tokens, experts = affinity.shape
    mask = np.ones((groups, tokens), bool) if mask is None else mask
    slot_tokens = np.full((groups, experts, capacity), -1, "int32")
    token_slots = np.full((groups, tokens, num_selected_experts), -1, "int32")
    weights = np.zeros((groups, tokens, num_selected_experts), "float32")
    for g in range(groups):
        chosen = {
            s: sorted(range(experts), key=lambda e, row=affinity[g, s]: (-row[e], e))[
                :num_selected_experts
            ]
            for s in range(tokens)
        }
        queue = [s for s in range(tokens) if mask[g, s]]
        if not isinstance(priority, str):
            queue.sort(key=lambda s: priority[g, s])
        elif priority == "max_gate":
            queue.sort(key=lambda s: -affinity[g, s].max())
        elif priority == "sum_gates":
            queue.sort(key=lambda s: -affinity[g, s, chosen[s]].sum())
        load = [0] * experts
        for k in range(num_selected_experts):
            for s in queue:
                e = chosen[s][k]
                if load[e] < capacity:
                    slot_tokens[g, e, load[e]] = s
                    token_slots[g, s, k] = e * capacity + load[e]
                    weights[g, s, k] = gates[g, s, e]
                load[e] += 1
    return slot_tokens, token_slots, weights


def expert_choice(affinity, gates, capacity, mask=None):
    """Returns slot_tokens, token_slots and slot_weights, like `SlotPlan`."""
    groups, tokens, experts = affinity.shape
    mask = np.ones((groups, tokens), bool) if mask is None else mask
    slot_tokens = np.full((groups, experts, capacity), -1, "int32")
    token_slots = np.full((groups, tokens, experts), -1, "int32")
    weights = np.zeros((groups, experts, capacity), "float32")
    for g in range(groups):
        for e in range(experts):
            queue = [s for s in range(tokens) if mask[g, s]]
            queue.sort(key=lambda s, g=g, e=e: -affinity[g, s, e])
            for c, s in enumerate(queue[:capacity]):
                slot_tokens[g, e, c] = s
                token_slots[g, s, e] = e * capacity + c
                weights[g, e, c] = gates[g, s, e]
    return slot_tokens, token_slots, weights
