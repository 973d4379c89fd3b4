"""One example's routing, drawn over its image and its words.

Axes: B batch, N tokens, E experts.
"""

import json
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape

from keras_moe.analysis.evenly_spaced import evenly_spaced
from keras_moe.analysis.report.inputs import shortened
from keras_moe.analysis.report.packed_routing import TokenRouting, pack, token_routing
from keras_moe.analysis.report.reservoir import examples_to_show
from keras_moe.analysis.report.routing_maps import (
    CELL,
    COLOURS,
    expert_map,
    heat_map,
    legend,
    word_chips,
)
from keras_moe.analysis.report.section import Batch, Content, Html, Section, Subject
from keras_moe.analysis.report.sprites import sprite, tile_of
from keras_moe.analysis.tokens import of_patches

# Characters of the page for the script's data, and for the maps that need no script.
DATA_BUDGET, MAPS_BUDGET = 160_000, 110_000
# An entry of a token has four bytes, which are 16 / 3 characters of base64.
_ENTRIES = DATA_BUDGET * 3 // 16
_LAYERS, _EXPERTS = 12, 8
# A reader has the others in the chooser.
_MAPS = 36
# The largest side of an image in pixels, and bytes of its file and of all files.
_SIDE, _BYTES, _ALL_BYTES = 128, 16_000, 240_000


class Example(NamedTuple):
    """The parts of an example that drawings need.

    Attributes:
        image: (height, width, channels) in [-1, 1], or None.
        caption: its caption, or None.
        words: the strings of the caption's tokens, or None.
        label: number of its class, or None.
        predicted: number of the class of the largest output, or None.
        routing: `TokenRouting` of patches or words by key.
    """

    image: np.ndarray | None
    caption: str | None
    words: list[str] | None
    label: int | None
    predicted: int | None
    routing: dict[str, TokenRouting]


