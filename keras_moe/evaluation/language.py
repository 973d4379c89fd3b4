"""Language models by likelihood, and the task suite lm_eval.

Axes: B batch, N tokens, D hidden, V vocabulary, T scored tokens.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_moe._checks import check_integer, import_extra

# Lengths of batches are multiples of this, so that few programs are compiled.
_MULTIPLE = 32
# Tokens that tasks of lm_eval generate unless they say how many.
_MOST_NEW = 256


def continuation_log_likelihoods(
    model: Any, pairs: Iterable[tuple[str, str]], batch_size: int = 32
) -> list[tuple[float, bool]]:
    """Log-likelihood of texts after others, and whether greedy decoding writes them.

    Contexts lose their beginning if both are longer than the model's rows.

    Args:
        model: `keras_moe.models.CausalLM` with a tokenizer.
        pairs: (context, continuation): texts; the continuation begins with the space
            that separates them.
        batch_size: sequences per batch.

    Example:

    >>> from keras_moe import evaluation, models
    >>> model = models.from_preset("moepp_lm_python")
    >>> (pair,) = evaluation.continuation_log_likelihoods(model, [("a", " list")])
    >>> pair[0] < 0
    True
    """
    pairs = list(pairs)
    for pair in pairs:
        if isinstance(pair, str) or not all(isinstance(text, str) for text in pair):
            raise ValueError(f"Expected pairs of two texts; received: {pair!r:.200}")
    scorer = _Scorer(model, batch_size)
    return scorer.scores([scorer.encoded(*pair) for pair in pairs])


class _Scorer:
    """Scores the last tokens of sequences, each given all before it."""

    def __init__(self, model, batch_size):
        self.model = model
        self.tokenizer: Any = getattr(model, "preprocessor", None)
        if not hasattr(self.tokenizer, "prompts") or not hasattr(model, "generate"):
            raise ValueError(
                "Expected a CausalLM with a tokenizer; received: "
                f"{type(model).__name__}, preprocessor={self.tokenizer!r}"
            )
        self.batch_size = check_integer("batch_size", batch_size)
        self.length = model.backbone.max_length

    def ids(self, text):
        """The ids of a text after the start token, or the end token without one."""
        (ids,), end = self.tokenizer.prompts([text]), self.tokenizer.end_id
        has_start = self.tokenizer.start_id is not None
        return ids if has_start else [0 if end is None else end, *ids]

    def encoded(self, context, continuation):
        """The ids of both texts, and the number of those that are scored."""
        # Spaces belong to the word after them, in most vocabularies.
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        ids, before = self.ids(kept + continuation), self.ids(kept)
        count = max(len(ids) - len(before), 0)
        if count > self.length:
            raise ValueError(
                f"Expected continuations of at most {self.length} tokens, as many as "
                f"the model reads; received: {count} tokens, {continuation[:40]!r}..."
            )
        # The first token of a cut sequence is not predicted.
        return ids[-self.length - 1 :], count

    def scores(self, sequences: Sequence[tuple[list[int], int]]):
        """The (log-likelihood, whether all are the likeliest) of each."""
        results = [(0.0, True)] * len(sequences)
        # Similar lengths together.
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i][0]))
        order = [index for index in order if sequences[index][1]]
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            own = self._scored([sequences[index] for index in chosen])
            for index, result in zip(chosen, own):
                results[index] = result
        return results

    def _scored(self, sequences):
        # The last token predicts none.
        rows = [ids[:-1] for ids, _ in sequences]
        length = -(-max(map(len, rows)) // _MULTIPLE) * _MULTIPLE
        shape = (self.batch_size, min(length, self.length))
        token_ids, mask = np.zeros(shape, "int32"), np.zeros(shape, "int32")
        # Rows without a text repeat the first one.
        for row in range(self.batch_size):
            ids = rows[row] if row < len(rows) else rows[0]
            token_ids[row, : len(ids)], mask[row, : len(ids)] = ids, 1
        backbone = self.model.backbone
        hidden = backbone.predict_on_batch(
            {"token_ids": token_ids, "padding_mask": mask}
        )
        parts = [
            hidden[row, len(ids) - count - 1 : len(ids) - 1]
            for row, (ids, count) in enumerate(sequences)
        ]
        logits = backbone.logits(
            keras.ops.convert_to_tensor(np.concatenate(parts)[None])
        )
        logits = keras.ops.convert_to_numpy(keras.ops.cast(logits, "float32"))[0]
        logits = logits.astype("float64")
        largest = logits.max(axis=-1)
        totals = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=-1))
        targets = np.concatenate([ids[-count:] for ids, count in sequences])
        own = np.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        ends = np.cumsum([count for _, count in sequences])[:-1]
        values = np.split(own - totals, ends), np.split(own >= largest, ends)
        return [(float(x.sum()), bool(y.all())) for x, y in zip(*values)]

    def windows(self, text):
        """Cuts a text into sequences that predict each of its tokens once."""
        ids, size = self.ids(text), self.length
        ends = [*range(size, len(ids) - 1, size), len(ids) - 1]
        return [
            (ids[max(end - size, 0) : end + 1], end - start)
            for start, end in zip([0, *ends], ends)
            if end > start
        ]


def lm_eval_model(model: Any, batch_size: int = 32) -> Any:
    """Wraps a language model for EleutherAI's Language Model Evaluation Harness.

    Needs the extra `lm-eval`; its tasks download their data. The model is compiled to
    generate greedily, without an optimizer.

    Args:
        model: `keras_moe.models.CausalLM` with a tokenizer.
        batch_size: sequences per batch.

    Returns: An `lm_eval.api.model.LM`.

    Reference: *MoE++*, appendix C.

    Example:

    ```python
    model = lm_eval_model(models.from_preset("moepp_lm_python"))
    lm_eval.simple_evaluate(model, tasks=["arc_easy"])["results"]
    ```
    """
    needs = ("Expected the package lm_eval", "lm-eval")
    base = import_extra("lm_eval.api.model", *needs).LM
    scorer = _Scorer(model, batch_size)
    model.compile(sampler="greedy")

    class KerasMoELM(base):
        """Answers lm_eval's three kinds of requests."""

        def loglikelihood(self, requests, disable_tqdm=False):
            pairs = [request.args for request in requests]
            return scorer.scores([scorer.encoded(*pair) for pair in pairs])

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            windows = [scorer.windows(request.args[0]) for request in requests]
            scores = iter(scorer.scores([x for own in windows for x in own]))
            return [sum(next(scores)[0] for _ in own) for own in windows]

        def generate_until(self, requests, disable_tqdm=False):
            return [_generated(scorer, *request.args) for request in requests]

    return KerasMoELM()


def _generated(scorer: _Scorer, context: str, options: dict) -> str:
    """What a model writes after a context, by the options of a task of lm_eval."""
    until = options.get("until") or []
    until = [until] if isinstance(until, str) else until
    model, length = scorer.model, scorer.length
    most = min(int(options.get("max_gen_toks", _MOST_NEW)), length - 1)
    ids = np.array([scorer.ids(context)[-(length - most) :]], "int32")
    prompt = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    written = model.generate(prompt, ids.shape[1] + most, strip_prompt=True)
    kept = written["token_ids"][0][np.asarray(written["padding_mask"][0], bool)]
    (text,) = scorer.tokenizer.texts([kept])
    for stop in filter(None, until):
        text = text.split(stop)[0]
    return text
