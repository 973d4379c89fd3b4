"""Handles of hubs: real clients in fresh processes, a server on 127.0.0.1, or none."""

import json
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from keras_moe import models
from keras_moe.models.preprocessing._byte_pairs import END, START, trained_byte_pairs
from tests import golden, hub_server
from tests.compare import assert_close, assert_same
from tests.forks import run_python
from tests.keras_hub_language_models import language_model
from tests.models.conversion import test_gpt2 as gpt2
from tests.published import hub_vit, open_clip_folder, timm_folder

FINETUNED = "timm/vit_small_patch16_224.augreg_in21k"


def write_clip(clip):
    """An OpenCLIP with random weights and a vocabulary."""
    pairs = trained_byte_pairs(["a photo of a cat", "a photo of a dog"], 530)
    open_clip_folder(clip, text={"vocab_size": 530})
    path, generator = clip / "open_clip_model.safetensors", np.random.default_rng(3)
    shapes = {name: array.shape for name, array in load_file(path).items()}
    shapes["token_embedding.weight"] = (530, 8)
    random = {
        name: generator.normal(size=shape).astype("float32")
        for name, shape in shapes.items()
    }
    save_file(random, path)
    (clip / "vocab.json").write_text(json.dumps(pairs.vocabulary))
    (clip / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs.merges]))


def write_repositories(folder):
    """Models of other libraries, some with tokenizers, and presets of ours."""
    timm_folder(folder / "timm" / "vit", "vit_token")
    shutil.copytree(folder / "timm" / "vit", folder / FINETUNED)
    hub_vit().save_to_preset(folder / "keras" / "vit")
    gpt2_path = folder / "openai-community" / "gpt2"
    gpt2.add_tokenizer(
        gpt2.folder_of(language_model("GPT2", vocabulary_size=266), gpt2_path)
    )
    write_clip(folder / "laion" / "clip")
    for name in ("digits", "gated", "down", "broken"):
        shutil.copytree(folder.parent / "preset", folder / "ours" / name)
    (folder / "ours" / "gated" / hub_server.GATED).touch()
    (folder / "ours" / "down" / hub_server.DOWN).touch()
    broken = f"model.weights.h5{hub_server.BROKEN}"
    (folder / "ours" / "broken" / broken).touch()
    # A repository without anything to load.
    (folder / "ours" / "none").mkdir()
    (folder / "ours" / "none" / "README.md").write_text("Nothing yet.")


# Seconds: some clients would try for minutes, and a busy machine takes its time.
AT_ONCE = 60


@pytest.fixture(scope="module")
def happened(tmp_path_factory):
    """What a process with a hub and one without a network report, and the folder."""
    folder = tmp_path_factory.mktemp("hub")
    model = models.from_preset("vmoe_digits", load_weights=False, hidden_dim=16)
    (folder / "loads.png").write_bytes(b"png")
    card = models.ModelCard(picture=folder / "loads.png")
    model.save_to_preset(folder / "preset", card=card)
    arrays, _ = golden.load("12_timm/vit_token")
    np.save(folder / "images.npy", arrays["inputs/images"])
    for number, name in enumerate(("cat", "dog") * 5):
        (folder / "photos" / name).mkdir(parents=True, exist_ok=True)
        picture = folder / "photos" / name / f"{number}.png"
        keras.utils.save_img(picture, np.full((20, 24, 3), 200 * (number % 2)))
    write_repositories(folder / "repositories")
    program = Path(__file__).with_name("remote_client.py")

    def run(which, port):
        variables = hub_server.environment(folder / "home", port)
        done = run_python(program, which, folder, **variables)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads((folder / f"{which}.json").read_text())

    with hub_server.serving(folder / "repositories") as server:
        online, port = run("online", server.server_port), server.server_port
    # What the recipe's preset needs is no longer there.
    (cache,) = (folder / "home").glob("hf/hub/models--timm--vit_small*")
    shutil.rmtree(cache)
    return folder, port, online, run("offline", port)


@pytest.fixture(scope="module")
def loaded(happened):
    return dict(np.load(happened[0] / "arrays.npz"))


def test_models_of_other_libraries_are_downloaded(happened, loaded):
    folder, _, online, _ = happened
    arrays, _ = golden.load("12_timm/vit_token")
    assert_close(loaded["timm"], arrays["outputs/logits"], atol=1e-4)
    clip = load_file(folder / "repositories/laion/clip/open_clip_model.safetensors")
    given = clip["token_embedding.weight"]
    assert any(np.array_equal(given, x) for k, x in loaded.items() if "clip/" in k)
    ids = json.loads((folder / "repositories/laion/clip/vocab.json").read_text())
    words = [ids[START], ids["a</w>"], ids[END]]
    assert online["clip tokens"][:3] == words
    given = load_file(folder / "repositories/openai-community/gpt2/model.safetensors")
    given = given["transformer.wte.weight"]
    assert any(np.array_equal(given, x) for k, x in loaded.items() if "gpt2/" in k)
    assert online["keras hub"][1] == "no error"
    ids = gpt2.vocabulary()
    assert online["gpt2 tokens"] == [ids["hello"], ids["\u0120world"]]


