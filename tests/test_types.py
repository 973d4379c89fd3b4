"""What a type checker sees: none of our errors, and those of a user's program."""

import ast
import json
import sys
from pathlib import Path

import pytest

from tests.forks import ROOT, run_python

# A user's program, and the rules that its lines break.
PROGRAM = """
from keras_moe import data, layers, models
from keras_moe.models import ViTBackbone, from_preset

backbone = ViTBackbone(image_shape=(8, 8, 3), patch_size=4, moe={"num_experts": 4})
model = from_preset("vmoe_b32", num_classes=3)
model.compile(optimizer="adam")
history = model.fit(data.load("digits", "train", (8, 8, 3), 8), epochs=2)
model.backbone.get_config()
model.save_to_preset("here")
layers.MoEConfig(num_experts=4).replace(num_experts=8)
models.convert("there.npz")[0].predict([[0.0]])
ViTBackbone(no_such_argument=3)  # reportCallIssue
from_preset("vmoe_b32").no_such_method()  # reportAttributeAccessIssue
models.no_such_function()  # reportAttributeAccessIssue
layers.MoEConfig(no_such_argument=3)  # reportCallIssue
history.no_such_attribute  # reportAttributeAccessIssue
"""


def problems(folder: Path, *paths: str) -> list[tuple[str, int, str]]:
    """Returns file, line and rule of each error that the checker finds."""
    pytest.importorskip("basedpyright")
    arguments = ("-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable)
    done = run_python(*arguments, *paths, cwd=folder)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [
        (Path(x["file"]).name, x["range"]["start"]["line"], x.get("rule", x["message"]))
        for x in found
        if x["severity"] == "error"
    ]


def test_the_package_has_no_error():
    assert problems(ROOT) == []


def test_a_wrong_program_is_refused(tmp_path):
    # The settings of an editor, and a package that is installed.
    settings = {
        "typeCheckingMode": "basic",
        "extraPaths": [str(ROOT)],
        "reportUnusedExpression": False,
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    (tmp_path / "program.py").write_text(PROGRAM)
    expected = [
        ("program.py", number, line.partition("# ")[2])
        for number, line in enumerate(PROGRAM.split("\n"))
        if "# report" in line
    ]
    # Each class of a union has its own error.
    assert list(dict.fromkeys(problems(tmp_path, "program.py"))) == expected


def is_any(annotation: ast.expr) -> bool:
    return any(getattr(node, "id", None) == "Any" for node in ast.walk(annotation))


def annotations(tree: ast.AST) -> list[ast.expr]:
    """Returns the annotations of arguments, results and fields."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found.append(node.returns)
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            found.append(node.annotation)
    return [annotation for annotation in found if annotation is not None]


def test_few_annotations_are_any():
    paths = (ROOT / "keras_moe").rglob("*.py")
    found = [x for path in paths for x in annotations(ast.parse(path.read_text()))]
    assert sum(map(is_any, found)) <= 0.12 * len(found)
