"""Patches of a few images that are dropped at several capacities.

Axes: B batch, N tokens, E experts, F capacity factors.
"""

import numpy as np

from keras_moe.analysis.evenly_spaced import evenly_spaced
from keras_moe.analysis.plots.figure import faded
from keras_moe.analysis.plots.report_queues import draw_drops
from keras_moe.analysis.report.queues import (
    Groups,
    approximations,
    queues_of_layers,
)
from keras_moe.analysis.report.section import (
    Batch,
    Content,
    Figure,
    Html,
    Section,
    Subject,
    Table,
)
from keras_moe.analysis.report.sprites import drawable, sprite_figure, tile_of
from keras_moe.analysis.routing import served_at
from keras_moe.analysis.tokens import of_patches

_KINDS = ("token_choice", "expert_choice")
_FACTORS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
_MOST_LAYERS = 4
_TILE, _BYTES = 56, 90_000


class DroppedPatches(Section):
    """The section on drops; see `keras_moe.analysis.report.section.Section`."""

    title = "Dropped patches at several capacities"
    anchor = "dropped-patches"
    intro = (
        "The plan is made anew at each capacity factor from the recorded gates. "
        "Patches in their own colours are served; the more of a patch's choices are "
        "dropped, the bluer and darker it is."
    )

    def __init__(self, subject, options):
        super().__init__(subject, options)
        self.layers = _layers_of_images(subject)
        self.groups = Groups(self.layers)
        marked = {layer.capacity_factor for layer in self.layers} - {None}
        # A line has few marks, whatever the models' own factors are.
        self.factors = sorted({*_FACTORS, *options.capacities, *sorted(marked)[:4]})
        # By layer and factor: tokens of images, dropped ones, choices, dropped ones.
        self.counts = np.zeros((len(self.layers), len(self.factors), 4), "int64")
        self.drawn = evenly_spaced(len(self.layers), _MOST_LAYERS)
        self.tiles: dict[int, np.ndarray] = {}

    @classmethod
    def fits(cls, subject: Subject) -> bool:
        return subject.grid is not None and bool(_layers_of_images(subject))

    def update(self, batch: Batch) -> None:
        if batch.images is None:
            return
        for number in self.drawn:
            if number not in self.tiles:
                layer = self.layers[number]
                self.tiles[number] = self._draw(batch, layer)

    def update_queues(self, batch: Batch) -> None:
        for number, layer in enumerate(self.layers):
            queues = layer.read(batch)
            self.groups.add(layer, queues)
            run = queues.runs["image"]
            counted = queues.counts[:, run]
            chosen = (queues.places >= 0)[:, run]
            for column, factor in enumerate(self.factors):
                served = self._served(layer, queues, factor)
                self.counts[number, column] += [
                    counted.sum(),
                    (counted & ~served.any(axis=-1)).sum(),
                    chosen.sum(),
                    (chosen & ~served).sum(),
                ]

    def _served(self, layer, queues, factor):
        """The tokens of images that each expert serves, boolean (B, N, E)."""
        capacities = layer.capacities(queues.group_tokens, factor)
        return served_at(queues.places, capacities)[:, queues.runs["image"]]

    def _draw(self, batch, layer):
        """Tiles (F, images, T, T, 3) of images of the first batch."""
        queues = layer.read(batch)
        used = len(queues.places)
        chosen = evenly_spaced(used, max(self.options.num_examples, 1))
        rows = []
        for factor in sorted(self.options.capacities, reverse=True):
            served = self._served(layer, queues, factor)
            patches = of_patches(served, self.subject.grid).sum(axis=-1)
            if layer.chooses:
                share = patches / layer.selected
            else:
                # An expert choosing a patch is enough: there are no K choices.
                share = np.minimum(patches, 1)
            rows.append(
                [self._tile(batch.images[index], share[index]) for index in chosen]
            )
        return np.array(rows)

    def _tile(self, image, share):
        rows, columns = self.subject.grid
        height, width = image.shape[0] // rows, image.shape[1] // columns
        share = np.kron(share.reshape(rows, columns), np.ones((height, width)))
        image = drawable(image[: rows * height, : columns * width])
        return tile_of(2.0 * faded(image, share) - 1.0, _TILE)

    def finish(self) -> Content:
        if not self.tiles:
            return Content(["The data has no images."], {})
        names = [layer.name for layer in self.layers]
        tokens = np.maximum(self.counts[..., 0], 1)
        dropped = self.counts[..., 1] / tokens
        choices = self.counts[..., 3] / np.maximum(self.counts[..., 2], 1)
        shown = sorted(self.options.capacities)
        columns = [self.factors.index(factor) for factor in shown]
        body = self.groups.paragraphs() + approximations(self.layers)
        body += [self._sprite(number, dropped) for number in self.drawn]
        marked = {layer.capacity_factor for layer in self.layers} - {None}
        caption = "Share of image tokens that get no expert at all, by capacity factor."
        if marked:
            caption += " Dashed: the factor of training."
        if len(names) > 6:
            caption += " Six layers are drawn; the table has all."
        drawing = draw_drops(self.factors, dropped, names, sorted(marked)[:4])
        alt = "Curves of the share of dropped tokens by capacity factor, by layer."
        body.append(Figure(drawing, alt, caption, "dropped_patches"))
        head = ["layer", *(f"no expert at {factor:g}" for factor in shown)]
        rows = [
            [name, *(f"{row[column]:.1%}" for column in columns)]
            for name, row in zip(names, dropped)
        ]
        if any(layer.chooses and layer.selected > 1 for layer in self.layers):
            head += [f"choices dropped at {factor:g}" for factor in shown]
            for row, share in zip(rows, choices):
                row += [f"{share[column]:.1%}" for column in columns]
        body.append(Table(head, rows, "Image tokens dropped at a capacity factor"))
        data = {
            "capacity_factors": self.factors,
            "dropped_tokens": dict(zip(names, dropped.tolist())),
            "dropped_choices": dict(zip(names, choices.tolist())),
        }
        return Content(body, data)

    def _sprite(self, number, dropped):
        name, tiles = self.layers[number].name, self.tiles[number]
        factors = sorted(self.options.capacities, reverse=True)
        shares = [dropped[number, self.factors.index(factor)] for factor in factors]
        words = [f"{f:g} ({share:.0%} dropped)" for f, share in zip(factors, shares)]
        return Html(
            sprite_figure(
                tiles,
                [f"c = {factor:g}" for factor in factors],
                f"{tiles.shape[1]} images in {name} with dropped patches faded, at "
                f"capacity factors {', '.join(words)}.",
                f"{name}: the same images at a capacity factor c of "
                f"{', '.join(words)} of all image tokens.",
                _BYTES // len(self.drawn),
            )
        )


def _layers_of_images(subject):
    return [
        layer
        for layer in queues_of_layers(subject, _KINDS)
        if any(block.modality == "image" for block in layer.blocks)
    ]
