"""Configs are read, compared with the tensors, and refused if damaged."""

import json

import numpy as np
import pytest

from keras_moe import models
from tests.models.conversion.test_conversion import (
    as_transformers,
    clip_tensors,
    timm_folder,
)
from tests.models.conversion.test_refusals import refused
from tests.models.conversion.writers import write_folder

pytestmark = pytest.mark.backend_free


def change(folder, edit, name="config.json"):
    """Edits the JSON file of a folder; returns the folder."""
    path = f"{folder}/{name}"
    with open(path) as file:
        content = json.load(file)
    edit(content)
    with open(path, "w") as file:
        json.dump(content, file)
    return folder


def openclip(folder, **vision):
    vision = {"width": 8, "head_width": 4, **vision}
    return write_folder(
        folder,
        clip_tensors(),
        name="open_clip_model.safetensors",
        open_clip_config={"model_cfg": {"quick_gelu": True, "vision_cfg": vision}},
    )


def transformers(folder, **vision):
    vision = {"num_attention_heads": 2, **vision}
    config = {"model_type": "clip", "vision_config": vision}
    return write_folder(folder, as_transformers(clip_tensors()), config)


@pytest.mark.parametrize(
    "architecture",
    [
        "vit_pe_core_base_patch16_224",
        "vit_pe_spatial_large_patch14_448",
        "vit_base_patch16_dinov3",
        "vit_small_patch16_dinov3_qkvb",
    ],
)
def test_rotary_positions_are_refused_by_name(tmp_path, architecture):
    folder = timm_folder(tmp_path / "x", "vit_token", architecture=architecture)
    refused(folder, f"architecture={architecture!r}")
    # Without a config the folder's own name is what tells.
    folder = timm_folder(tmp_path / architecture, "vit_token")
    (tmp_path / architecture / "config.json").unlink()
    refused(folder, architecture)


@pytest.mark.parametrize("text", ['{"architecture": "vit_ba', "[1]", "null", "\xff"])
@pytest.mark.parametrize("make", [transformers, lambda f: timm_folder(f, "vit_token")])
def test_a_damaged_config(tmp_path, make, text):
    folder = make(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    refused(folder, "config.json")
    refused(f"{folder}/model.safetensors", "config.json", num_heads=2)


def test_a_damaged_config_of_openclip(tmp_path):
    folder = openclip(tmp_path)
    (tmp_path / "open_clip_config.json").write_text("{")
    refused(folder, "open_clip_config.json", "truncated")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("model_args", None),
        ("model_args", []),
        ("model_args.num_heads", "4"),
        ("model_args.num_heads", 0),
        ("pretrained_cfg", None),
        ("pretrained_cfg.mean", 0.5),
        ("pretrained_cfg.mean", [0.5, None, 0.5]),
        ("pretrained_cfg.std", [0.5, 0.0, 0.5]),
        ("pretrained_cfg.input_size", "224"),
        ("global_pool", 3),
        ("num_classes", True),
    ],
)
def test_wrong_types(tmp_path, place, value):
    def edit(content):
        *path, name = place.split(".")
        for key in path:
            content = content[key]
        content[name] = value

    folder = change(timm_folder(tmp_path, "vit_token"), edit)
    refused(folder, repr(place), "config.json", repr(value))


def test_wrong_types_of_clip(tmp_path):
    refused(transformers(tmp_path / "a", hidden_act=3), "vision_config.hidden_act")
    refused(
        transformers(tmp_path / "b", num_attention_heads=None),
        "vision_config.num_attention_heads",
    )
    folder = transformers(tmp_path / "c")
    (tmp_path / "c" / "preprocessor_config.json").write_text('{"image_std": [0, 1]}')
    refused(folder, "image_std", "preprocessor_config.json")
    for number, value in enumerate((0, True, "64", -4)):
        folder = openclip(tmp_path / str(number), head_width=value)
        refused(folder, "head_width", "open_clip_config.json", repr(value))
    refused(openclip(tmp_path / "d", head_width=5), "head_width=5")


def test_what_is_assumed_without_a_config_is_reported(tmp_path):
    folder = timm_folder(tmp_path, "vit_token")
    assert not models.convert(folder)[1].notes
    (tmp_path / "config.json").unlink()

    def assumed(**overrides):
        notes = models.convert(folder, load_weights=False, **overrides)[1].notes
        assert all(note.startswith("assumed: ") for note in notes)
        return "\n".join(notes)

    # 32 dimensions are no usual size.
    refused(folder, "num_heads=")
    notes = assumed(num_heads=4)
    for word in ("mean=0.5", "layer_norm_epsilon=1e-06", "pooling: the class token"):
        assert word in notes
    assert "num_heads" not in notes


