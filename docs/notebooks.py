"""Guides as the site shows them: set-up and alternative texts hidden, plots folded."""

import re

_SET_UP = "# Installs keras_moe"
# The alternative text of a picture, as `tools/guides.py` reads it.
_PICTURE = re.compile(r"\A# Picture: .*(?:\n# .*)*\n")
# What a reader of a guide came for.
_LIBRARY = re.compile(r"\b(models|data|training|analysis|evaluation)\.\w+\(|\.fit\(")
_GITHUB = "https://github.com/"
_COLAB = "https://colab.research.google.com/github/"


def for_site(guide: dict, name: str, repository: str) -> dict:
    """Returns a notebook's content for the site.

    Args:
        guide: content of the notebook.
        name: name of its file.
        repository: address of the repository; on GitHub the guide links to Colab.
    """
    for cell in guide["cells"]:
        if cell["cell_type"] != "code":
            continue
        code, tags = "".join(cell["source"]), []
        if code.startswith(_SET_UP):
            tags = ["remove-input"]
        elif _PICTURE.match(code):
            code = _PICTURE.sub("", code)
            tags = [] if _LIBRARY.search(code) else ["hide-input"]
        cell["source"] = code.splitlines(keepends=True)
        cell["metadata"]["tags"] = [*cell["metadata"].get("tags", []), *tags]
    if repository.startswith(_GITHUB):
        path = repository.removeprefix(_GITHUB).strip("/")
        link = f"{_COLAB}{path}/blob/main/guides/{name}"
        first = guide["cells"][0]
        text = "".join(first["source"])
        first["source"] = f"{text}\n\n[Open in Colab]({link})".splitlines(keepends=True)
    return guide
