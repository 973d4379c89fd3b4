"""Makes the guides' notebooks from their sources, and runs them for their outputs.

    python -m tools.guides [NAME ...] [--all] [--check]

A source in jupytext's percent format is `guides/NAME.py`; its notebook, which GitHub
and the site show, is `guides/NAME.ipynb` with its outputs. A notebook keeps a digest of
the code that its outputs were made by, without comments; times of files decide nothing.
Where the code is another by now, the notebook runs from its first cell to its last, in
an empty folder; otherwise only its prose and comments are renewed, and a notebook that
is as its source says stays as it is, byte for byte. `--all` runs all of them, and
`--check` changes nothing: it lists the notebooks that are older than their source, and
exits with 1 if there are any.

Outputs come out alike on the same machine: no times, addresses or paths of files, cells
numbered from 1, and pictures with a palette, which makes them a third as large.

A cell that draws a picture begins with a comment, `# Picture: ...`, that says what the
picture shows. It is there for who reads the notebook, and goes into the output's
metadata as the alternative text.
"""

import argparse
import ast
import base64
import hashlib
import io
import json
import os
import re
import sys
import tempfile
import tokenize
import tomllib
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
GUIDES = ROOT / "guides"
# The first code cell of every guide, which differs in its extras alone.
SET_UP = """\
# Installs keras_moe if it is missing (in Colab, for example), from a clone around or
# next to this notebook. Set KERAS_BACKEND before you import Keras.
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

EXTRAS = "{extras}"
if getattr(find_spec("keras_moe"), "origin", None) is None:
    clones = [x for x in ("..", "./keras_moe") if os.path.isdir(f"{{x}}/keras_moe/cli")]
    if not clones:
        raise ImportError("Clone the repository of keras_moe next to this notebook")
    target = f"{{clones[0]}}[{{EXTRAS}}]"
    command = [sys.executable, "-m", "pip", "install", "-q", target]
    subprocess.run(command, check=True)
backend = "jax"  # uses a TPU or GPU if there is one
if shutil.which("nvidia-smi") and find_spec("torch"):
    import jax

    backend = "torch" if jax.default_backend() == "cpu" else "jax"
os.environ.setdefault("KERAS_BACKEND", backend)
# Tests set this for smaller and shorter runs.
SMALL = os.environ.get("KERAS_MOE_GUIDE_SMALL") == "1"
"""
# A notebook is read in a browser and kept in the repository.
LARGEST = 300_000
WIDEST = 1200
# The folders at the root of the file systems of Linux, macOS and Colab.
PATHS = re.compile(
    r"(?<![\w.:/~-])/(?:content|home|mnt|opt|private|root|srv|tmp|usr|Users|var|work)/"
    r"|[A-Z]:\\"
)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
# The comment that says what a cell's picture shows.
PICTURE = re.compile(r"\A# Picture: (.*(?:\n# .*)*)")
# Calls at the outermost level of a cell that a reader sees something of.
SHOWING = re.compile(r"print\w*|display|show\w*|draw\w*|table\w*")


def read_source(path: Path) -> nbformat.NotebookNode:
    """The cells of a source as a notebook without outputs, as it is committed."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        digest = hashlib.sha256(cell.source.encode()).hexdigest()
        cell.id = f"{number:02d}-{digest[:8]}"
        cell.metadata = nbformat.NotebookNode()
    if badge := colab_badge(path.stem, repository()):
        notebook.cells[0].source = f"{badge}\n\n{notebook.cells[0].source}"
    notebook.metadata = python_metadata()
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def python_metadata() -> nbformat.NotebookNode:
    """The metadata of every notebook: not the version of Python that ran it."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.from_dict(
        {"kernelspec": kernel, "language_info": {"name": "python"}}
    )


def repository() -> str:
    """The address of the repository that pyproject.toml names, or ""."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return settings["project"].get("urls", {}).get("Repository", "")


def colab_badge(name: str, address: str) -> str:
    """Markdown that opens a guide in Colab, or "" if GitHub does not have it.

    Args:
        name: name of the guide.
        address: address of the repository.
    """
    match = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", address)
    if not match:
        return ""
    colab = "https://colab.research.google.com"
    link = f"{colab}/github/{match.group(1)}/blob/main/guides/{name}.ipynb"
    return f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({link})"


def code_digest(notebook: nbformat.NotebookNode) -> str:
    """The digest of the code cells of a notebook, in their order, without comments."""
    code = [without_comments(cell.source) for cell in code_cells(notebook)]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def without_comments(source: str) -> str:
    """A cell's code without comments, which change no output."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip() or None
    return "\n".join(line for line in lines if line is not None)


def is_stale(name: str) -> bool:
    """Whether the outputs of a notebook were made by other code than its source's."""
    path = GUIDES / f"{name}.ipynb"
    if not path.exists():
        return True
    made_by = nbformat.read(path, 4).metadata.get("keras_moe", {}).get("code_digest")
    return made_by != code_digest(read_source(GUIDES / f"{name}.py"))


def make(name: str, execute: bool) -> list[str]:
    """Writes the notebook of a guide.

    Args:
        name: name of the guide.
        execute: whether to run the cells; otherwise the outputs are kept.

    Returns:
        A line for each output that must not be committed; see `complaints`.
    """
    path = GUIDES / f"{name}.ipynb"
    notebook = read_source(GUIDES / f"{name}.py")
    if execute:
        run(notebook)
        normalise(notebook)
        digest = code_digest(notebook)
        backend = os.environ["KERAS_BACKEND"]
        notebook.metadata["keras_moe"] = {"code_digest": digest, "backend": backend}
    else:
        before = nbformat.read(path, 4)
        notebook.metadata["keras_moe"] = before.metadata["keras_moe"]
        for cell, old in zip(code_cells(notebook), code_cells(before)):
            cell.outputs, cell.execution_count = old.outputs, old.execution_count
    describe_pictures(notebook)
    nbformat.write(notebook, path)
    return complaints(notebook)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The code cells of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def picture_text(source: str) -> str:
    """The text for those who cannot see a cell's picture, or "" without one."""
    match = PICTURE.match(source)
    return " ".join(match.group(1).replace("\n# ", " ").split()) if match else ""