class Explorer(Section):
    """Which expert each patch and word of an example goes to, layer by layer."""

    title = "One example, layer by layer"
    anchor = "explorer"
    intro = (
        "The number in a patch, or behind a word, is the expert whose output has the "
        "largest weight there; a cross is a token that no expert serves. The colours "
        "repeat after eight experts."
    )

    @classmethod
    def fits(cls, subject: Subject) -> bool:
        return bool(_keys(subject))

    def __init__(self, subject: Subject, options: Any):
        super().__init__(subject, options)
        self._keys = _keys(subject)
        self._reservoir = examples_to_show(options)

    def update(self, batch: Batch) -> None:
        self._reservoir.offer(
            batch.size,
            lambda place: kept_example(self.subject, self._keys, batch, place),
        )

    def finish(self) -> Content:
        examples, kept = _within_budget(self._reservoir.kept, self.subject)
        layers = _layers(self._keys, self.subject)
        names = {number: self._name(number, each) for number, each in examples.items()}
        pictures, chooser = self._pictures(examples), _chooser()
        data = json_script("explorer-data", self._data(examples, names, layers, kept))
        maps, shown = self._maps(examples, names, layers)
        body = [Html(pictures + chooser + data)]
        if any(self.subject.blocks[key].kind == "soft" for key in self._keys):
            body.append(
                "The slots of a soft expert are mixtures of all tokens. Its maps show "
                "where it looks: the deeper the colour, the larger the patch's share "
                "in the expert's slots."
            )
        body.append(Html(maps))
        if shown < len(examples):
            body.append(
                f"The maps of {len(examples) - shown} more examples are in the "
                "chooser above, which needs JavaScript."
            )
        body.append(self._choice(examples))
        return Content(body, {"examples": self._numbers(examples)}, [])

    def _choice(self, examples):
        """A sentence on which examples these are."""
        shown, seen = len(examples), self._reservoir.seen
        if self.options.examples is None:
            return f"{shown} of {seen:,} examples, drawn with seed {self.options.seed}."
        wanted = len(self.options.examples)
        if shown < wanted:
            return (
                f"The page has room for {shown} of the {wanted} examples that were "
                "asked for."
            )
        return f"The examples that were asked for, {shown} of {seen:,}."

    def _name(self, number, example):
        parts = [f"Example {number}"]
        for what, value in (("label", example.label), ("predicted", example.predicted)):
            if value is not None:
                parts.append(f"{what} {self.subject.class_name(value)}")
        return ", ".join(parts)

    def _pictures(self, examples):
        """The images, once for all maps of them."""
        grid = self.subject.grid
        if grid is None:
            return Markup("")
        most = min(_BYTES, _ALL_BYTES // max(len(examples), 1))
        images = Markup("").join(
            Markup(
                '<image id="example-{}" width="{}" height="{}" href="{}" '
                'preserveAspectRatio="none"/>'
            ).format(
                number, CELL * grid[1], CELL * grid[0], image_uri(example.image, most)
            )
            for number, example in examples.items()
            if example.image is not None
        )
        return Markup(
            '<svg class="pictures" width="0" height="0" aria-hidden="true"><defs>{}'
            "</defs></svg>"
        ).format(images)

    def _data(self, examples, names, layers, kept):
        """The script's data."""
        return {
            "grid": self.subject.grid,
            "cell": CELL,
            "colours": COLOURS,
            "layers": [
                {
                    "name": block,
                    "kind": self.subject.blocks[next(iter(keys.values()))].kind,
                    "experts": _expert_names(self.subject, keys),
                    "kept": {modality: kept[key] for modality, key in keys.items()},
                }
                for block, keys in layers.items()
            ],
            "examples": [
                {
                    "name": names[number],
                    "image": None if example.image is None else f"example-{number}",
                    "words": example.words or [],
                    "layers": [
                        {
                            modality: pack(example.routing[key], kept[key])
                            for modality, key in keys.items()
                        }
                        for keys in layers.values()
                    ],
                }
                for number, example in examples.items()
            ],
        }

    def _maps(self, examples, names, layers):
        """The maps of the first examples, and their number."""
        blocks = [self.subject.blocks[key] for key in self._keys]
        total, examples_markup, shown, count = Markup(""), Markup(""), 0, 0
        if not all(block.kind == "soft" for block in blocks):
            total = legend(max((block.expert_types for block in blocks), key=len))
        for number, example in examples.items():
            markup = self._example_maps(number, example, names[number], layers)
            count += markup.count("<svg ")
            if shown and (count > _MAPS or len(examples_markup + markup) > MAPS_BUDGET):
                break
            examples_markup, shown = examples_markup + markup, shown + 1
        whole = total + Markup('<div class="examples">{}</div>').format(examples_markup)
        return whole, shown

    def _example_maps(self, number, example, name, layers):
        image = None if example.image is None else f"example-{number}"
        rows, chips = Markup(""), Markup("")
        items = list(layers.items())
        chosen = [items[place] for place in evenly_spaced(len(items), _LAYERS)]
        for block, keys in chosen:
            for modality, key in keys.items():
                routing = example.routing[key]
                if modality == "text":
                    chips += word_chips(routing.heaviest(), example.words or [], block)
                elif self.subject.blocks[key].kind == "soft":
                    rows += _soft_maps(routing, self.subject.grid, image, block)
                else:
                    experts = routing.heaviest()
                    rows += expert_map(experts, self.subject.grid, image, block)
        note = ""
        if len(chosen) < len(layers):
            note = f" ({len(chosen)} of {len(layers)} layers)"
        caption = Markup("")
        if example.caption is not None:
            caption = Markup("<p>{}</p>").format(example.caption)
        return Markup(
            '<article class="example"><h3>{}{}</h3>{}<div class="maps">{}</div>{}'
            "</article>"
        ).format(name, note, caption, rows, chips)

    def _numbers(self, examples):
        return [
            {
                "number": number,
                "label": example.label,
                "predicted": example.predicted,
                "caption": example.caption,
                "words": example.words,
                "experts": {
                    key: routing.heaviest().tolist()
                    for key, routing in example.routing.items()
                },
            }
            for number, example in examples.items()
        ]


def kept_example(
    subject: Subject, keys: list[str], batch: Batch, place: int
) -> Example:
    """The parts of an example that drawings need, as arrays of their own."""
    words, counts = None, None
    if batch.words is not None:
        counts = np.array([word != "" for word in batch.words[place]])
        if "text" in batch.masks:
            counts = np.asarray(batch.masks["text"][place], bool)
        words = [word for word, keep in zip(batch.words[place], counts) if keep]
    routing = {}
    for key in keys:
        block = subject.blocks[key]
        whole = token_routing(batch.routing[key], block.kind, place)
        if block.modality == "image":
            parts = (of_patches(x[None], subject.grid)[0] for x in whole)
        else:
            parts = (x if counts is None else x[counts] for x in whole)
        routing[key] = TokenRouting(*parts)
    labels, outputs = batch.labels, batch.outputs
    return Example(
        None if batch.images is None else np.array(batch.images[place]),
        None if batch.captions is None else shortened(batch.captions[place]),
        words,
        None if labels is None or labels[place] < 0 else int(labels[place]),
        None if outputs is None else _predicted(outputs[place]),
        routing,
    )


def _predicted(outputs):
    """The class of the largest output, or None of outputs that are not finite."""
    return int(outputs.argmax()) if np.isfinite(outputs).all() else None


def image_uri(image: np.ndarray, max_bytes: int = _BYTES) -> str:
    """A square picture of an image, as an address; maps give it its shape."""
    tile = tile_of(image, min(max(image.shape[:2]), _SIDE))
    return sprite(tile[None, None], max_bytes)[0]


def json_script(name: str, data: Any) -> Markup:
    """Data for the page's script, in which no text ends the element."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return Markup('<script type="application/json" id="{}">{}</script>').format(
        name, Markup(text)
    )


def _keys(subject):
    """The records whose tokens are patches or words."""
    return [
        key
        for key, block in subject.blocks.items()
        if block.is_of_tokens and (block.modality == "text" or subject.grid is not None)
    ]


def _layers(keys, subject):
    """The keys by block and modality."""
    layers = {}
    for key in keys:
        block = subject.blocks[key]
        layers.setdefault(block.block, {})[block.modality] = key
    return layers


def _expert_names(subject, keys):
    kinds = subject.blocks[next(iter(keys.values()))].expert_types
    return [f"{e}" if kind == "ffn" else f"{e}, {kind}" for e, kind in enumerate(kinds)]


def _within_budget(examples, subject):
    """The examples that the page has room for, and the entries kept of a token."""
    experts = {key: block.num_experts for key, block in subject.blocks.items()}
    least = {
        key: min(experts[key], block.num_selected_experts or 2)
        for key, block in subject.blocks.items()
    }

    def entries(chosen, kept):
        return sum(
            len(routing.values) * kept[key]
            for example in chosen.values()
            for key, routing in example.routing.items()
        )

    while len(examples) > 1 and entries(examples, least) > _ENTRIES:
        examples = dict(list(examples.items())[:-1])
    kept = least
    for more in range(max(experts.values()), 0, -1):
        wider = {key: max(least[key], min(more, experts[key])) for key in experts}
        if entries(examples, wider) <= _ENTRIES:
            kept = wider
            break
    return examples, kept


def _soft_maps(routing, grid, image, block):
    """Maps of the experts whose slots look at the fewest patches."""
    most = np.argsort(-routing.values.max(axis=0), kind="stable")[:_EXPERTS]
    maps = Markup("").join(
        heat_map(
            routing.values[:, expert],
            grid,
            image,
            f"{block}, expert {expert}: up to {routing.values[:, expert].max():.0%}",
        )
        for expert in sorted(most.tolist())
    )
    if routing.values.shape[1] > _EXPERTS:
        maps += escape(f"{_EXPERTS} of {routing.values.shape[1]} experts")
    return maps


def _chooser():
    """The controls and the drawing that the script fills."""
    selects = Markup("").join(
        Markup('<label>{} <select id="explorer-{}"></select></label> ').format(
            label, label.lower()
        )
        for label in ("Example", "Layer", "Expert", "Token")
    )
    return Markup(
        '<div id="explorer-chooser" class="explorer" hidden><p class="controls">{}'
        '<button type="button" id="explorer-back">Previous layer</button> '
        '<button type="button" id="explorer-on">Next layer</button></p>'
        '<figure><svg id="explorer-map" role="img"></svg>'
        '<p class="chips" id="explorer-words"></p>'
        '<figcaption id="explorer-says" aria-live="polite"></figcaption></figure>'
        "</div>"
    ).format(selects)