def test_assumed_heads_are_reported(tmp_path):
    from keras_moe.models.conversion._timm import _assumptions

    arguments = {"class_token": True, "num_heads": 12, "layer_norm_epsilon": 1e-6}
    notes = "\n".join(_assumptions({}, arguments, heads_are_known=False))
    assert "num_heads=12" in notes


@pytest.mark.parametrize(
    ("name", "value"),
    [("embed_dim", 48), ("depth", 3), ("depth", 1), ("num_classes", 9)],
)
def test_timms_sizes_are_those_of_the_tensors(tmp_path, name, value):
    def edit(content):
        content["model_args"][name] = value

    folder = change(timm_folder(tmp_path, "vit_token"), edit)
    refused(folder, f"{name}={value}", "as config.json says", "model.safetensors")


@pytest.mark.parametrize("case", ["vit_token", "mixer"])
def test_lost_last_blocks_are_noticed(tmp_path, case):
    def lose(tensors):
        for name in list(tensors):
            if name.startswith("blocks.1."):
                del tensors[name]

    depth = "num_blocks" if case == "mixer" else "depth"
    refused(timm_folder(tmp_path / "x", case, change=lose), f"{depth}=2", "received: 1")

    def by_name(content):
        content["architecture"] = (
            "mixer_b16_224" if case == "mixer" else "vit_large_patch16_224"
        )
        del content["model_args"][depth]

    # Where arguments do not say it, the name of the size does.
    folder = change(timm_folder(tmp_path / "y", case), by_name)
    refused(folder, f"{depth}={12 if case == 'mixer' else 24}")


def test_a_head_that_is_not_there(tmp_path):
    def lose(tensors):
        del tensors["head.weight"], tensors["head.bias"]

    folder = timm_folder(tmp_path, "vit_token", change=lose)
    refused(folder, "num_classes=7", "received: 0")


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_size", 16), ("num_hidden_layers", 3), ("intermediate_size", 8)],
)
def test_sizes_of_transformers(tmp_path, name, value):
    refused(transformers(tmp_path, **{name: value}), f"{name}={value}")


@pytest.mark.parametrize(("name", "value"), [("width", 16), ("layers", 3)])
def test_sizes_of_openclip(tmp_path, name, value):
    says = "as open_clip_config.json says"
    refused(openclip(tmp_path, **{name: value}), f"{name}={value}", says)


@pytest.mark.parametrize(
    "entry",
    [
        {"do_normalize": "false"},
        {"do_rescale": 0},
        {"rescale_factor": 0},
        {"image_mean": [0.5], "image_std": [0.5]},
    ],
)
def test_a_preprocessor_that_says_nothing_sensible(tmp_path, entry):
    folder = transformers(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(entry))
    refused(folder, "3 channels" if "image_mean" in entry else next(iter(entry)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pool_type", "avg"),
        ("global_average_pool", True),
        ("final_ln_after_pool", True),
        ("act_kwargs", {"approximate": "tanh"}),
        ("norm_kwargs", {"eps": 1e-3}),
        ("attentional_pool", True),
        ("attentional_pool", "parallel"),
        ("input_patchnorm", True),
        ("no_ln_pre", True),
        ("pos_embed_type", "sin_cos_2d"),
        ("timm_model_name", "vit_base_patch16_224"),
        ("of_a_later_version", 3),
    ],
)
def test_towers_of_openclip_that_ours_cannot_be(tmp_path, name, value):
    refused(openclip(tmp_path, **{name: value}), f"vision_cfg.{name}={value!r}")


def test_openclips_defaults_are_accepted(tmp_path):
    folder = openclip(
        tmp_path,
        layers=2,
        patch_size=4,
        image_size=8,
        mlp_ratio=2.0,
        pool_type="tok",
        pos_embed_type="learnable",
        no_ln_pre=False,
        act_kwargs={},
        norm_kwargs=None,
        output_tokens=False,
    )
    model, report = models.convert(folder, tower="image")
    assert report.scheme == "CLIP (OpenCLIP)"
    assert np.isfinite(model.predict(np.zeros((1, 8, 8, 3)), verbose=0)).all()


@pytest.mark.parametrize("name", ["run.ckpt", "dir.npz", "x.safetensors", "x.index"])
def test_a_folder_may_have_any_name(tmp_path, name):
    model = models.from_preset("vmoe_digits", load_weights=False)
    model.save_to_preset(tmp_path / name)
    again = models.from_preset(str(tmp_path / name))
    assert again.count_params() == model.count_params()
