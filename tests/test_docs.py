"""The Python of README.md and of each page runs as it is printed, page by page."""

import importlib.util
import json
import shutil

import keras_hub
import numpy as np
import pytest

from keras_moe import models
from tests import hub_server
from tests.docs_client import NEEDS, blocks_of
from tests.forks import ROOT, run_python
from tests.keras_hub_language_models import language_model
from tests.models.conversion import test_gpt2 as gpt2
from tests.models.conversion import test_siglino as siglino
from tests.models.conversion import test_siglip2 as siglip2
from tests.models.test_remote import write_clip
from tests.published import timm_folder
from tests.xla_flags import quick

PAGES = {
    path.name: path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if blocks_of(path)
}
# What a test has not, by page: a block for each. Those of PyTorch run on it.
UNTESTED = {
    "coming_from.md": ["google-research/vmoe", "timm", "OpenCLIP"],
    "devices.md": ["the extra tpu-plan"],
    "evaluation.md": ["the extra lm-eval"],
    "keras.md": [
        "KERAS_BACKEND=torch, the extra onnx, and onnxruntime",
        "KERAS_BACKEND=torch",
    ],
}
SIZES = {"mlp_dim": 16, "num_layers": 1, "num_heads": 2}


def write_repositories(folder):
    """Small models under the names that the pages have."""
    kind = {"label_names": [f"class {number}" for number in range(7)]}
    for name in ("augreg_in21k", "augreg_in1k"):
        timm = folder / f"timm/vit_base_patch16_224.{name}"
        timm_folder(timm, "vit_token", **kind)
    write_clip(folder / "openai/clip-vit-base-patch32")
    # Texts have the size of SigLino's features for SigLIP 2.
    path = folder / "tiiuae/siglino-moe-0.3-0.6B"
    path.mkdir(parents=True)
    patches = {"img_projector.weight": np.ones((32, 3 * 16**2), "float32")}
    _, arrays = siglino.released(siglino.MOE, path, patches, patch_size=16)
    dim = arrays["outputs/summary_features/siglip2"].shape[1]
    for name in ("so400m-patch16-naflex", "base-patch16-224"):
        (folder / "tokenizer.model").write_bytes(siglip2.trained())
        tokenizer = models.TextTokenizer.sentence_piece(folder / "tokenizer.model")
        text = {"vocabulary_size": 3000, "max_length": 64, "projection_dim": dim}
        image = {"image_shape": (32, 32, 3), "patch_size": 16}
        sizes = {"image": image, "text": text, "hidden_dim": dim, **SIZES}
        pair = models.from_preset("siglip_b16", **sizes)
        pair = models.ContrastiveModel(pair, tokenizer)
        models.export_weights(pair, "transformers", folder / f"google/siglip2-{name}")
    path = folder / "openai-community/gpt2"
    dense = language_model("GPT2", vocabulary_size=266)
    gpt2.add_tokenizer(gpt2.folder_of(dense, path))
    hub = folder / "keras"
    language_model("Llama").save_to_preset(hub / "llama2_7b_en")
    vit = keras_hub.models.ViTBackbone((224, 224, 3), 32, hidden_dim=8, **SIZES)
    vit.save_to_preset(hub / "vit_base_patch16_224_imagenet")
    shutil.copytree(ROOT / "presets/vmoe_digits", folder / "USER/my_vmoe")


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Returns a function from a backend and pages to the traceback of each page."""
    folder = tmp_path_factory.mktemp("docs")
    write_repositories(folder / "hub")

    def run(backend, *pages):
        if importlib.util.find_spec(backend) is None:
            pytest.skip(f"{backend} is not installed")
        with hub_server.serving(folder / "hub") as server:
            variables = hub_server.environment(folder / "home", server.server_port)
            variables |= {"HOME": str(folder / "home"), "HF_TOKEN": hub_server.TOKEN}
            variables |= {"TMPDIR": str(folder)}
            variables |= {"KERAS_BACKEND": backend, "XLA_FLAGS": quick()}
            program, file = ROOT / "tests/docs_client.py", folder / "failures.json"
            done = run_python(program, file, *pages, **variables)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(file.read_text())

    return run


def test_blocks_run_in_order(failures):
    for failure in failures("jax", *PAGES.values()).values():
        assert failure is None, failure


def test_blocks_of_pytorch_run(failures):
    assert failures("torch", PAGES["keras.md"]) == {"keras.md": None}


def test_few_blocks_need_what_is_not_here():
    untested = {}
    for name, page in PAGES.items():
        firsts = [block.splitlines()[0] for _, block in blocks_of(page)]
        needs = [x.removeprefix(NEEDS) for x in firsts if x.startswith(NEEDS)]
        if needs:
            untested[name] = needs
    assert untested == UNTESTED
