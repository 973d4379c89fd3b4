"""The report of a conversion, tensor by tensor."""

import os
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from keras_moe.files import write_json


class ConvertedWeight(NamedTuple):
    """A weight of the model, and the tensors that it was made of.

    Attributes:
        weight: path of the weight in the model.
        shape: shape of the weight.
        sources: shapes of the tensors that were read, by name.
        how: steps from the tensors to the weight, in a few words.
    """

    weight: str
    shape: tuple[int, ...]
    sources: dict[str, tuple[int, ...]]
    how: str


class ConversionReport(NamedTuple):
    """The report of a conversion.

    Attributes:
        source: name of the source.
        scheme: naming scheme, which says who published the weights.
        licence: licence of the weights, as far as it follows from the scheme.
        backbone: class of the backbone.
        arguments: arguments of the backbone, as the source has them.
        weights: a `ConvertedWeight` for each weight that was filled.
        new: weights that keep their initial values, such as those of a new head.
        ignored: tensors of the source that no weight takes, with the reason.
        notes: remarks for the user.
        nbytes: bytes of all tensors that were read.
    """

    source: str
    scheme: str
    licence: str
    backbone: str
    arguments: dict
    weights: list[ConvertedWeight]
    new: list[str]
    ignored: dict[str, str]
    notes: list[str]
    nbytes: int

    def to_dict(self) -> dict:
        """A JSON-serialisable dict."""
        content = self._asdict()
        content["weights"] = [weight._asdict() for weight in self.weights]
        return content

    def save(self, path: str | os.PathLike) -> None:
        """Writes the report as JSON."""
        write_json(path, self.to_dict())

    def print(self, console: Console | None = None) -> None:
        """Prints a table of all weights, and the tensors that were left out."""
        console = console or Console()
        table = Table(title=f"{self.source}: {self.scheme}, {self.licence}")
        for column in ("weight", "shape", "from", "how"):
            table.add_column(column, overflow="fold")
        for weight in self.weights:
            sources = "\n".join(
                f"{name} {list(shape)}" for name, shape in weight.sources.items()
            )
            table.add_row(weight.weight, str(list(weight.shape)), sources, weight.how)
        for name in self.new:
            table.add_row(name, "", "", "new: initial values")
        console.print(table)
        reasons = {}
        for reason in self.ignored.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        for reason, count in reasons.items():
            console.print(f"left out: {count} tensors, {reason}", markup=False)
        for note in self.notes:
            console.print(f"note: {note}", markup=False)


_GOOGLE, _PER_MODEL = "Apache-2.0", "as its model card says"
_LICENCES = {
    "(Google)": _GOOGLE,
    "(timm)": f"{_PER_MODEL} (mostly Apache-2.0)",
    "(OpenCLIP)": f"{_PER_MODEL} (OpenAI's: MIT)",
    "(transformers)": f"{_PER_MODEL} (OpenAI's: MIT)",
    "(KerasHub)": f"{_PER_MODEL} (per preset)",
}


def licence(scheme: str) -> str:
    """The licence of the weights of a scheme."""
    return next(text for end, text in _LICENCES.items() if scheme.endswith(end))