def test_a_preset_of_ours_is_downloaded_and_uploaded(happened, loaded):
    folder = happened[0]
    model = models.from_preset(folder / "preset")
    for weight in model.weights:
        value = keras.ops.convert_to_numpy(weight)
        assert_same(loaded[f"ours/{weight.path}"], value)
        assert_same(loaded[f"mine/{weight.path}"], value)
    sent, kept = folder / "repositories" / "me" / "mine", folder / "preset"
    assert {x.name for x in sent.iterdir()} >= {x.name for x in kept.iterdir()}
    # The card is ours, not the one that KerasHub writes where there is none.
    assert "(card.png)" in (kept / "README.md").read_text()
    assert (sent / "README.md").read_text() == (kept / "README.md").read_text()


def check(happened, name, kind, *words):
    """Checks the kind of an error and words of its text; returns its seconds."""
    kinds, text, seconds = happened[name]
    assert kind in kinds, (name, kinds[:1], text)
    for word in words:
        assert word in text, (name, text)
    return seconds


def test_errors_of_a_hub_have_names(happened):
    _, port, online, _ = happened
    server = f"http://127.0.0.1:{port}"
    login = "huggingface_hub.login() or HF_TOKEN"
    for name in ("no/body", "no/body of member"):
        words = f"a repository on {server}", login, "received: hf://no/body,"
        check(online, name, "ValueError", *words)
    check(online, "a/b/c", "ValueError", "handle like hf://USER/NAME", "a/b/c")
    for name in ("ours/gated", "stranger"):
        check(online, name, "PermissionError", "hf://ours/gated", "ask for", login)
    assert online["member"][1] == "no error"
    check(online, "no token", "PermissionError", "hf://me/mine", login)
    assert check(online, "ours/down", "ConnectionError", server, "503") < AT_ONCE
    check(online, "ours/none", "FileNotFoundError", "hf://ours/none", "config.json")


def test_programs_download_and_keep_no_broken_file(happened):
    online = happened[2]
    check(online, "broken", "ConnectionError", "hf://ours/broken")
    assert "config.json" in online["kept"]
    assert "model.weights.h5" not in online["kept"]
    assert online["whole again"][1] == "no error"
    status, output, errors = online["describe"]
    assert status == 0, errors
    assert "hf://timm/vit" in output
    status, output, errors = online["finetune"]
    assert status == 0, errors
    assert "linear probe" in output


def test_without_a_network_all_say_so_at_once(happened):
    _, port, _, offline = happened
    hub = f"http://127.0.0.1:{port}"
    for name, server in {
        "hf://no/body": hub,
        "kaggle://a/b/keras/c": "Kaggle",
        "kaggle://a/b/keras/c/1": "Kaggle",
        "vit_base_patch16_224_imagenet": "Kaggle",
        "gs://bucket/preset": "storage.googleapis.com",
        "gs://vmoe_checkpoints/vmoe_s32": "storage.googleapis.com",
        "gs://vit_models/augreg/ViT.npz": "storage.googleapis.com",
        "http://127.0.0.2:9/model.safetensors": "127.0.0.2:9",
        "tokenizer hf://a/b": hub,
        "upload hf://me/mine": hub,
        "upload kaggle://me/mine/keras/one": "Kaggle",
    }.items():
        words = f"Expected a connection to {server} for {name.split()[-1]}"
        assert check(offline, name, "ConnectionError", words) < AT_ONCE, name
    for name, handle in {
        "finetune": f"hf://{FINETUNED}",
        "describe": "hf://no/body",
    }.items():
        status, output, errors = offline[name]
        assert (status, output) == (2, "")
        assert errors.startswith(f"error: Expected a connection to {hub} for {handle}")
        assert errors.count("\n") == 1


def test_without_a_network_what_was_downloaded_is_enough(happened):
    pytest.importorskip("orbax.checkpoint")
    words = "Expected a connection to storage.googleapis.com for gs://bucket/run;"
    assert check(happened[3], "gs://bucket/run", "ConnectionError", words) < AT_ONCE
    offline = happened[3]
    for name in ("cached", "cached gs", "cached alone"):
        kinds, text, seconds = offline[name]
        assert (kinds, text, seconds < AT_ONCE) == ([], "no error", True)
    words = "config.json of hf://no/body in the cache", "HF_HUB_OFFLINE"
    check(offline, "not cached", "FileNotFoundError", *words)
