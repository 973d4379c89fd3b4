"""Modules that another library imports, loaded when something of them is needed.

KerasHub imports TensorFlow and its operations on text when it is imported itself,
although it only needs them for `tf.data`. On JAX and PyTorch that takes as long as all
other imports, and more memory than these.
"""

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


class _LateModule(types.ModuleType):
    """Stands for a module, which an attribute that is not there loads."""

    def __init__(self, name: str, load: Callable[[str], Any], absent: Sequence[str]):
        super().__init__(name)
        # It is a package, whose submodules `_Submodules` finds.
        self.__path__ = []
        self._load, self._absent = load, absent

    def __getattr__(self, name):
        if name.startswith("__") or name in self._absent:
            raise AttributeError(name)
        return getattr(self._load(self.__name__), name)


class _LateAttribute:
    """Stands for a function or a submodule, which its use loads."""

    def __init__(self, module: str, name: str, load: Callable[[str], Any]):
        self._parts = module, name
        self._load = load

    def _get(self):
        module, name = self._parts
        with contextlib.suppress(AttributeError):
            return getattr(self._load(module), name)
        return self._load(f"{module}.{name}")

    def __call__(self, *args, **kwargs):
        return self._get()(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._get(), name)


class _Submodules:
    """Finds the submodules of stand-ins, by loading the modules themselves."""

    def __init__(self, standins: Mapping[str, Any], load: Callable[[str], Any]):
        self._standins, self._load = standins, load
        self._spec = None

    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        standin = self._standins.get(root)
        if standin is None or sys.modules.get(root) is not standin:
            return None
        module = self._load(name)
        # It is not made again: a second copy would register all that it has a second
        # time. `import` takes the spec of the module where there is one.
        self._spec = module.__spec__
        module.__spec__ = importlib.util.spec_from_loader(name, self)
        return module.__spec__

    def create_module(self, spec):
        return sys.modules[spec.name]

    def exec_module(self, module):
        module.__spec__ = self._spec


@contextlib.contextmanager
def loaded_on_demand(
    modules: Mapping[str, Sequence[str]], absent: Sequence[str] = ()
) -> Iterator[None]:
    """A context in which `import` does not load some modules before they are needed.

    They are loaded when any of their attributes is looked up, but for a few that may be
    looked up at import time, and are needed when they are used. Nothing is delayed
    where one of the modules is loaded already, or is not installed.

    Behind the context, imports are as ever; code that was imported within it keeps
    stand-ins of the modules.
    """
    roots = {name for name in modules if "." not in name}
    if any(name in sys.modules or not _is_installed(name) for name in roots):
        yield
        return

    def remove():
        for name, module in standins.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def load(name):
        remove()
        # Code that was imported in the context may look them up from now on.
        for module in standins.values():
            module._absent = ()
        return importlib.import_module(name)

    standins = {name: _LateModule(name, load, absent) for name in modules}
    for name, attributes in modules.items():
        for attribute in attributes:
            setattr(standins[name], attribute, _LateAttribute(name, attribute, load))
    finder = _Submodules(standins, load)
    sys.modules.update(standins)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        remove()


def _is_installed(name):
    """Whether a module has a file: an empty folder that is left of one has none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
