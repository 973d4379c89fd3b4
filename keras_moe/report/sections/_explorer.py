"""The routing of single examples. Axes: B batch, N tokens, E experts."""

from typing import NamedTuple

import numpy as np
from markupsafe import Markup, escape

from keras_moe.analysis.routing import of_patches
from keras_moe.report import _markup, section
from keras_moe.report.model import IMAGE, TEXT, ReportedModel, shortened

# Characters of the page for the script's data, and for maps without the script.
DATA_BUDGET, MAPS_BUDGET = 160_000, 110_000
# An entry has four bytes, 16 / 3 characters in base64.
_ENTRIES = DATA_BUDGET * 3 // 16
_LAYERS, _EXPERTS = 12, 8
# Number of static maps; the chooser shows the rest.
_MAPS = 36
# Largest image side in pixels, and bytes per image file and in total.
_SIDE, _BYTES, _ALL_BYTES = 128, 16_000, 240_000


class Example(NamedTuple):
    """What drawings need of an example."""

    image: np.ndarray | None  # (height, width, channels) in [-1, 1], or None
    caption: str | None  # Its caption, or None
    words: list[str] | None  # The strings of the caption's tokens, or None
    label: int | None  # Number of its class, or None
    predicted: int | None  # Number of the class of the largest output, or None
    # `TokenRouting` of patches or words by key.
    routing: dict[str, _markup.TokenRouting]

    def picture(self, number: int) -> str | None:
        """The id of its image on the page."""
        return None if self.image is None else f"example-{number}"


