"""Model cards: the README.md of a preset folder, in Hugging Face's format."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import keras_hub

from keras_moe._checks import check_number, check_one_of, unfit
from keras_moe._files import read_bytes, read_text, write_text
from keras_moe._types import KerasModel
from keras_moe.models import registry
from keras_moe.models._remote import get_file, named_errors
from keras_moe.models.loading.blueprint import Blueprint
from keras_moe.models.saving._preset_folder import check_folder, compare_preset

CARD = "README.md"
# A card without this line was written by the user and is kept.
MARK = (
    "<!-- Written by keras_moe. Without this line the page stays as it is when the "
    "preset is saved again. -->"
)
# Picture formats that browsers display inline.
_PICTURES = (".gif", ".jpeg", ".jpg", ".png", ".svg", ".webp")
# Arguments that do not describe the architecture.
_NO_ARCHITECTURE = ("name", "trainable", "dtype", "seed")


class CardResult(NamedTuple):
    """A measured result of a model.

    Attributes:
        metric: such as `"accuracy"`.
        value: the result.
        data: dataset, such as `"digits"`.
        split: split of the dataset.
    """

    metric: str
    value: float
    data: str
    split: str = "test"


# Licences that the Hub does not know by name.
_OTHER_LICENCES = ("psf-2.0",)


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Contents of a model card, in addition to architecture and costs.

    Args:
        name: title; defaults to the folder's name.
        description: a few sentences in Markdown.
        license: licence of the weights in Hugging Face's terms, such as `"apache-2.0"`.
        recipe: training settings by name, such as `Recipe.settings()`.
        data: name of the training data.
        base_model: preset or handle whose weights the training started from.
        base_license: licence of those, if known.
        attribution: authors and licence of the training data, in Markdown.
        results: list of `CardResult`.
        picture: path of a picture to copy into the folder.
        picture_text: alt text of the picture.
        tags: tags in addition to `"keras"` and, with experts, `"mixture-of-experts"`.

    Example:

    >>> import tempfile
    >>> from pathlib import Path
    >>> from keras_moe import models
    >>> model = models.from_preset("vmoe_digits")
    >>> card = models.ModelCard(
    ...     license="apache-2.0",
    ...     data="digits",
    ...     results=[models.CardResult("accuracy", 0.9867, "digits")],
    ... )
    >>> folder = Path(tempfile.mkdtemp()) / "my_digits"
    >>> model.save_to_preset(folder, card=card)
    >>> page = (folder / "README.md").read_text(encoding="utf-8")
    >>> "# my_digits" in page, "| accuracy | 0.9867 | digits, test |" in page
    (True, True)
    """

    name: str | None = None
    description: str = ""
    license: str | None = None
    recipe: Mapping[str, Any] | None = None
    data: str | None = None
    base_model: str | None = None
    base_license: str | None = None
    attribution: str = ""
    results: Sequence[CardResult] = ()
    picture: str | Path | None = None
    picture_text: str = "What the experts of the model do"
    tags: Sequence[str] = ()

    def __post_init__(self):
        if isinstance(self.tags, str):
            raise unfit("tags to be a list of strings", repr(self.tags))
        for result in self.results:
            check_number(result.metric, result.value)
        if self.picture is not None:
            check_one_of("picture", Path(self.picture).suffix.lower(), _PICTURES)

    def write(self, model: KerasModel, folder: Path, name: str) -> None:
        """Writes the card and its picture into a preset folder."""
        picture = None
        if self.picture is not None:
            picture = f"card{Path(self.picture).suffix.lower()}"
            shutil.copyfile(self.picture, folder / picture)
        # A path, since a bare name may be that of a built-in preset.
        text = self.text(model, self.name or name, picture, f"./{name}")
        write_text(folder / CARD, text)

    def text(
        self,
        model: KerasModel,
        name: str,
        picture: str | None = None,
        source: str | None = None,
    ) -> str:
        """Returns the card as Markdown with Hugging Face metadata."""
        settings = [("data", self.data), *(self.recipe or {}).items()]
        training = [(name, x) for name, x in settings if x not in (None, "")]
        results = [
            (x.metric, f"{x.value:.4g}", f"{x.data}, {x.split}") for x in self.results
        ]
        sections = [
            f"---\n{self._metadata(model, name)}\n---",
            f"# {_line(name)}",
            self.description
            or f"A `{type(model).__name__}` of keras_moe, for Keras on JAX, TensorFlow "
            "and PyTorch.",
            f"![{_line(self.picture_text)}]({picture})" if picture else "",
            _usage(source or name),
            _section("Architecture", ("argument", "value"), _architecture(model)),
            _section("Costs", ("", ""), _costs(model)),
            _section("Training", ("setting", "value"), training),
            _section("Results", ("metric", "value", "data"), results),
            "## Licence",
            f"The licence of the weights is {self.license}."
            if self.license
            else "The authors of the weights have named none.",
            self._base(),
            self.attribution,
            MARK,
        ]
        return "\n\n".join(section for section in sections if section) + "\n"

    def _metadata(self, model, name):
        from huggingface_hub import EvalResult, ModelCardData

        kind = getattr(model, "pipeline_tag", None)
        routing = getattr(model.backbone, "routing", None)
        experts = ["mixture-of-experts"] if routing else []
        results = [
            EvalResult(
                task_type=kind or "other",
                dataset_type=result.data,
                dataset_name=result.data,
                dataset_split=result.split,
                metric_type=result.metric,
                metric_value=float(f"{result.value:.4g}"),
            )
            for result in self.results
        ]
        return ModelCardData(
            library_name="keras_moe",
            **_licence(self.license),
            base_model=(self.base_model or "").partition("hf://")[2] or None,
            pipeline_tag=kind,
            tags=["keras", *experts, *self.tags],
            model_name=name if results else None,
            eval_results=results or None,
        ).to_yaml()

    def _base(self):
        if self.base_model is None:
            return ""
        licence = (
            f"is {self.base_license}" if self.base_license else "is not known here"
        )
        return (
            f"The training started from `{_line(self.base_model)}`, whose licence "
            f"{licence}."
        )


