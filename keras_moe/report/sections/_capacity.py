"""What a capacity drops. Axes: B batch, N tokens, E experts, T types, Q positions."""

import numpy as np

from keras_moe.analysis.plots._figure import faded
from keras_moe.analysis.routing import of_patches, served_at
from keras_moe.report import _figures, section
from keras_moe.report._markup import drawable, sprite_figure, tile_of
from keras_moe.report._queues import group_texts, queues_of_layers

# Positions beyond three capacities share the last bin.
_EDGES = np.linspace(0.0, 3.0, 25)
_GATES = np.linspace(0.0, 1.0, 21)
# Types of tokens, in the order of the counts below.
_TYPES = ("image patches", "class token", "text tokens")
# Shares of choices: from one on there is a notice, which advises to get below another.
_MANY_DROPS, _FEW_DROPS = 0.1, 0.05
_FACTORS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
_MOST_LAYERS = 4
_TILE, _BYTES = 56, 90_000


class _Counts:
    def __init__(self, layer, num_patches):
        self.layer = layer
        self.queues = np.zeros((3, len(_EDGES) - 1), "int64")
        # By token type: choices, choices beyond the capacity, tokens, dropped tokens.
        self.totals = np.zeros((3, 4), "int64")
        # Served and dropped tokens, by range of gates.
        self.gates = np.zeros((2, len(_GATES) - 1), "int64")
        self.gate_sums = np.zeros((3, 2))
        # By position in images: tokens, and dropped tokens.
        self.patches = np.zeros((2, num_patches), "int64")
        # By modality and expert: choices, and choices beyond the capacity.
        self.modalities = {}
        # Sum of the capacities of all groups, by expert.
        self.room = np.zeros(layer.num_experts, "int64")