class Explorer(section.Section):
    """The section on each patch's and word's expert, layer by layer."""

    title = "One example, layer by layer"
    anchor = "explorer"
    intro = (
        "The number in a patch, or after a word, is the expert whose output has the "
        "largest weight there; a cross is a token that no expert serves. The colours "
        "repeat after eight experts. The slots of a soft expert are mixtures of all "
        "tokens; its maps show where it looks, by each patch's share in the slots."
    )

    @classmethod
    def fits(cls, model):
        return any(model.of_tokens(modality) for modality in (IMAGE, TEXT))

    def __init__(self, model, options):
        super().__init__(model, options)
        blocks = [*model.of_tokens(IMAGE), *model.of_tokens(TEXT)]
        self._blocks = {k: x for k, x in model.blocks.items() if x in blocks}
        # The keys of the records by layer and modality.
        self._layers = {}
        for key, block in self._blocks.items():
            self._layers.setdefault(block.block, {})[block.modality] = key
        self._reservoir = section.Reservoir.of_options(options)

    def update(self, batch):
        self._reservoir.offer(
            batch.size,
            lambda index: kept_example(self.model, [*self._blocks], batch, index),
        )

    def finish(self):
        examples, kept = _within_budget(self._reservoir.kept, self._blocks)
        names = {number: self._name(number, x) for number, x in examples.items()}
        data = _markup.json_script("explorer-data", self._data(examples, names, kept))
        maps, shown = self._maps(examples, names)
        text = (
            f"{len(examples)} of {self._reservoir.seen:,} examples, the first {shown} "
            "of them as maps; the chooser, which needs JavaScript, has all."
        )
        body = [
            section.Html(self._pictures(examples) + _markup.parts().chooser() + data),
            section.Html(maps),
            text,
        ]
        return section.SectionContent(body, {"examples": _routing_data(examples)})

    def _name(self, number, example):
        parts = [f"Example {number}"]
        for what, value in (("label", example.label), ("predicted", example.predicted)):
            if value is not None:
                parts.append(f"{what} {self.model.class_name(value)}")
        return ", ".join(parts)

    def _pictures(self, examples):
        """The images, once for all their maps."""
        if self.model.grid is None:
            return Markup("")
        rows, columns = self.model.grid
        most = min(_BYTES, _ALL_BYTES // max(len(examples), 1))
        images = {
            example.picture(number): _image_uri(example.image, most)
            for number, example in examples.items()
            if example.image is not None
        }
        cell = _markup.CELL
        return _markup.parts().pictures(images, cell * columns, cell * rows)

    def _data(self, examples, names, kept):
        layers = []
        for name, keys in self._layers.items():
            block = self._blocks[next(iter(keys.values()))]
            experts = [block.expert_name(e) for e in range(block.num_experts)]
            by_modality = {modality: kept[key] for modality, key in keys.items()}
            layer = {"name": name, "kind": block.kind, "experts": experts}
            layers.append({**layer, "kept": by_modality})
        return {
            "grid": self.model.grid,
            "cell": _markup.CELL,
            "colours": _markup.COLOURS,
            "layers": layers,
            "examples": [
                {
                    "name": names[number],
                    "image": example.picture(number),
                    "words": example.words or [],
                    "layers": [
                        {
                            modality: _markup.pack(example.routing[key], kept[key])
                            for modality, key in keys.items()
                        }
                        for keys in self._layers.values()
                    ],
                }
                for number, example in examples.items()
            ],
        }

    def _maps(self, examples, names):
        """The maps of the first examples, and their number."""
        blocks = self._blocks.values()
        colours, drawn, shown, count = Markup(""), Markup(""), 0, 0
        if not all(block.kind == "soft" for block in blocks):
            longest = max(blocks, key=lambda block: block.num_experts)
            colours = _markup.legend(
                [longest.expert_name(e) for e in range(longest.num_experts)]
            )
        for number, example in examples.items():
            markup = self._example_maps(number, example, names[number])
            count += markup.count("<svg ")
            if shown and (count > _MAPS or len(drawn + markup) > MAPS_BUDGET):
                break
            drawn, shown = drawn + markup, shown + 1
        maps = colours + Markup('<div class="examples">{}</div>').format(drawn)
        return maps, shown

    def _example_maps(self, number, example, name):
        image, grid = example.picture(number), self.model.grid or (1, 1)
        rows, chips = Markup(""), Markup("")
        if example.image is not None:
            whole = (grid, _markup.CELL, image, "the image", "The image")
            rows += _markup.parts().map(*whole)
        layers = list(self._layers.items())
        chosen = section.evenly_spaced(layers, _LAYERS)
        for layer, keys in chosen:
            for modality, key in keys.items():
                routing = example.routing[key]
                if modality == TEXT:
                    chips += _markup.word_chips(
                        routing.heaviest(), example.words or [], layer
                    )
                elif self._blocks[key].kind == "soft":
                    rows += _soft_maps(routing, grid, image, layer)
                else:
                    rows += _markup.expert_map(routing.heaviest(), grid, image, layer)
        if len(chosen) < len(layers):
            name = f"{name} ({len(chosen)} of {len(layers)} layers)"
        return _markup.parts().example(name, example.caption, rows, chips)


def _routing_data(examples):
    data = []
    for number, example in examples.items():
        fields = example._asdict()
        experts = {k: x.heaviest().tolist() for k, x in fields.pop("routing").items()}
        fields.pop("image")
        data.append({"number": number, **fields, "experts": experts})
    return data


def kept_example(
    model: ReportedModel, keys: list[str], batch: section.Batch, index: int
) -> Example:
    """Copies what drawings need of an example."""
    words, routing = None, {}
    if batch.words is not None:
        counts = np.asarray(batch.masks[TEXT][index], bool)
        words = [word for word, keep in zip(batch.words[index], counts) if keep]

    for key in keys:
        block = model.blocks[key]
        whole = _markup.token_routing(batch.routing[key], block.kind, index)
        if block.modality == IMAGE:
            parts = (of_patches(x[None], model.grid or (1, 1))[0] for x in whole)
        else:
            parts = (x[counts] for x in whole)
        routing[key] = _markup.TokenRouting(*parts)
    label = predicted = None
    if batch.labels is not None and batch.labels[index] >= 0:
        label = int(batch.labels[index])
    if batch.outputs is not None and np.isfinite(batch.outputs[index]).all():
        predicted = int(batch.outputs[index].argmax())
    return Example(
        None if batch.images is None else np.array(batch.images[index]),
        None if batch.captions is None else shortened(batch.captions[index]),
        words,
        label,
        predicted,
        routing,
    )


def _image_uri(image, max_bytes):
    """An image as a square data URI; maps restore its shape."""
    tile = _markup.tile_of(image, min(max(image.shape[:2]), _SIDE))
    return _markup.sprite(tile[None, None], max_bytes)[0]


def _within_budget(examples, blocks):
    """The examples that fit on the page, and the entries kept per token."""
    least = {
        key: min(block.num_experts, block.num_selected_experts or 2)
        for key, block in blocks.items()
    }

    def entries(per_token):
        return sum(
            len(routing.values) * per_token[key]
            for example in examples.values()
            for key, routing in example.routing.items()
        )

    while len(examples) > 1 and entries(least) > _ENTRIES:
        examples.popitem()
    most = _ENTRIES // max(entries(dict.fromkeys(blocks, 1)), 1)
    return examples, {
        key: min(block.num_experts, max(most, least[key]))
        for key, block in blocks.items()
    }


def _soft_maps(routing, grid, image, layer):
    """Maps of the experts whose slots focus on the fewest patches."""
    most = np.argsort(-routing.values.max(axis=0), kind="stable")[:_EXPERTS]
    maps = Markup("")
    for expert in sorted(most.tolist()):
        values = routing.values[:, expert]
        title = f"{layer}, expert {expert}: up to {values.max():.0%}"
        maps += _markup.heat_map(values, grid, image, title)
    if routing.values.shape[1] > _EXPERTS:
        maps += escape(f"{_EXPERTS} of {routing.values.shape[1]} experts")
    return maps
