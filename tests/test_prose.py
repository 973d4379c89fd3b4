"""Docstrings, comments and names read as the field writes: a few rules, enforced."""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.backend_free

# The folders whose prose is checked.
CHECKED = ("keras_moe", "tools", "tests", "guides")
# A sentence begins with its subject.
SENTENCE = re.compile(r"(?:^|[.!?][\"')`]*\s)((?:Of|What|As)\s\S*)")
# An entry of `Args` begins with a noun and its article, and with none of these words.
PREPOSITIONS = """
about above after against as at before behind below between by during for from if in
inside into like of on once onto outside over per since than through to under until upon
when where while with within without
"""
# `whether` is none of them.
QUESTIONS = "how what which who whom whose why"
VERBS = """
also applies are asks be can chooses comes computes counts decides divides does drops
ends fills gets gives goes has have is keeps leaves likewise limits lists made makes may
means must named needs not only puts reads replaces returns said saves says see sets
should shows stands starts stops takes tells turns used uses was were will works writes
"""
NO_NOUNS = frozenset(f"{PREPOSITIONS} {QUESTIONS} {VERBS}".split())
# Words that say nothing of what a variable holds.
NO_NAMES = frozenset({"found", "given", "ours", "said", "told"})


def paragraphs(text: str) -> Iterator[str]:
    """Yields the paragraphs and list entries of a text, each as one line."""
    lines = []
    for line in [*inspect.cleandoc(text).splitlines(), ""]:
        starts = re.match(r"\s*(?:[-*|]|\d+\.|\**[\w.]+:|>>>|\.\.\.|```)(?:\s|$)", line)
        if lines and (starts or not line.strip()):
            yield " ".join(lines)
            lines = []
        if line.strip():
            lines.append(line.strip())


def argument_entries(docstring: str) -> Iterator[tuple[str, str]]:
    """Yields the names and descriptions below `Args:` and `Call arguments:`."""
    section = indent = None
    for line in inspect.cleandoc(docstring).splitlines():
        if re.match(r"\S", line):
            section = (
                line if re.match(r"(Args|Call arguments|Fields):$", line) else None
            )
            indent = None
        elif section and line.strip():
            own = len(line) - len(line.lstrip())
            indent = indent or own
            entry = re.match(r"\s+(\**\w+(?:, \**\w+)*):(?:\s+(.*))?$", line)
            if own == indent and entry:
                yield entry.group(1), entry.group(2) or ""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the docstrings of a file with their lines."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node, clean=False)):
            yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields the comments of a file; lines that follow each other are one."""
    first, last, column, words = 0, -1, None, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, start = token.start
        text = token.string.lstrip("#").strip()
        alone = not token.line[:start].strip()
        if alone and line == last + 1 and start == column:
            words.append(text)
        else:
            if words:
                yield first, " ".join(words)
            first, words = line, [text]
        last, column = (line, start) if alone else (-1, None)
    if words:
        yield first, " ".join(words)


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the names that a file gives to variables, arguments and functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            if isinstance(node.ctx, ast.Store):
                yield node.lineno, getattr(node, "id", None) or node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)):
            yield node.lineno, node.name or ""


def complaints(source: str) -> list[str]:
    """Returns a line for each breach of the rules in a Python file."""
    tree = ast.parse(source)
    lines = []
    for line, text in [*docstrings(tree), *comments(source)]:
        for paragraph in paragraphs(text):
            for opening in SENTENCE.findall(paragraph):
                lines.append((line, f"a sentence begins with {opening!r}"))
    for line, text in docstrings(tree):
        for name, entry in argument_entries(text):
            word = re.match(r"[a-z]+(?![\w(])", entry)
            if word and word.group() in NO_NOUNS:
                lines.append((line, f"Args: {name} begins with {word.group()!r}"))
    for line, name in names(tree):
        if name.strip("_") in NO_NAMES:
            lines.append((line, f"the name {name!r}"))
    return [f"{line}: {reason}" for line, reason in sorted(lines)]


def checked_files() -> list[Path]:
    """Returns the Python files that are checked."""
    return sorted(file for folder in CHECKED for file in (ROOT / folder).rglob("*.py"))


def test_docstrings_comments_and_names():
    breaches = [
        f"{path.relative_to(ROOT)}:{complaint}"
        for path in checked_files()
        for complaint in complaints(path.read_text(encoding="utf-8"))
    ]
    assert breaches == []


def test_documentation():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    breaches = []
    for path in sorted(pages):
        text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.S | re.M)
        for paragraph in paragraphs(text):
            plain = re.sub(r"^(?:#+|[-*]|\|) ", "", paragraph)
            breaches += [f"{path.name}: {x}" for x in SENTENCE.findall(plain)]
    assert breaches == []


GOOD = '''
"""As-is code is no sentence's beginning; Officers and Whatnot neither. As_x()."""

def function(a, b, *args, **kwargs):
    """Does nothing, as others do. It ends here.

    Args:
        a: seed of the noise.
        b: (N,) labels, or None.
        *args: `"gelu"`, or any that Keras knows.
        **kwargs: arguments of `keras.layers.Layer`.
            See there.

    Returns:
        Of: this section is free.
    """
    foundation = a  # It is founded.
'''


def test_plain_prose_has_no_breach():
    assert complaints(GOOD) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Of all.\n"""', "1: a sentence begins with 'Of all.'"),
        ('"""One. What is this?\n"""', "1: a sentence begins with 'What is'"),
        ('"""One.\n\nAs others.\n"""', "1: a sentence begins with 'As others.'"),
        ("x = 1\n# One `a.b`.\n# As in b.", "2: a sentence begins with 'As in'"),
        ("x = 1  # Of the model.", "1: a sentence begins with 'Of the'"),
        ("found = 1", "1: the name 'found'"),
        ("def f(told): pass", "1: the name 'told'"),
        ("for said in x: pass", "1: the name 'said'"),
        ("self._given = 1", "1: the name '_given'"),
        ("[ours for ours in x]", "1: the name 'ours'"),
        (
            'def f(a):\n    """F.\n\n    Args:\n        a: of it.\n    """',
            "2: Args: a begins with 'of'",
        ),
        (
            'def f(a):\n    """F.\n\n    Call arguments:\n        a: how.\n    """',
            "2: Args: a begins with 'how'",
        ),
    ],
)
def test_a_planted_breach_is_seen(source, expected):
    assert complaints(source) == [expected]