class Priorities(section.Section):
    """The section on queues and priorities."""

    title = "Priorities and the capacity cut"
    anchor = "priorities"
    intro = (
        "In training, an expert serves its queue up to its capacity and drops the "
        "choices after it. Here all tokens of the data queue as they do in training; "
        "the other sections drop tokens only if the model does at inference. Figures "
        f"show up to {_figures.MAX_PANELS} layers."
    )

    def __init__(self, model, options):
        super().__init__(model, options)
        self.layers = queues_of_layers(model, ("token_choice",))
        self.grid = model.grid or (0, 0)
        self.num_patches = self.grid[0] * self.grid[1]
        self.counts = [_Counts(layer, self.num_patches) for layer in self.layers]

    @classmethod
    def fits(cls, model):
        return any(block.kind == "token_choice" for block in model.blocks.values())

    def update_queues(self, batch):
        for counts in self.counts:
            queues = counts.layer.read(batch)
            counts.layer.count_groups(queues)
            self._count(counts, queues, counts.layer.capacities(queues.group_tokens))

    def _count(self, counts, queues, capacities):
        chosen = np.greater_equal(queues.positions, 0)
        served = served_at(queues.positions, capacities)
        cut = chosen & ~served
        dropped = np.logical_not(served.any(axis=-1))
        # Middles of positions, so that the last served one is below the capacity.
        middles = (queues.positions + 0.5) / np.maximum(capacities, 1e-9)
        bins = np.searchsorted(_EDGES, middles, side="right") - 1
        bins = np.clip(bins, 0, len(_EDGES) - 2)
        counts.room += capacities * (len(queues.positions) // queues.group_size)
        for modality, run in queues.runs.items():
            own = np.stack([x[:, run].sum(axis=(0, 1)) for x in (chosen, cut)])
            counts.modalities[modality] = counts.modalities.get(modality, 0) + own
        for token_type, run in self._runs(queues):
            counted = queues.counts[:, run]
            own, own_dropped = chosen[:, run][counted], dropped[:, run][counted]
            counts.queues[token_type] += np.bincount(
                bins[:, run][counted][own], minlength=len(_EDGES) - 1
            )
            numbers = (own, cut[:, run][counted], counted, own_dropped)
            counts.totals[token_type] += [int(x.sum()) for x in numbers]
            gates = queues.gates[:, run][counted]
            for row, part in enumerate((~own_dropped, own_dropped)):
                counts.gates[row] += np.histogram(gates[part], _GATES)[0]
                counts.gate_sums[token_type, row] += gates[part].sum()
        if self.num_patches and "image" in queues.runs:
            run = queues.runs["image"]
            patches, gone = (
                x[:, run][:, -self.num_patches :] for x in (queues.counts, dropped)
            )
            counts.patches += [patches.sum(axis=0), (gone & patches).sum(axis=0)]

    def _runs(self, queues):
        """Yields token types with their slices of the tokens."""
        for modality, run in queues.runs.items():
            if modality != "image":
                yield 2, run
                continue
            # Without a grid, a class token cannot be recognised.
            first = 0
            if self.num_patches:
                first = max(run.stop - run.start - self.num_patches, 0)
            yield 0, slice(run.start + first, run.stop)
            if first:
                yield 1, slice(run.start, run.start + first)

    def finish(self):
        totals = np.array([counts.totals for counts in self.counts])
        present = np.flatnonzero(totals[..., 2].sum(axis=0))
        if not len(present):
            return section.NO_TOKENS
        names = [layer.name for layer in self.layers]
        types = [_TYPES[number] for number in present]
        data = [_data(counts, present) for counts in self.counts]
        rows = [_row(counts, number) for counts in self.counts for number in present]
        head = [
            "layer",
            "tokens",
            "choices beyond the capacity",
            "tokens without an expert",
            "mean gate, served",
            "mean gate, dropped",
        ]
        table = section.Table(
            head, rows, "Choices of tokens at the capacity of training"
        )
        body = [*group_texts(self.layers), *self._figures(names, present, types), table]
        return section.SectionContent(body, {"layers": data}, self._findings())

    def _findings(self):
        """One finding for all layers that drop many choices at one capacity."""
        worst, layers = 0.0, {}
        for counts in self.counts:
            choices, cut, tokens, dropped = counts.totals.sum(axis=0)
            share, layer = cut / max(choices, 1), counts.layer
            worst = max(worst, share)
            if share > _MANY_DROPS:
                row = (layer, share, dropped / max(tokens, 1), _needed(counts))
                layers.setdefault(layer.capacity_factor, []).append(row)
        if not layers:
            text = (
                f"At the training capacity, at most {worst:.1%} of routing choices "
                "would be dropped in any layer."
            )
            return [section.Finding("good", text)]
        return [
            section.Finding("notice", self._advice(factor, rows))
            for factor, rows in layers.items()
        ]

    def _advice(self, factor, rows):
        own, shares, unserved, needed = zip(*rows)
        limited = {
            block.block
            for block in self.model.blocks.values()
            if block.capacity_factor is not None
        }
        where = f"with capacity_factor={factor:g}" if factor else "with its capacity"
        text = (
            f"{', '.join(layer.name for layer in own)}: {where}, as in training, "
            f"{_range(shares)} of routing choices would be dropped and "
            f"{_range(unserved)} of tokens would reach no expert. "
        )
        if not factor:
            return f"{text}Train with a larger capacity."
        value, most = max(needed), _EDGES[-1] * factor
        enough = f"={value:g}" if value <= most else f" above {most:g}"
        text += f"Train with capacity_factor{enough} to drop less than {_FEW_DROPS:.0%}"
        if limited.isdisjoint(layer.name for layer in own):
            text += ", or ignore it at inference, where nothing is dropped"
        return f"{text}."

    def _figures(self, names, present, types):
        queues = [counts.queues[present] for counts in self.counts]
        served, dropped = zip(*(counts.gates for counts in self.counts))
        figures = [
            section.Figure(
                _figures.draw_queues(queues, _EDGES, names, types),
                "Histograms of the positions of tokens in the queues before the "
                f"experts, by layer, for {', '.join(types)}.",
                "Who stands where: the front of the queue is left, and training drops "
                "what is right of the line. The last bar has all further positions.",
                "priorities_queues",
            ),
            section.Figure(
                _figures.draw_priorities(served, dropped, _GATES, names),
                "Histograms of the largest gate of served and of dropped tokens, by "
                "layer.",
                "How sure the router is of the tokens that are served and dropped. "
                "Batch priority routing drops those with small gates.",
                "priorities_gates",
            ),
        ]
        return [*figures, *self._modalities(), *self._positions(names)]

    def _modalities(self):
        """Figures of each modality's choices, for layers shared by modalities."""
        shared = [counts for counts in self.counts if len(counts.modalities) > 1]
        if not shared:
            return []
        drawn = section.evenly_spaced(shared, _figures.MAX_PANELS)
        drawing = _figures.draw_modalities(
            [counts.modalities for counts in drawn],
            [counts.room for counts in drawn],
            [counts.layer.name for counts in drawn],
        )
        alt = (
            "Stacked bars of the tokens of each modality that choose each expert, by "
            "layer, with those that it drops in pale colours, and lines at the "
            "experts' capacities."
        )
        caption = (
            "Who chooses each expert, and whom it drops (pale) at the capacity of "
            "training (line)."
        )
        return [section.Figure(drawing, alt, caption, "priorities_modalities")]

    def _positions(self, names):
        """Figures of where in images patches are dropped, if any are."""
        shares = [c.patches[1] / np.maximum(c.patches[0], 1) for c in self.counts]
        if not np.any(shares):
            return []
        grids = [share.reshape(self.grid) for share in shares]
        return [
            section.Figure(
                _figures.draw_positions(grids, names),
                "Maps of the share of images whose patch at a position gets no expert, "
                "by layer.",
                "Where in images patches get no expert at the capacity of training.",
                "priorities_positions",
            )
        ]


def _needed(counts):
    """The capacity factor that drops few choices, by their positions in the queues."""
    factor = counts.layer.capacity_factor
    if not factor:
        return 0.0
    queues = counts.queues.sum(axis=0)
    # By the upper edge of each position: the choices after it.
    after = 1.0 - np.cumsum(queues) / max(queues.sum(), 1)
    enough = np.flatnonzero(after[:-1] < _FEW_DROPS)
    edge = _EDGES[1 + enough[0]] if len(enough) else 2 * _EDGES[-1]
    # Up to the next twentieth.
    return float(np.ceil(edge * factor * 20 - 1e-6) / 20)


def _range(shares):
    texts = [f"{share:.0%}" for share in (min(shares), max(shares))]
    return " to ".join(dict.fromkeys(texts))


def _row(counts, token_type):
    choices, cut, tokens, dropped = counts.totals[token_type].tolist()
    means = [
        f"{total / count:.2f}" if count else None
        for total, count in zip(
            counts.gate_sums[token_type], (tokens - dropped, dropped)
        )
    ]
    shares = (f"{cut / max(choices, 1):.1%}", f"{dropped / max(tokens, 1):.1%}")
    return [counts.layer.name, _TYPES[token_type], *shares, *means]


def _data(counts, present):
    choices, cut = np.sum([*counts.modalities.values()], axis=0)
    return {
        "layer": counts.layer.name,
        "capacity_factor": counts.layer.capacity_factor,
        "edges": _EDGES.tolist(),
        "queues": {
            _TYPES[number]: counts.queues[number].tolist() for number in present
        },
        "cut_by_expert": (cut / np.maximum(choices, 1)).tolist(),
        "capacity": counts.room.tolist(),
        "by_modality": {
            modality: dict(zip(("choices", "cut"), own.tolist()))
            for modality, own in counts.modalities.items()
        },
        "gate_edges": _GATES.tolist(),
        "gates_served": counts.gates[0].tolist(),
        "gates_dropped": counts.gates[1].tolist(),
    }


class DroppedPatches(section.Section):
    """The section on dropped patches."""

    title = "Dropped patches at several capacities"
    anchor = "dropped-patches"
    intro = (
        "The plan is recomputed at each capacity factor from the recorded gates. "
        "Patches in their own colours are served; the more of a patch's choices are "
        "dropped, the bluer and darker it is."
    )

    def __init__(self, model, options):
        super().__init__(model, options)
        self.layers, self.grid = _layers_of_images(model), model.grid or (0, 0)
        # At most four marks.
        marked = {x.capacity_factor for x in self.layers if x.capacity_factor}
        self.marked = sorted(marked)[:4]
        self.factors = sorted({*_FACTORS, *options.capacities, *self.marked})
        # By layer and factor: tokens of images, dropped tokens, choices, dropped
        # choices.
        self.counts = np.zeros((len(self.layers), len(self.factors), 4), "int64")
        self.drawn = section.evenly_spaced(range(len(self.layers)), _MOST_LAYERS)
        self.tiles: dict[int, np.ndarray] = {}

    @classmethod
    def fits(cls, model):
        return model.grid is not None and bool(_layers_of_images(model))

    def update(self, batch):
        for number in self.drawn:
            if number not in self.tiles:
                self.tiles[number] = self._draw(batch, self.layers[number])

    def update_queues(self, batch):
        for number, layer in enumerate(self.layers):
            queues = layer.read(batch)
            layer.count_groups(queues)
            run = queues.runs["image"]
            counted = queues.counts[:, run]
            chosen = np.greater_equal(queues.positions[:, run], 0)
            for column, factor in enumerate(self.factors):
                served = self._served(layer, queues, factor)
                gone = counted & ~served.any(axis=-1)
                numbers = (counted, gone, chosen, chosen & ~served)
                self.counts[number, column] += [int(x.sum()) for x in numbers]

    def _served(self, layer, queues, factor):
        """Which image tokens each expert serves, boolean (B, N, E)."""
        capacities = layer.capacities(queues.group_tokens, factor)
        return served_at(queues.positions, capacities)[:, queues.runs["image"]]

    def _draw(self, batch, layer):
        """Tiles (factors, images, T, T, 3) for images of the first batch."""
        queues = layer.read(batch)
        most = max(self.options.num_examples, 1)
        chosen = section.evenly_spaced(range(len(queues.positions)), most)
        rows = []
        for factor in sorted(self.options.capacities, reverse=True):
            served = self._served(layer, queues, factor)
            patches = of_patches(served, self.grid).sum(axis=-1)
            # With expert choice, one expert that selects the patch is enough.
            share = np.minimum(patches, 1)
            if layer.chooses:
                share = patches / layer.selected
            tiles = [self._tile(batch.images[index], share[index]) for index in chosen]
            rows.append(tiles)
        return np.array(rows)

    def _tile(self, image, share):
        rows, columns = self.grid
        height, width = image.shape[0] // rows, image.shape[1] // columns
        share = np.kron(share.reshape(rows, columns), np.ones((height, width)))
        image = drawable(image[: rows * height, : columns * width])
        return tile_of(2.0 * faded(image, share) - 1.0, _TILE)

    def finish(self):
        names = [layer.name for layer in self.layers]
        dropped = self.counts[..., 1] / np.maximum(self.counts[..., 0], 1)
        choices = self.counts[..., 3] / np.maximum(self.counts[..., 2], 1)
        body: list[section.Part] = [*group_texts(self.layers)]
        body += [self._sprite(number, dropped) for number in self.drawn]
        caption = (
            "Share of image tokens that get no expert at all, by capacity factor. "
            "Dashed: the factor of training."
        )
        drawing = _figures.draw_drops(self.factors, dropped, names, self.marked)
        alt = "Curves of the share of dropped tokens by capacity factor, by layer."
        body.append(section.Figure(drawing, alt, caption, "dropped_patches"))
        body.append(self._table(names, dropped, choices))
        data = {
            "capacity_factors": self.factors,
            "dropped_tokens": dict(zip(names, dropped.tolist())),
            "dropped_choices": dict(zip(names, choices.tolist())),
        }
        return section.SectionContent(body, data)

    def _table(self, names, dropped, choices):
        shown = sorted(self.options.capacities)
        columns = [self.factors.index(factor) for factor in shown]
        head = ["layer", *(f"no expert at {factor:g}" for factor in shown)]
        shares = dropped[:, columns]
        if any(layer.chooses and layer.selected != 1 for layer in self.layers):
            head += [f"choices dropped at {factor:g}" for factor in shown]
            shares = np.concatenate([shares, choices[:, columns]], axis=1)
        rows = [[x, *(f"{y:.1%}" for y in row)] for x, row in zip(names, shares)]
        return section.Table(head, rows, "Image tokens dropped at a capacity factor")

    def _sprite(self, number, dropped):
        name, tiles = self.layers[number].name, self.tiles[number]
        factors = sorted(self.options.capacities, reverse=True)
        shares = [dropped[number, self.factors.index(factor)] for factor in factors]
        words = [f"{f:g} ({share:.0%} dropped)" for f, share in zip(factors, shares)]
        markup = sprite_figure(
            tiles,
            [f"c = {factor:g}" for factor in factors],
            f"{tiles.shape[1]} images in {name} with dropped patches faded, at "
            f"capacity factors {', '.join(words)}.",
            f"{name}: the same images at a capacity factor c of {', '.join(words)} of "
            "all image tokens.",
            _BYTES // len(self.drawn),
        )
        return section.Html(markup)


def _layers_of_images(model):
    return queues_of_layers(model, ("token_choice", "expert_choice"), "image")
