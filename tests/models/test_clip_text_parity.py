"""The text tower against transformers' CLIP, with random weights."""

import keras
import numpy as np
import pytest

from keras_moe.models import TextBackbone

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("op_by_op")
# Ends of text lie at 2, 5 and 3; what follows is padding.
IDS = np.array([[18, 3, 19, 0, 0, 0], [18, 4, 5, 6, 7, 19], [18, 8, 9, 19, 2, 2]])
PADDING = np.array([[1, 1, 1, 0, 0, 0], [1] * 6, [1, 1, 1, 1, 0, 0]])


def clip_text(**kwargs):
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=16,
        projection_dim=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=6,
        **kwargs,
    )
    model = CLIPTextModelWithProjection(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.4)
    return model


def fill(backbone, state):
    """Gives a backbone the weights of transformers' model."""
    names = {
        "token_embedding/embeddings": "embeddings.token_embedding.weight",
        "text_positions/embedding": "embeddings.position_embedding.weight",
        "final_norm/gamma": "final_layer_norm.weight",
        "final_norm/beta": "final_layer_norm.bias",
        "projection/kernel": "text_projection.weight",
    }
    parts = {
        "mixer_norm": "layer_norm1", "feed_forward_norm": "layer_norm2",
        "attention/query": "self_attn.q_proj", "attention/key": "self_attn.k_proj",
        "attention/value": "self_attn.v_proj", "mlp/hidden": "mlp.fc1",
        "attention/attention_output": "self_attn.out_proj", "mlp/output": "mlp.fc2",
    }  # fmt: skip
    for weight in backbone.weights:
        name = names.get(weight.path)
        if name is None:
            block, path = weight.path.removeprefix("block_").split("/", 1)
            part, kind = path.rsplit("/", 1)
            kind = {"kernel": "weight", "gamma": "weight"}.get(kind, "bias")
            name = f"encoder.layers.{block}.{parts[part]}.{kind}"
        (value,) = [x for key, x in state.items() if key.endswith(name)]
        if weight.path.endswith("kernel"):
            value = value.T
        weight.assign(value.reshape(weight.shape))


@pytest.mark.parametrize(
    ("activation", "end_of_text_id"), [("quick_gelu", 19), ("gelu", 2)]
)
def test_it_equals_transformers(activation, end_of_text_id):
    # With the id 2 transformers takes the largest id, as OpenAI's weights want it.
    reference = clip_text(hidden_act=activation, eos_token_id=end_of_text_id)
    backbone = TextBackbone(
        vocabulary_size=20, max_length=6, hidden_dim=8, num_layers=2, num_heads=2,
        mlp_dim=16, projection_dim=4, activation=activation,
        end_of_text_id=None if end_of_text_id == 2 else end_of_text_id,
    )  # fmt: skip
    state = {k: v.detach().numpy() for k, v in reference.state_dict().items()}
    fill(backbone, state)
    with torch.no_grad():
        expected = reference(
            input_ids=torch.tensor(IDS), attention_mask=torch.tensor(PADDING)
        )
    received = backbone({"token_ids": IDS, "padding_mask": PADDING})
    received = {k: keras.ops.convert_to_numpy(x) for k, x in received.items()}
    kept = PADDING.astype(bool)
    np.testing.assert_allclose(
        received["tokens"][kept],
        expected.last_hidden_state.numpy()[kept],
        rtol=1e-5,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        received["pooled"], expected.text_embeds.numpy(), rtol=1e-5, atol=1e-5
    )
