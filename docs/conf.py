"""Sphinx's configuration of the documentation site: `make docs`."""

import inspect
import json
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
# The pages describe the library alike for each backend; this one imports fastest.
os.environ.setdefault("KERAS_BACKEND", "torch")

from docstrings import restructured  # noqa: E402
from notebooks import for_site  # noqa: E402

from keras_moe import __version__, models  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = PROJECT["project"]["urls"]["Repository"]
# The classes of the zoo by what they are; the others are helpers.
KINDS = {
    title: [
        name
        for name in models.__all__
        if inspect.isclass(cls := getattr(models, name)) and issubclass(cls, base)
    ]
    for title, base in (("Backbones", models.MoEBackbone), ("Tasks", models.MoETask))
}

project = "keras_moe"
author = "The keras_moe authors"
copyright = f"2026, {author}"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "_templates"]
# Pages of the repository that the site has, too.
PAGES = ("CHANGELOG", "CONTRIBUTING", "SECURITY")
# Pages below another one, which the left column shows.
SECTIONS = {
    "routers": ("moe_plus_plus", "mumoe", "paper_to_code"),
    "training": ("data", "evaluation", "analysis", "devices", "troubleshooting"),
    "weights": ("image_text", "keras", "coming_from"),
}
templates_path = ["_templates"]

# Pages

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"
copybutton_exclude = ".linenos, .gp, .go"

# Docstrings: backticks link where they name an object, and are code where not.

default_role = "py:obj"
autosummary_generate = True
autosummary_context = {"kinds_of_classes": {"keras_moe.models": KINDS}}
autosummary_ignore_module_all = False
autosummary_imported_members = True
autodoc_member_order = "bysource"
autodoc_typehints = "both"
autodoc_typehints_description_target = "documented_params"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Fields of named tuples and dataclasses are members already.
napoleon_use_ivar = True
napoleon_custom_sections = [
    ("Call arguments", "params_style"),
    "Input shape",
    "Output shape",
    ("Fields", "params_style"),
    ("Reference", "notes_style"),
]
nitpicky = True
nitpick_ignore_regex = [
    # Code in backticks that is no object of this library.
    (r"py:obj", r"(?s).*"),
    (r"py:exc", r"\w+"),
    # No inventory of another library is fetched.
    (r"py:.*", r"(keras|keras_hub|numpy|np|rich|tf|tensorflow|torch|jax)\..*"),
    (r"py:.*", r"(abc|collections|os|pathlib|typing|argparse|contextlib|types)\..*"),
    (r"py:class", r"(Model|Rank|Structure|Tensor|matplotlib\..*)"),
    (r"py:class", r"(Any|Callable|Console|Iterable|Iterator|Mapping|Path|Sequence)"),
    # Base classes and records that are no public names.
    (r"py:class", r"keras_moe\.\w+(\.\w+)+"),
]

# Appearance

html_theme = "pydata_sphinx_theme"
html_title = f"keras_moe {version}"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Pages without others beside them get the room.
html_sidebars = {
    name: []
    for name in ("index", "zoo", "studies", "numerics", "performance", "repository/**")
}
html_theme_options = {
    "navbar_align": "left",
    "show_toc_level": 2,
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    # No request to another site.
    "use_edit_page_button": False,
}


def with_copies(app, config):
    """Copies notebooks and pages into the site's folder: Sphinx reads no other."""
    for folder in ("guides", "repository"):
        shutil.rmtree(ROOT / "docs" / folder, ignore_errors=True)
        (ROOT / "docs" / folder).mkdir()
    for path in sorted((ROOT / "guides").glob("*.ipynb")):
        guide = json.loads(path.read_text(encoding="utf-8"))
        guide = for_site(guide, path.name, REPOSITORY)
        copy = ROOT / "docs" / "guides" / path.name
        copy.write_text(json.dumps(guide), encoding="utf-8")
    for name in PAGES:
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
        # From the folder of the copy, a link's path begins one folder higher.
        text = re.sub(r"\]\((?!https?:|#)", "](../", text)
        copy = ROOT / "docs" / "repository" / f"{name.lower()}.md"
        copy.write_text(text, encoding="utf-8")


def with_links_of_the_site(app, docname, source):
    """Gives links to files of the repository their places in the site."""
    text = source[0].replace("](../docs/", "](/").replace("REPOSITORY", REPOSITORY)
    for name in PAGES:
        text = text.replace(f"](../{name}.md", f"](/repository/{name.lower()}.md")
    text = re.sub(r"\]\(\.\./(guides/\w+)\.(py|ipynb)\)", r"](/\1.ipynb)", text)
    if not docname.startswith("repository/"):
        # Files that the site does not have are named, without a link.
        text = re.sub(r"\[([^]]*)\]\(\.\./[^)]*\)", r"`\1`", text)
    else:
        text = re.sub(r"\[([^]]*)\]\(\.\./\w+/[^)]*\)", r"`\1`", text)
    if docname in SECTIONS:
        text += "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(SECTIONS[docname])
        text += "\n```\n"
    source[0] = text


def with_restructured_text(app, what, name, obj, options, lines):
    """Gives napoleon the docstring without Markdown."""
    lines[:] = restructured(lines)


def with_constructor(app, what, name, obj, options, signature, return_annotation):
    """Gives a Keras class its constructor's arguments, which `__new__` hides."""
    if what != "class" or signature != "(*args, **kwargs)":
        return None
    arguments = list(inspect.signature(obj.__init__).parameters.values())[1:]
    shown = inspect.Signature([x.replace(annotation=x.empty) for x in arguments])
    return str(shown), None


def setup(app):
    app.connect("autodoc-process-signature", with_constructor)
    # Before napoleon, which has the priority 500.
    app.connect("autodoc-process-docstring", with_restructured_text, priority=400)
    app.connect("config-inited", with_copies)
    app.connect("source-read", with_links_of_the_site)
