"""Submodules of other libraries are there when an attribute reads them.

`import library` need not load `library.part`, and in a process where something else has
loaded it nobody notices.
"""

import ast
from collections import defaultdict
from importlib.machinery import PathFinder

from tests.forks import ROOT, run_python

# Their namespaces are documented, and every process of ours uses them.
NAMESPACES = ("keras", "keras_hub", "keras_moe", "tools")


def is_submodule(name):
    """Whether a library has such a submodule on disk; imports nothing."""
    path = None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return False
        # None, of a module that is no package, would mean the whole of `sys.path`.
        path = spec.submodule_search_locations or []
    return "." in name


def submodules_read(source):
    """Yields the submodules that a file reads as attributes without an import."""
    tree, names, imported = ast.parse(source), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                names[alias.asname or root] = alias.name if alias.asname else root
                imported.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = name
                imported.add(name)
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in names:
            name = ".".join([names[node.id], *parts])
            is_imported = any(f"{x}.".startswith(f"{name}.") for x in imported)
            if not is_imported and is_submodule(name):
                yield name


def failure(library, submodules):
    """The last line of a fresh process that imports a library and reads submodules."""
    lines = [f"import {library}", *sorted(submodules)]
    done = run_python("-c", "\n".join(lines))
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def test_submodules_are_imported_or_come_with_their_library():
    read = defaultdict(set)
    for folder in ("keras_moe", "tools", "guides", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in submodules_read(path.read_text(encoding="utf-8")):
                read[name.partition(".")[0]].add(name)
    for library in read.keys() - set(NAMESPACES):
        assert failure(library, read[library]) is None, library
    assert "numpy" in read