def write_card(
    model: KerasModel, folder: Path, target: Path, card: ModelCard | None
) -> None:
    """Writes a preset's card, unless the user wrote one."""
    page = target / CARD
    if card is None and page.is_file() and MARK.encode() not in read_bytes(page):
        return
    (card or ModelCard()).write(model, folder, target.name)


def licence_of(preset: str) -> str | None:
    """Returns the licence of a preset's weights, or None if it is not known."""
    listed = registry.preset(preset)
    if listed is not None:
        return listed["license"]
    import huggingface_hub

    try:
        card = read_text(Path(get_file(preset, CARD)))
        return huggingface_hub.ModelCard(card).data.to_dict().get("license")
    except Exception:
        # No card, or one by hand, is no reason to lose a run.
        return None


def _licence(name) -> dict[str, Any]:
    """The entries of a licence, which the Hub may not have on its list."""
    if name not in _OTHER_LICENCES:
        return {"license": name}
    return {"license": "other", "license_name": name, "license_link": "LICENSE"}


def _usage(source):
    source = json.dumps(source, ensure_ascii=False)
    return (
        "```python\nimport keras_moe\n\n"
        f"model = keras_moe.models.from_preset({source})"
        "  # or hf://USER/NAME\n"
        "```"
    )


def _architecture(model):
    backbone = model.backbone
    yield "class", type(model).__name__
    if backbone is not model:
        yield "backbone", type(backbone).__name__
        if getattr(model, "num_classes", None) is not None:
            yield "num_classes", model.num_classes
    yield from _arguments(backbone.get_config())


def _arguments(config, prefix=""):
    """Returns arguments that describe the architecture, nested ones dotted."""
    for name, value in config.items():
        if value is None or (name in _NO_ARCHITECTURE and prefix != "moe.router."):
            continue
        if isinstance(value, dict) and "class_name" not in value:
            yield from _arguments(value, f"{prefix}{name}.")
        elif isinstance(value, dict):
            yield f"{prefix}{name}", value["class_name"]
        else:
            yield f"{prefix}{name}", value


def _costs(model):
    yield "parameters", f"{model.count_params():,}"
    if not registry.is_registered(type(model.backbone)):
        return
    costs = Blueprint.of_model(model).describe()
    yield "active parameters of a token", f"{costs.active_parameters:,}"
    yield f"tokens of each {costs.example}", f"{costs.num_tokens:,}"
    yield f"GFLOPs of each {costs.example}, forward", f"{costs.gflops:.3g}"


def _section(title, header, rows):
    """A section with a table; empty without rows."""
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
    return f"## {title}\n\n{table}" if len(lines) > 2 else ""


def _cell(value):
    """Formats a value for a table cell: one line, no tags or bars."""
    text = " ".join(str(value).split())
    return text.replace("<", "&lt;").replace("|", "\\|")


def _line(text):
    """Formats a text as one line, with links and tags escaped."""
    text = " ".join(text.split()).replace("<", "&lt;")
    return text.replace("[", "\\[").replace("]", "\\]")


def upload(uri: str, preset_dir: str | os.PathLike) -> None:
    """Uploads a preset folder with its card to Hugging Face or Kaggle.

    Checks that the files are complete and the weights intact first.

    Args:
        uri: `"hf://USER/MODEL"` or `"kaggle://USER/MODEL/FRAMEWORK/VARIATION"`.
        preset_dir: folder written by `save_to_preset`.

    Example:

    >>> from keras_moe import models
    >>> models.upload("ftp://somewhere", "my_digits")
    Traceback (most recent call last):
    ...
    ValueError: Expected a URI like hf://USER/MODEL or kaggle://...
    """
    import huggingface_hub

    kind, _, name = uri.partition("://")
    num_parts = {"hf": 2, "kaggle": 4}.get(kind)
    if len(name.split("/")) != num_parts or "" in name.split("/"):
        raise ValueError(
            "Expected a URI like hf://USER/MODEL or "
            f"kaggle://USER/MODEL/FRAMEWORK/VARIATION; received: {uri!r}"
        )
    folder = Path(preset_dir).expanduser()
    check_folder(folder)
    compare_preset(folder)
    with named_errors(uri):
        if kind == "hf" and (folder / CARD).is_file():
            # First: KerasHub creates, and deletes, a missing one.
            created = huggingface_hub.create_repo(repo_id=name, exist_ok=True)
            huggingface_hub.upload_file(
                path_or_fileobj=folder / CARD,
                path_in_repo=CARD,
                repo_id=created.repo_id,
            )
        keras_hub.upload_preset(uri, str(folder))
