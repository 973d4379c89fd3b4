"""The activations of one encoder block on a device, and the traffic that it makes.

Axes: B batch, N tokens, D hidden, H mlp, E experts, C capacity, S group_size.
"""

from typing import Any, NamedTuple

from keras_moe.layers import MLP, MoE, SelfAttention

# Numbers kept of a token's D, of an attention weight and of a hidden unit.
PER_TOKEN, PER_PAIR, PER_HIDDEN_UNIT = 11, 3, 3
# A router's logits, noisy logits and gates, in float32.
ROUTING_BYTES = 3 * 4


class Share(NamedTuple):
    """The share of a device in the batch.

    Attributes:
        images: number of images.
        batch_size: images of all devices together.
        sequences: tokens of each sequence of an image: its own, and those of a text
            that goes with it.
        grouped: tokens of an image by which the layers count the size of a group.
        dim: D.
        model_parallel: number of devices over which heads and hidden units are split.
        itemsize: bytes of a number in the tokens' dtype.
    """

    images: int
    batch_size: int
    sequences: tuple
    grouped: int
    dim: int
    model_parallel: int
    itemsize: int

    @property
    def tokens(self) -> int:
        """All tokens of the share."""
        return self.images * sum(self.sequences)


def expert_slots(block: Any, share: Share) -> int:
    """The slots of all experts for a device's tokens, while training."""
    moe = block.feed_forward
    if not isinstance(moe, MoE):
        return 0
    router = moe.router
    if router.groups_per_example(True):
        num_groups, size = share.images, sum(share.sequences)
    else:
        images = share.batch_size
        if moe.group_size is not None:
            images = min(images, moe.group_size // share.grouped)
        # Images with their texts.
        size = images * sum(share.sequences)
        num_groups, rest = divmod(share.tokens, size)
        if rest:
            raise ValueError(
                "Expected whole groups on each device; received: groups of "
                f"{size} tokens, {share.tokens} tokens on each device"
            )
    capacity = router.group_capacity(size, True)
    if capacity is None:
        return num_groups * router.total_slots(size)
    return num_groups * moe.experts.num_experts * capacity


def activation_bytes(block: Any, share: Share) -> int:
    """The bytes that a block keeps for its gradient on each device."""
    split, dim = share.model_parallel, share.dim
    mixer, feed_forward = block.token_mixer, block.feed_forward
    numbers = PER_TOKEN * dim * share.tokens
    if isinstance(mixer, SelfAttention):
        pairs = share.images * sum(length**2 for length in share.sequences)
        numbers += PER_PAIR * mixer.num_heads * pairs // split
    elif isinstance(mixer, MLP):
        numbers += PER_HIDDEN_UNIT * mixer.mlp_dim * dim * share.images // split
    else:
        raise ValueError(
            "Expected a block with attention or MLPs; received: "
            f"token_mixer={type(mixer).__name__}"
        )
    routing = 0
    if isinstance(feed_forward, MLP):
        numbers += PER_HIDDEN_UNIT * feed_forward.mlp_dim * share.tokens // split
    elif isinstance(feed_forward, MoE):
        slots, experts = expert_slots(block, share), feed_forward.experts
        hidden = (PER_HIDDEN_UNIT + experts.gated) * experts.mlp_dim
        numbers += slots * hidden // split + slots * 2 * dim
        routing = share.tokens * feed_forward.router.num_experts * ROUTING_BYTES
    else:
        raise ValueError(
            "Expected a block with an MLP or an MoE layer; received: "
            f"feed_forward={type(feed_forward).__name__}"
        )
    return numbers * share.itemsize + routing


def model_parallel_bytes(block: Any, share: Share) -> int:
    """The activations of a block that are summed over the devices of its heads.

    The token mixer's and the feed-forward layer's outputs; for the gradient as many.
    """
    slots = expert_slots(block, share) or share.tokens
    return (share.tokens + slots) * share.dim * share.itemsize
