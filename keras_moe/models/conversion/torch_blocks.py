"""Encoder blocks of PyTorch's ViTs: one structure under each library's names."""

from typing import NamedTuple

from keras_moe.models.conversion.weight_rules import linear, norm


class BlockNames(NamedTuple):
    """The names of a block's parts, without the block's own before them.

    Attributes:
        norms: names of the norms before attention and before the MLP.
        mlp: names of the MLP's two layers.
        queries: names of queries, keys and values; one name if they are one matrix.
        output: name of attention's output.
        scales: names of LayerScale's factors on the outputs of attention and of the
            MLP, which some models have.
        query_key_norms: names of the norms of queries and of keys in each head, which
            some models have.
    """

    norms: tuple[str, str]
    mlp: tuple[str, str]
    queries: tuple[str, ...]
    output: str
    scales: tuple[str, str] = ("", "")
    query_key_norms: tuple[str, str] = ("", "")

    def query_key_norm(self, file, block: str) -> bool:
        """Whether a block of a `PublishedTensors` normalises queries and keys."""
        name = self.query_key_norms[0]
        return bool(name) and f"{block}{name}weight" in file


def block_rules(
    file, place: str, block: str, names: BlockNames, query_bias: bool = True
) -> dict:
    """Rules of a dense encoder block."""
    first, second = (
        name if name in file else None
        for name in (f"{block}{scale}" for scale in names.scales)
    )
    hidden, output = (f"{block}{name}" for name in names.mlp)
    normalized = {}
    if names.query_key_norm(file, block):
        for projection, name in zip(("query", "key"), names.query_key_norms):
            place_of_norm = f"{place}/attention/{projection}_norm"
            normalized.update(norm(place_of_norm, f"{block}{name}"))
    return {
        **normalized,
        **norm(f"{place}/mixer_norm", f"{block}{names.norms[0]}"),
        **norm(f"{place}/feed_forward_norm", f"{block}{names.norms[1]}"),
        **linear(f"{place}/mlp/hidden", hidden),
        **linear(f"{place}/mlp/output", output, scale=second),
        **attention_rules(
            f"{place}/attention",
            [f"{block}{name}" for name in names.queries],
            f"{block}{names.output}",
            query_bias,
            first,
        ),
    }


def attention_rules(
    place: str,
    queries: list[str],
    output: str,
    query_bias: bool = True,
    scale: str | None = None,
) -> dict:
    """Rules of an attention, its queries, keys and values in one matrix or three."""
    rules = linear(f"{place}/attention_output", output, inputs=2, scale=scale)
    for part, projection in enumerate(("query", "key", "value")):
        fused = {"part": part, "parts": 3} if len(queries) == 1 else {}
        name = queries[0] if fused else queries[part]
        rules.update(linear(f"{place}/{projection}", name, query_bias, **fused))
    return rules
