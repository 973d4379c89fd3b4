"""The objective of language models. Axes: B batch, N tokens."""

import dataclasses
import hashlib

import numpy as np
from keras import ops

from keras_moe import data
from keras_moe._processes import process_shard
from keras_moe.losses import next_tokens
from keras_moe.models import CausalLM, Perplexity, pack
from keras_moe.training._tokenized import TokenizedObjective
from keras_moe.training.data_sections import Datasets, TextData
from keras_moe.training.objectives import Monitor, register_objective


@register_objective("next_token")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NextToken(TokenizedObjective):
    """Predicts each token of a text from those before it.

    Models are compared by the perplexity of held-out documents.

    Args:
        tokenizer: `"trained"` trains byte pairs on the training texts; see
            `Contrastive` for other values. None uses the preset's tokenizer if it has
            one, else `"trained"`.
        vocabulary_size: maximum size of a trained vocabulary; None uses the model's.
        max_length: number of tokens in a row; None uses the model's. A preset's
            tokenizer has a fixed length.

    Example:

    >>> from keras_moe.training import NextToken
    >>> NextToken().monitor
    Monitor(metric='val_perplexity', mode='min')
    """

    monitor = Monitor("val_perplexity", "min")
    data_section = TextData
    lower_case = False

    def model_arguments(self, num_classes):
        return {"task": CausalLM.task_name}

    def texts(self, config, data_dir):
        sources = config.weights
        loaded = (data.load_texts(x, config.train_split, data_dir) for x in sources)
        return [text for texts in loaded for text in texts]

    def datasets(self, config, model, batch_size, seed, data_dir=None, start_step=0):
        rows = self._rows(config, model, tuple(config.weights), data_dir)
        mixed = len(rows) > 1
        number = sum(len(x["token_ids"]) for x in rows.values())
        steps = config.steps_per_epoch(config.epoch_size or number, batch_size)
        shard = process_shard()
        train = data.load_rows(
            rows if mixed else next(iter(rows.values())),
            batch_size,
            config.weights if mixed else None,
            seed=seed,
            repeat=True,
            start_batch=start_step,
            shard=shard,
        )
        test = _for_evaluation(self._rows(config, model, None, data_dir), batch_size)
        test = data.load_rows(test, batch_size, shuffle=False, shard=shard)
        return Datasets(train, test, None, steps)

    def _rows(self, config, model, sources, data_dir):
        """Packed rows by training source, or for None those of the test split."""
        tokenizer = model.preprocessor
        key = (sources, data_dir)
        # A run asks again when it resumes; another run may have another tokenizer.
        owner, rows = config.packed.get(key, (None, None))
        if owner is not tokenizer:
            rows = (
                _packed(model, config.evaluated_source, config.test_split, data_dir)
                if sources is None
                else {
                    x: _packed(model, x, config.train_split, data_dir) for x in sources
                }
            )
            config.packed[key] = tokenizer, rows
        return rows

    def loss_and_metrics(self, model, config):
        return "auto", [Perplexity()]

    def taken_from_data(self, model, config):
        """Adds a digest of the packed rows, which another document would move."""
        digest = hashlib.sha256()
        for (sources, _), (_, rows) in config.packed.items():
            for source in sources or ():
                digest.update(rows[source]["token_ids"])
        found = super().taken_from_data(model, config)
        return {**found, "rows_sha256": digest.hexdigest()}


def _packed(model, source, split, data_dir):
    tokenizer = model.preprocessor
    texts = data.load_texts(source, split, data_dir)
    # One at a time: lists of ids take many times the memory of arrays.
    documents = (tokenizer.documents(text)[0] for text in texts)
    rows = pack(documents, model.max_length, tokenizer.padding_id)
    return {
        name: x.astype("uint16") if x.max() < 2**16 else x for name, x in rows.items()
    }


def _for_evaluation(rows, batch_size):
    """Rows with targets, filled up to whole batches with rows that do not count."""
    missing = -len(rows["token_ids"]) % batch_size
    filled = {
        name: np.concatenate([x, x[:1].repeat(missing, axis=0)]).astype("int32")
        for name, x in rows.items()
    }
    # Padding counts neither for the loss nor for statistics of routers.
    filled["padding_mask"][len(rows["token_ids"]) :] = 0
    targets = next_tokens(filled["token_ids"], filled["padding_mask"])
    return {**filled, "targets": ops.convert_to_numpy(targets)}
