"""The repository's files, apart from the behaviour of the code."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from keras_moe import __version__
from tests.forks import ROOT

MEBIBYTE = 2**20


def repository_files() -> list[Path]:
    """Returns the files that git tracks, or would track if they were added."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    paths = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_stray_and_no_big_files():
    suffixes = (".pyc", ".pyo", ".orig", ".rej", ".swp", ".DS_Store", ".whl")
    folders = {"__pycache__", ".venv", "build", "dist", "node_modules"}
    for path in repository_files():
        parts = path.relative_to(ROOT).parts
        assert not path.name.endswith(suffixes), path
        assert folders.isdisjoint(parts), path
        assert not any(part.endswith(".egg-info") for part in parts), path
    for path in repository_files():
        assert path.stat().st_size <= largest(path), path


def largest(path):
    """The weights of a trained preset have 2 MB at most, all other files a MiB."""
    folders = ROOT / "presets", ROOT / "packages/keras-moe-emoji/keras_moe_emoji"
    is_weights = path.parents[1] in folders and path.suffix == ".h5"
    return 2_000_000 if is_weights else MEBIBYTE


def test_versions_agree():
    for name, pattern in {
        "CITATION.cff": r"^version: (\S+)$",
        "CHANGELOG.md": r"^## (\S+)",
        "README.md": r"version = \{(\S+)\}",
        "packages/keras-moe-emoji/pyproject.toml": r'^version = "(\S+)"',
    }.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert re.search(pattern, text, re.M).group(1) == __version__, name
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    # One day of the release, or none before it; the library's own licence.
    day = re.search(r"^## \S+ (?:- (\S+)|\(unreleased\))$", changes, re.M).group(1)
    assert str(citation.get("date-released")) == str(day)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["license"].split(" AND ")[0] == citation["license"]
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    content = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    repository, local = content["repos"]
    pinned = re.search(r'"ruff==(.+?)"', (ROOT / "pyproject.toml").read_text())
    assert repository["rev"] == f"v{pinned.group(1)}"
    assert [hook["id"] for hook in local["hooks"]] == ["basedpyright"]


def test_nothing_is_installed_from_an_index_that_lacks_it():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    for folder in ("keras_moe", "guides", "tools"):
        pages += (ROOT / folder).rglob("*.py")
    for page in pages:
        text = page.read_text(encoding="utf-8")
        found = re.search(r"pip install (-\S+ )*[\"']?keras[-_]moe(?![-/\w])", text)
        assert found is None, page


def test_links_between_pages_lead_somewhere_and_every_page_is_listed():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "llms.txt"]
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            is_there = target.startswith("http") or (page.parent / target).exists()
            assert is_there, f"{page.name}: {target}"
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    # The contents of the site.
    pages.remove("docs/index.md")
    assert pages - set(re.findall(r"\]\(([^)]+)\)", text)) == set()


def test_workflows_call_the_makefile():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    (workflow,) = (ROOT / ".github/workflows").glob("*.yml")
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    assert set(jobs) == {"lint", "suite", "release", "newest", "lowest", "docs"}
    for job in jobs.values():
        (command,) = (step["run"] for step in job["steps"] if "run" in step)
        make, target, *_ = command.split()
        assert make == "make"
        assert target in targets


# Stands in for make: the outcomes of the suite, the release and the two ends.
MAKE = """#!/bin/sh
case "$1" in
  test) echo "[torch] 9 passed in 2.00s"; echo "20 passed, 3 skipped in 3.20s" ;;
  test-release) echo "5 passed in 4.00s" ;;
  test-newest) echo "!!! LACKED Python 3.13, tried: nothing" >&2 ;;
  test-lowest) echo "1 failed, 7 passed, 1 error in 61.00s (0:01:01)" ;;
esac
[ "$1" != "$BROKEN" ]
"""


@pytest.mark.parametrize("broken", ["", "-lowest", None])
def test_ci_adds_up_its_runs(tmp_path, broken):
    (tmp_path / "make").write_text(MAKE)
    (tmp_path / "make").chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    environment = {"PATH": path, "KERAS_MOE_BROWSER": "none", "BROKEN": f"test{broken}"}
    options = {"env": {**os.environ, **environment}, "capture_output": True}
    done = subprocess.run(["bash", ROOT / ".ci/run"], text=True, **options)
    assert done.returncode == (broken is not None), done.stderr
    *lines, lacked, last = done.stdout.splitlines()
    assert last == "32 passed, 2 failed, 3 skipped"
    assert lacked == "!!! LACKED Python 3.13, tried: nothing"
    assert "[lowest] 1 failed, 7 passed, 1 error in 61.00s (0:01:01)" in lines
