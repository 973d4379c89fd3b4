"""Private parts of Keras and KerasHub: in one file, and as they were when checked."""

import ast
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest

import keras_moe
from keras_moe import _compat

PACKAGE = Path(keras_moe.__file__).parent
# Methods of tuples with names, and documented functions of PyTorch and of Python.
PUBLIC = {"_asdict", "_exit", "_fields", "_make", "_replace", "_check", "_dynamo"}
PRIVATE = re.compile(r"_[a-z]\w*")
_OPTIMIZER = keras.optimizers.Optimizer

# Private methods that subclasses override or call: owner, name and first arguments.
PRIVATE_METHODS = (
    # Learning rates and weight decay by weight.
    (
        _OPTIMIZER,
        "_backend_update_step",
        ("grads", "trainable_variables", "learning_rate"),
    ),
    (_OPTIMIZER, "_apply_weight_decay", ("variables",)),
    # A learning rate that only weight decay reads.
    (_OPTIMIZER, "_get_current_learning_rate", ()),
    # Averages of steps, where gradients are accumulated over batches.
    (_OPTIMIZER, "_update_model_variables_moving_average", ("trainable_variables",)),
    # Muon's matrices and steps are other ones.
    (keras.optimizers.Muon, "_should_use_adamw", ("variable",)),
    (keras.optimizers.Muon, "_muon_update_step", ("gradient", "variable", "lr", "m")),
    # The index of a weight among the variables of an optimizer.
    (_OPTIMIZER, "_get_variable_index", ("variable",)),
    # What `keras.models.clone_model` calls.
    (_compat.Functional, "_run_through_graph", ("inputs", "operation_fn", "call_fn")),
)


def modules() -> Iterator[object]:
    """Yields the package's modules, but for programs and what imports a backend."""
    others = {"cli", "kernels", "_backends"}
    for info in pkgutil.walk_packages(keras_moe.__path__, "keras_moe."):
        if others.isdisjoint(info.name.split(".")):
            yield importlib.import_module(info.name)


def own_classes() -> set[type]:
    """Returns the classes that the package defines."""
    return {
        thing
        for module in modules()
        for thing in vars(module).values()
        if inspect.isclass(thing) and thing.__module__ == module.__name__
    }


@pytest.mark.every_backend
@pytest.mark.parametrize(("owner", "name", "arguments"), PRIVATE_METHODS)
def test_private_methods_are_those_that_were_checked(owner, name, arguments):
    signature = inspect.signature(getattr(owner, name))
    names = [name for name in signature.parameters if name != "self"]
    assert tuple(names[: len(arguments)]) == arguments


@pytest.mark.every_backend
def test_no_other_private_method_is_overridden():
    known = {name for _, name, _ in PRIVATE_METHODS}
    overridden = set()
    for cls in own_classes():
        # A mixin overrides the method of a base that another class gives it.
        own, foreign = (
            {
                name
                for base in cls.__mro__
                if base.__module__.startswith("keras_moe") == is_own
                and base is not _compat.TorchParameters
                for name in vars(base)
                if PRIVATE.fullmatch(name)
                # Marks that Python itself puts on classes.
                and name not in ("_abc_impl", "_is_protocol")
            }
            for is_own in (True, False)
        )
        overridden |= own & foreign
    assert overridden <= known
    # The list has no entry that nothing needs: one method is only called.
    assert known - overridden == {"_get_variable_index"}


def defined_names(tree: ast.AST) -> set[str]:
    """Returns the names that a file gives to functions, variables and attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            names |= {getattr(node, "id", None), getattr(node, "attr", None)}
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            # `object.__setattr__(self, "_name", value)` and `setattr`.
            names |= {
                str(argument.value)
                for argument in node.args
                if isinstance(argument, ast.Constant)
            }
    return names


def private_uses(sources: dict[str, str]) -> list[str]:
    """Returns a line for each private attribute that no file of ours defines."""
    trees = {place: ast.parse(source) for place, source in sources.items()}
    own = set().union(*map(defined_names, trees.values())) | PUBLIC
    own |= {name for _, name, _ in PRIVATE_METHODS}
    return [
        f"{place}:{node.lineno}: {node.attr}"
        for place, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and PRIVATE.fullmatch(node.attr)
        and node.attr not in own
    ]


def test_private_attributes_are_read_in_compat_alone():
    sources = {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "_compat.py"
    }
    assert private_uses(sources) == []