def describe_pictures(notebook: nbformat.NotebookNode) -> None:
    """Puts the cells' texts where programs look for pictures' alternative texts.

    Nbconvert, nbviewer and Colab read the output's metadata, myst-nb the cell's.
    """
    for cell in code_cells(notebook):
        text = {"alt": picture_text(cell.source)}
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                output.metadata = nbformat.from_dict({"image/png": text})
                cell.metadata = nbformat.from_dict({"mystnb": {"image": text}})


def run(notebook: nbformat.NotebookNode) -> None:
    """Runs all cells of a notebook in an empty folder, with this checkout's library."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    # Lines of the terminal's width would differ from machine to machine.
    os.environ["COLUMNS"] = "88"
    # PyTorch's idle threads would spin, and stand still beside other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["PYTHONPATH"] = str(ROOT)
    for variable in ("KERAS_MOE_GUIDE_SMALL", "MPLBACKEND"):
        os.environ.pop(variable, None)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=1200,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute()


def normalise(notebook: nbformat.NotebookNode) -> None:
    """Leaves nothing in the outputs that differs from run to run.

    A terminal's colours go, too, which no page shows; lines for the error stream, such
    as a compiler's warnings, go to this program's.
    """
    notebook.metadata = python_metadata()
    for number, cell in enumerate(code_cells(notebook), start=1):
        cell.execution_count = number
        outputs = []
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                sys.stderr.write(output.text)
            elif (
                output.output_type == "stream"
                and outputs[-1:]
                and (outputs[-1].output_type == "stream")
            ):
                outputs[-1].text += output.text
            else:
                outputs.append(output)
        for output in outputs:
            if "text" in output:
                output.text = COLOURS.sub("", output.text)
            if "execution_count" in output:
                output.execution_count = number
            if picture := output.get("data", {}).get("image/png"):
                output.data = nbformat.from_dict({"image/png": with_palette(picture)})
        cell.outputs = outputs
        cell.metadata = nbformat.NotebookNode()


def with_palette(png: str) -> str:
    """A picture of at most 256 colours and `WIDEST` pixels across.

    Args:
        png: picture in base64, as a notebook has it.
    """
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    picture = Image.alpha_composite(white, picture).convert("RGB")
    if picture.width > WIDEST:
        height = round(picture.height * WIDEST / picture.width)
        picture = picture.resize((WIDEST, height), Image.Resampling.LANCZOS)
    small = io.BytesIO()
    picture.quantize(256, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def complaints(notebook: nbformat.NotebookNode) -> list[str]:
    """A line for each cell whose outputs must not be committed."""
    lines = []
    for cell in code_cells(notebook):
        first = cell.source.partition("\n")[0]
        text = "".join(map(output_text, cell.outputs))
        pictures = sum("image/png" in x.get("data", {}) for x in cell.outputs)
        if pictures != bool(picture_text(cell.source)):
            lines.append(
                f"{pictures} pictures below {first!r}: expected one below a cell that "
                "begins with '# Picture: ...', and none below others"
            )
        if shows(cell.source) and not cell.outputs:
            lines.append(f"no output of the cell that begins with {first!r}")
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                lines.append(f"an error below {first!r}: {output_text(output)}")
        for pattern in (PATHS, ADDRESS):
            for line in text.splitlines():
                if pattern.search(line):
                    lines.append(f"a path or an address below {first!r}: {line}")
    size = len(nbformat.writes(notebook))
    if size > LARGEST:
        lines.append(f"{size / 1000:.0f} KB, which is more than {LARGEST / 1000:.0f}")
    return lines


def output_text(output: nbformat.NotebookNode) -> str:
    """The words of an output, whatever its kind."""
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}\n"
    data = output.data
    return "".join(f"{data[kind]}\n" for kind in sorted(data) if "text/" in kind)


def shows(source: str) -> bool:
    """Whether a cell ends with a value, or prints or draws at its outermost level."""
    body = ast.parse(source).body
    if (
        body
        and isinstance(body[-1], ast.Expr)
        and (not isinstance(body[-1].value, (ast.Call, ast.Constant)))
    ):
        return True
    definitions = (ast.FunctionDef, ast.ClassDef, ast.Lambda)
    waiting = [node for node in body if not isinstance(node, definitions)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if SHOWING.fullmatch(name):
                return True
        waiting += [
            x for x in ast.iter_child_nodes(node) if not isinstance(x, definitions)
        ]
    return False


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    every = sorted(path.stem for path in GUIDES.glob("*.py"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="guides; all of them")
    parser.add_argument("--all", action="store_true", help="run those in order, too")
    parser.add_argument("--check", action="store_true", help="only list what is older")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(every):
        parser.error(f"expected names of {every}; received: {sorted(unknown)}")
    wrong = False
    for name in args.names or every:
        stale = is_stale(name)
        if stale:
            print(f"guides/{name}.ipynb: outputs older than guides/{name}.py")
        if args.check:
            wrong |= stale
            continue
        if stale or args.all:
            print(f"guides/{name}.py: running", flush=True)
        for line in make(name, execute=stale or args.all):
            wrong = True
            print(f"guides/{name}.ipynb: {line}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
