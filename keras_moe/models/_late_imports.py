"""Defers imports inside another library until they are needed.

Importing KerasHub imports TensorFlow and TensorFlow Text, which it only needs for
`tf.data`. On JAX and PyTorch that would double the import time and memory.
"""

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


class _LateModule(types.ModuleType):
    """Placeholder of a module; accessing a missing attribute loads the module."""

    def __init__(self, name: str, load: Callable[[str], Any], absent: Sequence[str]):
        super().__init__(name)
        # Marks a package, so that `_Submodules` finds its submodules.
        self.__path__ = []
        self._load, self._absent = load, absent

    def __getattr__(self, name):
        if name.startswith("__") or name in self._absent:
            raise AttributeError(name)
        return getattr(self._load(self.__name__), name)


class _LateAttribute:
    """Placeholder of a function or submodule, loaded when used."""

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
    """Finder that loads the real submodules of placeholder modules."""

    def __init__(self, standins: Mapping[str, Any], load: Callable[[str], Any]):
        self._standins, self._load = standins, load
        self._spec = None

    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        standin = self._standins.get(root)
        if standin is None or sys.modules.get(root) is not standin:
            return None
        module = self._load(name)
        # Do not load it twice: a second copy would register everything again. `import`
        # uses the module's own spec if there is one.
        self._spec = module.__spec__
        loader: Any = self
        module.__spec__ = importlib.util.spec_from_loader(name, loader)
        return module.__spec__

    def create_module(self, spec):
        return sys.modules[spec.name]

    def exec_module(self, module):
        module.__spec__ = self._spec


@contextlib.contextmanager
def loaded_on_demand(
    modules: Mapping[str, Sequence[str]], absent: Sequence[str] = ()
) -> Iterator[None]:
    """Defers imports within the context to the first use of an unlisted attribute."""
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
        # Code imported in the context may load them from now on.
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
    """Whether a module has a file, not only a leftover empty folder."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
