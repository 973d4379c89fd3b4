"""Command lines that are refused in one line, in one table."""

import json

import pytest

from keras_moe import models
from tests.pipelines import save
from tests.published import CHECKPOINTS
from tests.small_models import small_pairs_model

pytest.importorskip("tensorflow")

DENSE = {"patch_size": 8, "hidden_dim": 16, "num_layers": 1, "num_heads": 2}
DENSE |= {"moe_layers": None, "load_weights": False}
NPZ = CHECKPOINTS / "vit_classic.npz"
HUGE = "vmoe_h14 --devices 256 --batch-size 4096"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Paths by the words that stand for them in the table."""
    folder = tmp_path_factory.mktemp("files")
    tasks = {"preset": {"num_classes": 5}, "backbone": {"task": "backbone"}}
    for name, task in tasks.items():
        models.from_preset("vmoe_digits", **DENSE, **task).save_to_preset(folder / name)
    small_pairs_model(["a cat"]).save_to_preset(folder / "pairs")
    (folder / "other").mkdir()
    (folder / "other" / "mine.txt").write_text("mine")
    (folder / "recipe.json").write_text("{")
    (folder / "names.txt").write_text("a\nb")
    for split in ("train", "test"):
        save(folder / "photos" / split / "a.png", 0)
        labels = {"a.png": ["dark", "round"]}
        (folder / "photos" / split / "labels.json").write_text(json.dumps(labels))
    path = folder / "captions" / "test" / "a.png"
    save(path, 0)
    path.with_name("captions.csv").write_text("image,caption\na.png,a cat")
    return folder


@pytest.mark.parametrize(("command", "message"), [
    # The parser
    ("", "COMMAND"),
    ("describe vit_b16 --set x", "Expected NAME=VALUE; received: x"),
    ("describe vit_b16 --set image_shape=[384,384", "after image_shape=, such as"),
    ("describe vit_b16 --set rematerialize=True", "received: True"),
    ("describe --json vit_b16", "a file that ends with .json"),
    ("estimate x --utilization nan", "above 0; received: nan"),
    ("quickstart --epochs 0", "--epochs: Expected an integer, at least 1"),
    ("train", "a recipe, or --list alone"),
    # describe
    ("describe vmoe_b33", "nearest: vmoe_b32"),
    ("describe", "Expected a preset, or --list alone"),
    ("describe vmoe_b32 --set num_expert=4", "num_experts"),
    ("describe vmoe_b32 --set num_classes=3", "num_classes=3, which the command"),
    ("describe nowhere/model.npz", "nowhere/model.npz"),
    # estimate
    (f"estimate {HUGE} --chip tpu_v9", "tpu_v9"),
    (f"estimate {HUGE} --expert-parallel batch", "expert_parallel=256"),
    ("estimate vit_b16 --batch-size 8", "--devices or --compile"),
    (f"estimate {HUGE} --compile v5e:4x4", "no --devices with --compile"),
    ("estimate vit_b16 --batch-size 8 --compile v5e:4x5", "v5e: 1x1, 2x2"),
    ("estimate vit_b16 --devices 8", "Expected --batch-size"),
    ("estimate --devices 8", "a model or --recipe; received: neither"),
    (f"estimate {HUGE} --recipe vmoe_digits", "received: both"),
    ("estimate --recipe routers_jft --devices 8", "--num-classes"),
    # convert
    (f"convert {NPZ} @new --set num_classes=3", "num_classes=3, which the comm"),
    (f"convert {NPZ} @new --set load_weights=false", "which the command sets"),
    (f"convert {NPZ} @new --set no_such=1", "no_such"),
    (f"convert {NPZ} @other", "a new folder, an empty one or an older preset"),
    (f"convert {NPZ} @names.txt/a/new", "names.txt is a file"),
    ("convert @preset @preset", "Expected another folder than the source"),
    # twins
    ("twins vmoe_digits --recipe-set model.load_weights=true", "load_weights=True"),
    ("twins vmoe_digits --set moe_layers=null", "a model with experts"),
    # upcycle
    ("upcycle @preset @new --set router=1", "received: router=1"),
    ("upcycle @preset @new --settings clip_down", "clip_down"),
    ("upcycle @preset @new --num-experts [2", "Expected JSON"),
    ("upcycle @preset @preset/", "Expected another folder than the source"),
    # train
    ("train mumoe_digit", "nearest: mumoe_digits"),
    ("train abcdefgh", "--list has all"),
    ("train finetune --preset vmoe_b32", "such as hf://timm"),
    ("train finetune --preset vmoe_digits --set load_weights=false", "are random"),
    ("train finetune --preset vmoe_digits --data digits --batch-size 2000", "1347 ex"),
    ("train finetune --epochs 2 --recipe-set schedule.epochs=3", "schedule.epochs"),
    ("train @recipe.json", "recipe.json"),
    ("train mumoe_digits --recipe-set epoch=1", "nearest: schedule.epochs"),
    ("train mumoe_digits --set num_layer=1", "nearest: num_layers"),
    ("train mumoe_digits --data digit", "source='digit'"),
    ("train mumoe_digits --output @names.txt", "names.txt"),
    ("train mumoe_digits --branch-from nowhere", "nowhere"),
    ("train mumoe_digits --cooldown 5", "Expected --branch-from"),
    ("train mumoe_digits --shots 5", "Expected --few-shot-every"),
    ("train mumoe_digits --retrieval-every 1", "on 'digits'"),
    ("train mumoe_digits --restart --extend", "received: both"),
    ("train mumoe_digits --process-id 0", "together"),
    ("train mumoe_digits --model-parallel 2", "Expected --devices"),
    # evaluate: classifiers
    ("evaluate vmoe_b33 --data digits", "nearest: vmoe_b32"),
    ("evaluate @preset", "Expected --data"),
    ("evaluate @preset --data digits --metrics recall", "invalid choice: 'recall'"),
    ("evaluate @preset --data digits --metrics zero_shot", "--metrics zero_shot"),
    ("evaluate @preset --data digits --templates {}", "--templates"),
    ("evaluate @preset --data digits", "model's 5 classes; received: 10 classes"),
    ("evaluate @preset --data folder:@photos --metrics few_shot", "few_shot"),
    ("evaluate @preset --data digits --class-subset imagenet_a", "1,000 classes"),
    ("evaluate @backbone --data digits --metrics accuracy", "among few_shot"),
    # evaluate: image-text models
    ("evaluate @pairs --data digits --metrics accuracy", "--metrics accuracy"),
    ("evaluate @pairs --data digits --templates digit", "digit"),
    ("evaluate @pairs --data digits --class-names @names.txt", "2 names"),
    ("evaluate @pairs --data digits --data-options templates=a{}", "options temp"),
    (
        "evaluate @pairs --data digits --class-subset imagenet_a "
        "--metrics few_shot",
        "--class-subset",
    ),
    ("evaluate @pairs --data emoji:language=de --metrics zero_shot", "zero_shot"),
    ("evaluate @pairs --data folder:@captions --split val", "split='val'"),
    # report
    ("report @preset --data digits --output @new", "Expected a model with experts"),
    ("report @preset --data digits --data-options templates={}", "templates={}"),
    (
        "report vmoe_digits --data digits --examples 4 --show-examples 4 "
        "--output @new",
        "Expected numbers of examples below 4",
    ),
])  # fmt: skip
def test_refused(program, files, command, message):
    arguments = [word.replace("@", f"{files}/") for word in command.split()]
    if arguments[:1] == ["train"] and "--output" not in arguments:
        arguments += ["--output", str(files / "run")]
    status, _, errors = program(*arguments)
    *warnings, error = errors.splitlines()
    assert status == 2, errors
    assert error.startswith("error: ")
    assert message in error
    assert all(line.startswith("warning: ") for line in warnings)
    assert not (files / "new").exists()
