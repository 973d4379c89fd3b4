"""Nothing that is loaded runs code: SECURITY.md, as tests."""

import ast
import json
from pathlib import Path

import keras
import pytest

from keras_moe import models

ROOT = Path(__file__).resolve().parent.parent
# Functions that run the code of what they read, by the last part of their names.
RUN_CODE = {"eval", "exec", "enable_unsafe_deserialization", "unsafe_load"}
RUN_CODE_MODULES = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve"}
# Keywords with the one value that keeps code from running.
SAFE = {"allow_pickle": False, "safe_mode": True, "weights_only": True}


def breaches(source: str) -> list[str]:
    """Returns a line for each place that would run loaded code."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [getattr(node, "module", None), *(x.name for x in node.names)]
            lines += [
                f"{node.lineno}: imports {module}"
                for module in modules
                if module and module.split(".")[0] in RUN_CODE_MODULES
            ]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        # A method such as `model.eval()` is another thing than the builtin.
        if name in RUN_CODE or name.endswith(".enable_unsafe_deserialization"):
            lines.append(f"{node.lineno}: calls {name}")
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        for keyword in SAFE.keys() & keywords.keys():
            value = ast.unparse(keywords[keyword])
            if value != str(SAFE[keyword]):
                lines.append(f"{node.lineno}: {name}({keyword}={value})")
        keyword = {"np.load": "allow_pickle", "torch.load": "weights_only"}.get(name)
        if keyword and keyword not in keywords:
            lines.append(f"{node.lineno}: {name} without {keyword}")
    return lines


def test_the_package_calls_nothing_that_runs_loaded_code():
    files = sorted((ROOT / "keras_moe").rglob("*.py"))
    assert len(files) > 100
    for path in files:
        assert breaches(path.read_text(encoding="utf-8")) == [], path


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "eval(text)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=wanted)",
        "keras.saving.load_model(path, safe_mode=False)",
        "torch.load(path)",
        "keras.config.enable_unsafe_deserialization()",
    ],
)
def test_a_planted_breach_is_seen(source):
    assert len(breaches(source)) == 1
    assert breaches("model.eval()\nnp.load(path, allow_pickle=False)") == []


@pytest.mark.parametrize(
    ("file", "argument"),
    [
        ("config.json", "moe"),
        ("config.json", "dtype"),
        ("task.json", "preprocessor"),
        ("task.json", "output_activation"),
        ("task.json", "head"),
    ],
)
def test_a_preset_runs_no_code(tmp_path, file, argument):
    sizes = {"image_shape": (8, 8, 1), "patch_size": 4, "hidden_dim": 8, "mlp_dim": 8}
    sizes |= {"num_layers": 1, "num_heads": 2}
    model = models.from_preset("vit_s32", num_classes=2, **sizes)
    model.save_to_preset(tmp_path / "preset")
    models.from_preset(tmp_path / "preset")  # whole, before it is changed

    witness = tmp_path / "witness"
    hostile = keras.layers.Lambda(
        lambda x, at=str(witness): open(at, "w").close() or x, name="hostile"
    )
    path = tmp_path / "preset" / file
    content = json.loads(path.read_text(encoding="utf-8"))
    content["config"][argument] = keras.saving.serialize_keras_object(hostile)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises((TypeError, ValueError)):
        models.from_preset(tmp_path / "preset")
    assert not witness.exists()
