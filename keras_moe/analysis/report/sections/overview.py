"""The model: its mixtures of experts, and its costs part by part."""

import re

from keras_moe.analysis.report.section import Batch, Content, Section, Table

KINDS = {
    "token_choice": "tokens choose experts",
    "expert_choice": "experts choose tokens",
    "soft": "experts take mixtures of tokens",
    "mumoe": "muMoE: all experts, weighted",
}


class Overview(Section):
    """The section on the model itself."""

    title = "The model"
    anchor = "model"
    intro = (
        "Which layers have experts and how tokens reach them, and what the parts of "
        "the model cost. Active parameters are those that one token uses; FLOPs count "
        "the multiplications and additions of matrix products."
    )

    def update(self, batch: Batch) -> None:
        pass

    def finish(self) -> Content:
        body = [self._layers()]
        data = {"layers": [x._asdict() for x in self.subject.blocks.values()]}
        description = self._description()
        if description is not None:
            body.append(_costs(description))
            data["costs"] = description.to_dict()
        return Content(body, data)

    def _layers(self):
        rows = []
        for name, records in self.subject.by_layer().items():
            block = next(iter(records.values()))
            kinds = [x for x in dict.fromkeys(block.expert_types) if x != "ffn"]
            experts = str(block.num_experts)
            if kinds:
                counts = [f"{block.expert_types.count(x)} {x}" for x in kinds]
                experts += f" ({', '.join(counts)})"
            rows.append(
                [
                    name,
                    " and ".join(records),
                    KINDS[block.kind],
                    experts,
                    block.num_selected_experts,
                    block.training_capacity_factor,
                    _at_inference(block),
                ]
            )
        head = [
            "layer",
            "tokens of",
            "routing",
            "experts",
            "per token",
            "capacity factor",
            "at inference",
        ]
        return Table(head, rows, "Layers with experts")

    def _description(self):
        """The costs, where the model knows them."""
        describe = getattr(self.subject.model, "describe", None)
        if describe is None:
            return None
        try:
            return describe()
        except ValueError:
            # A family of one's own may have no costs.
            return None


def _at_inference(block):
    if block.kind != "token_choice":
        return None
    if block.capacity_factor is None:
        return "all tokens are served"
    return f"capacity factor {block.capacity_factor:g}"


def _gflops(flops):
    """Text of 1e9 operations, for small and large models alike."""
    return f"{flops / 1e9:,.2f}" if flops >= 1e8 else f"{flops / 1e9:.6f}"


def _costs(description):
    """The table of costs, with one row for parts in sequence that are alike."""
    groups = []
    for part in description.parts:
        stem = re.sub(r"\d+", "#", part.name)
        if groups and groups[-1][0] == (stem, *part[1:]):
            groups[-1][1].append(part)
        else:
            groups.append(((stem, *part[1:]), [part]))
    rows = []
    for _, parts in groups:
        first, count = parts[0], len(parts)
        name = first.name if count == 1 else f"{first.name} to {parts[-1].name}"
        rows.append(
            [
                name,
                first.kind,
                count * first.parameters,
                count * first.active_parameters,
                _gflops(count * first.flops),
            ]
        )
    rows.append(
        [
            "all",
            None,
            description.parameters,
            description.active_parameters,
            _gflops(1e9 * description.gflops),
        ]
    )
    example = description.example
    head = ["part", "kind", "parameters", "active", f"GFLOPs per {example}"]
    return Table(head, rows, f"Costs, with {description.num_tokens} tokens")
