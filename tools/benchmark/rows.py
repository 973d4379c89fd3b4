"""The rows of the table: every claim about speed, with its limit, peers and goal.

A ratio is the time of ours over that of a candidate: the limit, which does the same
work with nothing around it, or a peer, another library's form of the work. Where a
claim is about throughput its goal is the inverse.
"""

from row import Row

ROUTERS = {
    "sinkhorn-token": "sinkhorn_token_choice",
    "sparse-token": "sparsity_constrained_token_choice",
    "softmax-expert": "softmax_expert_choice",
    "sinkhorn-expert": "sinkhorn_expert_choice",
    "sparse-expert": "sparsity_constrained_expert_choice",
    "soft": "soft",
}

ROWS = (
    *(
        Row(
            name=f"moe-layer-k{selected}",
            work="V-MoE's layer forward and backward, 3,152 tokens, D=384, 8 experts, "
            f"K={selected}",
            source="moe_layer:layers",
            arguments={
                "names": ["softmax_token_choice"],
                "also": [],
                "num_tokens": 3152,
                "num_experts": 8,
                "selected": selected,
            },
            subject="softmax_token_choice",
            goals={"experts": {"torch": 1.1} if selected == 2 else None},
        )
        for selected in (1, 2)
    ),
    Row(
        name="soft-layer",
        work="Soft MoE's layer forward and backward, 16 x 49 tokens, D=384, 32 experts",
        source="soft_layer:layers",
        arguments={"images": 16, "num_tokens": 49, "num_experts": 32},
        subject="Soft MoE",
        goals={"einsums": None},
    ),
    *(
        Row(
            name=f"router-{name}",
            work=f"{router} alone, forward and backward, 3,136 tokens, 32 experts",
            source="router:routers_alone",
            arguments={"names": [router]},
            subject=router,
            goals={"softmax_token_choice": None},
        )
        for name, router in ROUTERS.items()
    ),
)
