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

LAYER = {"num_tokens": 3152, "dim": 384, "mlp_dim": 1536, "num_experts": 8}

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
    *(
        Row(
            name=f"dropless-{mode}",
            work=f"A layer without a capacity in {mode}, 3,152 tokens, D=384, "
            "8 experts, K=2",
            source="dropless:layers",
            arguments={**LAYER, "training": mode == "training"},
            subject="dropless",
            goals={"capacity": 1.05, "experts": None},
        )
        for mode in ("inference", "training")
    ),
    *(
        Row(
            name=f"moe++-{mode}",
            work=f"MoE++'s layer in {mode}, tau 0.75, 3,152 tokens, D=384, 8 FFN "
            "experts and 4 others, K=2",
            source="dropless:moe_plus_plus",
            arguments={**LAYER, "training": mode == "training"},
            subject="MoE++",
            goals={"vanilla": 0.7},
        )
        for mode in ("inference", "training")
    ),
    *(
        Row(
            name=f"one-image-k{selected}",
            work=f"V-MoE-S/32 (8 experts, K={selected}) on one image",
            source="dropless:vision_transformers",
            arguments={"selected": selected},
            subject="V-MoE",
            goals={"dense": 1.2},
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
    Row(
        name="fit-digits",
        work="128 steps of `fit` on vmoe_digits, batch 16",
        source="fit_overhead:fit_and_hand",
        arguments={"case": "vmoe_digits"},
        subject="fit",
        goals={"hand-written step": 1.05},
    ),
    *(
        Row(
            name="step-" + part.replace("_", "-"),
            work=f"A training step of vmoe_digits, batch 64, with {work}",
            source=f"step_parts:{part}",
            arguments={"preset": "vmoe_digits", "batch_size": 64},
            subject=subject,
            goals=goals,
        )
        for part, work, subject, goals in (
            ("selection_bias", "a selection bias", "bias", {"no bias": 1.01}),
            ("muon", "Muon", "Muon", {"AdamW": None}),
        )
    ),
    *(
        Row(
            name=f"mumoe-{kind}-{count}",
            work=f"muMoE's layer ({kind.upper()}, N={count}) forward and backward, "
            "1,568 tokens, D=768",
            source="mumoe_layer:layer_and_dense",
            arguments={"kind": kind, "count": count},
            subject=kind,
            goals={"dense": goal},
        )
        for count, goal in ((128, {"torch": 1.35}), (512, {"jax": 1.15, "torch": 1.6}))
        for kind in ("cp", "tr")
    ),
    *(
        Row(
            name=f"mumoe-{kind}-{count}-kept",
            work="Bytes that the same layer keeps for the gradient, inputs included",
            source="mumoe_layer:layer_and_dense",
            arguments={"kind": kind, "count": count, "kept": True},
            subject=kind,
            goals={"dense": 1.5},
            backends=("jax", "torch"),
            unit="MiB",
        )
        for count in (128, 512)
        for kind in ("cp", "tr")
    ),
    Row(
        name="entmax",
        work="1.5-entmax of 1,568 x 512, forward and backward",
        source="mumoe_layer:entmax_and_softmax",
        arguments={"rows": 1568, "count": 512},
        subject="entmax",
        goals={"softmax": {"jax": 2.5, "torch": 4.5}, "entmax package": None},
        peers={"entmax package": "entmax"},
    ),
    *(
        Row(
            name=f"entmax-{alpha}",
            work=f"{alpha}-entmax of 1,568 x 512, forward and backward",
            source="mumoe_layer:entmax_and_softmax",
            arguments={"rows": 1568, "count": 512, "alpha": alpha},
            subject="entmax",
            goals={"1.5-entmax": None},
        )
        for alpha in (1.25, 1.3)
    ),
    *(
        Row(
            name=f"{name}-{work.split()[-1]}",
            work=f"{title}'s {work}, batch 16, one form of GELU",
            source="zoo_step:candidates",
            arguments={"title": title, "work": work},
            subject="keras_moe",
            goals={"keras_hub": None, "timm": 1.0},
            peers={"timm": "timm"},
            backends=("jax", "torch"),
        )
        for name, title in (("vit-s32", "ViT-S/32"), ("vit-b16", "ViT-B/16, 4 blocks"))
        for work in ("forward", "training step")
    ),
    Row(
        name="siglino-forward",
        work="SigLino's mixture (28 experts of 384, K=6), 4 blocks, 256 patches",
        source="encoder_forward:siglino",
        subject="keras_moe",
        goals={"official form": {"torch": 0.7}},
        backends=("jax", "torch"),
    ),
    Row(
        name="dinov3-s16-forward",
        work="DINOv3-S/16's forward, 8 images",
        source="encoder_forward:dinov3",
        subject="keras_moe",
        goals={"transformers": None, "timm": 1.0},
        peers={"transformers": "transformers", "timm": "timm"},
        backends=("jax", "torch"),
    ),
    Row(
        name="moepp-lm-step",
        work="Training step of two blocks of moepp_lm_0.6b, 4 x 256 tokens",
        source="language_step:steps",
        subject="MoE++",
        goals={"vanilla MoE": 0.77},
        backends=("jax", "torch"),
        rounds=7,
    ),
    Row(
        name="decoding",
        work="56 tokens of one text, four blocks of 8 experts, D=256, K=2",
        source="language_step:decoding",
        subject="keras_moe",
        goals={"keras_hub": None},
        rounds=7,
    ),
    Row(
        name="compiled-decoding",
        work="The same by compile(jit_compile=True)",
        source="language_step:decoding",
        arguments={"compiled": True},
        subject="keras_moe",
        goals={"keras_hub": 0.5},
        backends=("torch",),
        rounds=7,
    ),
    Row(
        name="logits-memory",
        work="Log-likelihoods of 2,048 tokens among 65,536 and gradients, D=768",
        source="language_step:logits_memory",
        subject="in chunks",
        goals={"whole": 0.5},
        backends=("jax",),
        unit="MiB",
    ),
    Row(
        name="import-models",
        work="Importing keras_moe.models in a new process",
        source="start_up:imports",
        arguments={"names": ["keras_moe.models", "keras_hub", "keras"]},
        subject="keras_moe.models",
        goals={"keras_hub": None, "keras": None},
        clock="cpu",
        rounds=3,
    ),
    Row(
        name="from-preset-peak",
        work="Peak memory of loading a vmoe_b32 of 4 blocks and 16 experts",
        source="start_up:peak",
        subject="from_preset",
        goals={"weights": 1.15},
        unit="MiB",
    ),
    Row(
        name="vmoe-s32-step",
        work="V-MoE-S/32's training step, its last two blocks of 8 experts, batch 16",
        source="vmoe_step:steps",
        subject="V-MoE",
        goals={"dense twin": 1.1},
    ),
    *(
        Row(
            name=f"compiled-{name}",
            work=f"{work} by torch.compile",
            source="compiled_step:candidates",
            arguments=arguments,
            subject="compiled",
            goals={"eager": goal},
            backends=("torch",),
        )
        for name, work, arguments, goal in (
            (
                "digits-step",
                "vmoe_digits' training step, batch 64,",
                {"preset": "vmoe_digits", "batch_size": 64},
                0.5,
            ),
            (
                "vmoe-s32-step",
                "V-MoE-S/32's training step, batch 16,",
                {"preset": "vmoe_s32_last2_e8", "batch_size": 16},
                None,
            ),
            (
                "vmoe-s32-forward",
                "V-MoE-S/32's forward, batch 16,",
                {"preset": "vmoe_s32_last2_e8", "batch_size": 16, "work": "forward"},
                None,
            ),
            (
                "one-image",
                "V-MoE-S/32 on one image",
                {"preset": "vmoe_s32_last2_e8", "batch_size": 1, "work": "forward"},
                None,
            ),
        )
    ),
    *(
        Row(
            name=f"compiled-vit-s32-{work.split()[-1]}",
            work=f"ViT-S/32's {work}, batch 16, by torch.compile",
            source="zoo_step:candidates",
            arguments={"title": "ViT-S/32", "work": work, "compiled": True},
            subject="keras_moe",
            goals={"timm": 1.0, "timm compiled": None},
            peers={"timm": "timm", "timm compiled": "timm"},
            backends=("torch",),
        )
        for work in ("forward", "training step")
    ),
    Row(
        name="clip-step",
        work="CLIP-B/32's training step, 4 blocks in each tower, 8 pairs",
        source="pair_step:clip_steps",
        arguments={"num_layers": 4},
        subject="keras_moe",
        goals={"two towers": None, "keras_hub": {"torch": 1.0}},
    ),
    Row(
        name="limoe-step",
        work="LIMoE-B/32's training step, 4 blocks, two of them of 8 experts, 8 pairs",
        source="pair_step:limoe_steps",
        arguments={"num_layers": 4},
        subject="limoe",
        goals={"two dense models": None},
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
    Row(
        name="input-pipeline",
        work="1,024 JPEG images of 500 x 375 in a folder: random crop to 224, and flip",
        source="input_pipeline:candidates",
        arguments={"images": 1024, "size": (375, 500), "shape": (224, 224)},
        subject="load",
        clock="cpu",
        goals={
            "plain map": 1 / 1.15,
            "fused map": None,
            "torchvision": None,
            "Grain": None,
        },
        peers={"torchvision": "torchvision", "Grain": "grain"},
        backends=("jax",),
    ),
    *(
        Row(
            name=name,
            work=f"{title} of 256 images of 224 x 224 in memory, batches of 32",
            source="augmentations:candidates",
            arguments={"name": name, "images": 256, "size": 224},
            subject="load",
            clock="cpu",
            goals={"plain map": goal, "Keras": None, "KerasCV": None},
            peers={"KerasCV": "keras_cv"},
            backends=("jax",),
            rounds=7,
        )
        for name, title, goal in (
            # Keras's own transformations.
            ("randaugment", "RandAugment, two operations,", None),
            ("mixup", "MixUp", 1 / 1.15),
            ("cutmix", "CutMix", None),
        )
    ),
    *(
        Row(
            name=f"few-shot-{number}",
            work="Ridge regression of 10,000 x 768 features, 1,000 classes, 5,000 "
            f"tests, {number} l2",
            source="few_shot:fits",
            arguments={"number": number},
            subject="few_shot_accuracies",
            # Ours in float64, the peer in float32.
            goals={"big_vision's algorithm": None},
            backends=("jax",),
            rounds=5,
        )
        for number in (1, 30)
    ),
)
