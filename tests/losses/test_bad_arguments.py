"""Arguments that the losses refuse, in one table."""

from functools import partial

import numpy as np
import pytest

from keras_moe import losses
from keras_moe.losses.auxiliary import check_modalities

X = np.ones((3, 4), "float32")
LOGITS = np.ones((2, 6, 4), "float32")
softmax = partial(losses.softmax_contrastive_loss, X, X, 1.0)
sigmoid = partial(losses.sigmoid_contrastive_loss, X, X, 1.0)
global_entropy = partial(losses.global_entropy_loss, LOGITS)
OUTPUTS = {"image_embeddings": X, "text_embeddings": X, "logit_scale": 1.0}
AUDIO = losses.limoe_losses({"c": 1.0}, modalities="abc", local_modalities=())


@pytest.mark.parametrize(("call", "received"), [
    (lambda: losses.target_entropy_loss(LOGITS, 5), "num_selected_experts=5"),
    (lambda: losses.load_loss(LOGITS, LOGITS, 0.5, 5), "num_selected_experts=5"),
    (lambda: losses.load_loss(LOGITS, LOGITS, 0.0, 1), "noise_std=0.0"),
    (lambda: losses.load_balance_loss(LOGITS, None, 5), "num_selected_experts=5"),
    (lambda: global_entropy(-1.0), "threshold=-1.0"),
    (lambda: losses.mutual_information_loss(LOGITS, np.zeros((2, 6)), 0),
     "num_modalities=0"),
    (lambda: losses.AuxiliaryLoss("local_entropy", modality=-1), "modality=-1"),
    (lambda: losses.AuxiliaryLoss("mutual_information", num_modalities=0),
     "num_modalities=0"),
    (lambda: losses.AuxiliaryLoss("y"), "function='y'"),
    (lambda: losses.AuxiliaryLoss("router_z", modality=1), "modality=1"),
    (lambda: losses.AuxiliaryLoss("load_balance", choice="all"),
     "choice='all' (nearest: choices)"),
    (lambda: losses.get({"router_zz": 1.0}), "'router_zz' (nearest: router_z)"),
    (lambda: losses.get({"load_balance": {"choices": "second"}}), "choices='second'"),
    (lambda: check_modalities({"global_entropy": {"modality": 2}}, 2),
     "modality=2, loss='global_entropy'"),
    (lambda: check_modalities(AUDIO, 2), "modality=2, loss='global_entropy'"),
    (lambda: losses.limoe_losses({"audio": 1.0}), "modality='audio'"),
    (lambda: losses.limoe_losses({}, local_modalities=("sound",)), "modality='sound'"),
    (lambda: losses.limoe_losses({}, "global_entropy"), "local_loss='global_entropy'"),
    (lambda: losses.get(["router_z"]), "['router_z']"),
    (lambda: losses.get({"limoe": {"threshold": {}}}),
     "threshold={} (nearest: thresholds)"),
    (lambda: losses.softmax_contrastive_loss(X, X[:2], 1.0),
     "and (2, 4)"),
    (lambda: losses.sigmoid_contrastive_loss(X[0], X[0], 1.0),
     "shapes (4,)"),
    (lambda: softmax(direction="x"), "direction='x'"),
    (lambda: sigmoid(similarity_dtype="int8"), "similarity_dtype='int8'"),
    (lambda: softmax(image_ids=np.arange(2)), "image_ids.shape=(2,)"),
    (lambda: sigmoid(sample_weight=np.ones((3, 1))), "sample_weight.shape=(3, 1)"),
    (lambda: softmax(chunk_size=0), "chunk_size=0"),
    (lambda: losses.SoftmaxContrastiveLoss(multi_positive=1), "multi_positive=1"),
    (lambda: losses.SoftmaxContrastiveLoss(multi_positive=True)(None, OUTPUTS),
     "y_true=None"),
    (lambda: losses.LogScaleBound(0.0), "largest_scale=0.0"),
])  # fmt: skip
def test_bad_arguments(call, received):
    with pytest.raises(ValueError, match=r"Expected (.|\n)*received: ") as caught:
        call()
    assert received in str(caught.value)
