"""Attention on PyTorch without copies of queries, keys and values."""

import torch

# Keras's number for pairs that do not attend: a token without any partner then takes
# the mean of all values, where minus infinity would give NaN.
MASKED = {torch.float16: -0.7 * 65500.0}
MASKED_OTHERS = -0.7 * 3.38953e38


def attend(query, key, value, scale, mask=None):
    """See `keras_moe.ops.attend`."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if mask is not None:
        masked = MASKED.get(query.dtype, MASKED_OTHERS)
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
        mask = bias.masked_fill_(~mask, masked)
    outputs = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale
    )
    return outputs.transpose(1, 2)
