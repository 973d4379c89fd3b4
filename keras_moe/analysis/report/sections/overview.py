"""The model: its mixtures of experts, and its costs part by part."""

from keras_moe.analysis.report.section import Batch, Content, Section, Table

KINDS = {
    "token_choice": "tokens choose experts",
    "expert_choice": "experts choose tokens",
    "soft": "soft slots",
    "mumoe": "muMoE, all experts",
}


class Overview(Section):
    """The section on the model itself."""

    title = "The model"
    anchor = "model"
    intro = "Its layers with experts, and the costs of its parts."

    def update(self, batch: Batch) -> None:
        pass

    def finish(self) -> Content:
        blocks = self.subject.blocks.values()
        rows = [
            [x.key, KINDS[x.kind], x.num_experts, x.num_selected_experts]
            for x in blocks
        ]
        head = ["layer", "router", "experts", "experts per token"]
        return Content([Table(head, rows, "Layers with experts")], {"rows": rows})
