"""Trains language models and generates text.

Axes: B batch, N tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_moe._checks import check_integer, unfit
from keras_moe._compat import ONE_AT_A_TIME, compiled, compiled_once
from keras_moe._types import DType, Tensor
from keras_moe.losses import next_tokens, token_log_likelihoods
from keras_moe.losses.language import logit_log_likelihoods
from keras_moe.models.backbones.decoder import DecoderBackbone
from keras_moe.models.base._input_checks import (
    array_values,
    check_input_names,
    check_texts,
)
from keras_moe.models.base._model import HubCausalLM
from keras_moe.models.loading._sources import ModelSource, TaskConfig
from keras_moe.models.preprocessing.tokenizer import (
    TextTokenizer,
    is_id_array,
    pack,
    padded_rows,
)
from keras_moe.models.registry import register_task
from keras_moe.models.tasks import base

TARGETS = "targets"


@keras.saving.register_keras_serializable("keras_moe")
class Perplexity(keras.metrics.Mean):
    """The exponential of the mean negative log-likelihood of the targets.

    Args:
        name: name of the metric.
        dtype: dtype of the metric.

    Call arguments:
        y_true: targets (B, N), which are ignored.
        y_pred: log-likelihoods (B, N).
        sample_weight: 0 for targets that do not count.

    Example:

    >>> from keras_moe.models import Perplexity
    >>> metric = Perplexity()
    >>> metric.update_state(None, np.log([[0.5, 0.5, 0.1]]), np.array([[1, 1, 0]]))
    >>> round(float(metric.result()), 4)
    2.0
    """

    def __init__(self, name: str = "perplexity", dtype: DType | None = None):
        super().__init__(name, dtype)

    def update_state(
        self, y_true: object, y_pred: Tensor, sample_weight: object = None
    ) -> None:
        super().update_state(-ops.convert_to_tensor(y_pred), sample_weight)

    def result(self) -> Any:
        return ops.exp(super().result())


@register_task
@keras.saving.register_keras_serializable("keras_moe")
class CausalLM(base.LabellessTask, HubCausalLM):
    """A `DecoderBackbone` that is trained on next tokens and generates text.

    `fit` takes texts or lists of token ids, which it packs into rows of `max_length`
    tokens; an array of ids (B, N); or a dict of `"token_ids"` and `"padding_mask"`, see
    `DecoderBackbone`, and optionally `"targets"` (B, N), -1 for positions without a
    loss. By default each token's target is the next one of its document.

    Training and evaluation need the log-likelihoods of the targets only: with
    `"targets"`, or in training, the output is these, float32 (B, N), computed for a few
    positions at a time, and metrics read them. Otherwise the output is the logits.

    Args:
        backbone: a `DecoderBackbone`.
        preprocessor: optional `TextTokenizer` for texts; saved with the model.
        **kwargs: `name`, `trainable` and `compile`.

    Input shape: as the backbone. Output shape: (B, N, V).

    Example:

    >>> from keras_moe.models import CausalLM, DecoderBackbone, TextTokenizer
    >>> texts = ["one two three", "two three four"]
    >>> tokenizer = TextTokenizer.trained(texts, vocabulary_size=520, max_length=16)
    >>> backbone = DecoderBackbone(
    ...     vocabulary_size=520, max_length=16, hidden_dim=8, num_layers=1, num_heads=2,
    ...     mlp_dim=16, moe={"moe_layers": [0], "num_experts": 2},
    ... )
    >>> model = CausalLM(backbone, tokenizer)
    >>> history = model.fit(texts, verbose=0)
    >>> model.score(texts).shape
    (2,)
    >>> model.compile(sampler="greedy")
    >>> model.generate("one", max_length=8).startswith("one")
    True
    """

    task_name = "causal_lm"
    pipeline_tag = "text-generation"
    output_name = "logits"
    backbone_cls = DecoderBackbone
    backbone: DecoderBackbone

    def __init__(
        self,
        backbone: DecoderBackbone,
        preprocessor: TextTokenizer | None = None,
        **kwargs,
    ):
        base.check_task(self, CausalLM, backbone, kwargs)
        base.check_tokenizer(preprocessor, backbone)

        # === Layers ===
        self.backbone = backbone
        self.preprocessor = preprocessor

        # === Functional model ===
        inputs = backbone.input
        logits = backbone.logits(backbone(inputs))
        super().__init__(inputs, logits, backbone.features, backbone.routing, **kwargs)
        # Targets may be in the inputs, too.
        self.input_spec = None

    @classmethod
    def config_from(
        cls, source: ModelSource, overrides: dict, backbone_config: dict
    ) -> TaskConfig:
        config = base.without_large_tokenizer(
            source, source.task_config(), backbone_config
        )
        return TaskConfig({**config, **overrides})

    def compile(
        self,
        optimizer: str | keras.optimizers.Optimizer = "auto",
        loss: object = "auto",
        *,
        metrics: object = "auto",
        sampler: Any = "top_k",
        **kwargs,
    ) -> None:
        """Configures training and generation; see `MoETask.compile`.

        Args:
            optimizer: as in `MoETask.compile`.
            loss: `"auto"`, the mean negative log-likelihood of the targets.
            metrics: metrics of targets and log-likelihoods; `"auto"` is `Perplexity`.
            sampler: a name or an instance of one of `keras_hub.samplers`.
            **kwargs: arguments of `keras.Model.compile`.
        """
        if loss not in ("auto", None):
            raise unfit("loss='auto', the log-likelihood of next tokens", loss=loss)
        sampler = _sampler(sampler)
        super().compile(optimizer, None, metrics=metrics, **kwargs)
        self.sampler = sampler
        self.generate_function = None

    def default_metrics(self, loss: object) -> list:
        """Returns `Perplexity`."""
        return [Perplexity()]

    def get_compile_config(self) -> dict[str, Any]:
        config = super().get_compile_config()
        if config:
            config["sampler"] = keras.saving.serialize_keras_object(self.sampler)
        return config

    # Training

    def training_inputs(self, x: object) -> Any:
        """Returns the inputs that `fit` makes of texts, token ids or a dict.

        Args:
            x: texts, lists of ids, an array of ids (B, N) or a dict. Anything else,
                such as a dataset of dicts, is returned as it is.
        """
        x = self._ids(x)
        if isinstance(x, list):
            padding_id = getattr(self.preprocessor, "padding_id", 0)
            x = pack(x, self.max_length, padding_id)
        x = self._rows(x)
        if not isinstance(x, dict) or TARGETS in x:
            return x
        self.backbone._check_inputs(x)
        names = ("token_ids", "padding_mask")
        arrays: list[Any] = [array_values(x[name]) for name in names]
        if any(array is None for array in arrays):
            return x
        return {**x, TARGETS: ops.convert_to_numpy(next_tokens(*arrays))}

    def _ids(self, x) -> Any:
        """Ids of texts and of lists, as a list; tensors as arrays; others as given."""
        if isinstance(x, np.ndarray) and x.dtype.kind in "OSU":
            x = x.tolist()
        if isinstance(x, str) or _is_list_of(x, str):
            return self._tokenizer().documents(x)
        if _is_list_of(x, (list, tuple, np.ndarray)):
            return list(x)
        if isinstance(x, (list, tuple)) and not len(x):
            raise unfit("at least one text or list of token ids", "none")
        values = array_values(x)
        return x if values is None else values

    @property
    def max_length(self) -> int:
        """Tokens per row of packed texts."""
        return getattr(self.preprocessor, "max_length", self.backbone.max_length)

    def _tokenizer(self):
        if not isinstance(self.preprocessor, TextTokenizer):
            expected = "token ids, or a model with a TextTokenizer for its preprocessor"
            raise unfit(expected, f"texts, preprocessor={self.preprocessor!r}")
        return self.preprocessor

    def fit(
        self, x: object = None, y: object = None, *args: object, **kwargs: object
    ) -> keras.callbacks.History:
        validation = kwargs.get("validation_data")
        if validation is not None and not isinstance(validation, tuple):
            # A list is of texts or ids, and not a pair.
            kwargs["validation_data"] = (validation,)
        return super().fit(x, y, *args, **kwargs)

    def _training_data(self, x, y, sample_weight=None):
        if sample_weight is not None:
            raise unfit("targets of -1 for tokens that do not count", "sample_weight")
        return super()._training_data(self.training_inputs(x), y)

    def _check_inputs(self, inputs, labels=None):
        if labels is not None:
            expected = "next tokens as targets, or a dict with targets as x"
            raise unfit(expected, f"y of {type(labels).__name__}")
        if not isinstance(inputs, dict):
            return
        names = tuple(name for name in inputs if name != TARGETS)
        check_texts(
            inputs if TARGETS not in inputs else {k: inputs[k] for k in names},
            self.backbone.vocabulary_size,
            self.backbone.max_length,
        )
        targets = array_values(inputs.get(TARGETS))
        if targets is None:
            return
        shape, largest = tuple(inputs["token_ids"].shape), self.backbone.vocabulary_size
        fits = targets.shape == shape and targets.dtype.kind in "iu"
        if not fits or (
            targets.size and not -1 <= targets.min() <= targets.max() < largest
        ):
            raise ValueError(
                f"Expected targets to be integers of shape {shape}, from 0 to "
                f"{largest - 1} or -1; received: shape={targets.shape}, "
                f"dtype={targets.dtype}, {targets.min()} to {targets.max()}"
            )

    def call(
        self, inputs: object, training: bool | None = None, mask: Tensor | None = None
    ) -> Any:
        if not isinstance(inputs, dict):
            expected = "a dict of token_ids and padding_mask"
            raise unfit(expected, f"inputs of {type(inputs).__name__}")
        targets = inputs.get(TARGETS)
        inputs = {name: x for name, x in inputs.items() if name != TARGETS}
        if targets is None and not training:
            return super().call(inputs, training=training)
        if targets is None:
            targets = next_tokens(**_documents(inputs))
        tokens = self.backbone(inputs, training=training)
        kernel = self.backbone.token_embedding.logit_kernel()
        return token_log_likelihoods(tokens, kernel, targets)

    def _weighed(self, x, y, y_pred, sample_weight):
        targets = x.get(TARGETS)
        if targets is None:
            targets = next_tokens(**_documents(x))
        if len(y_pred.shape) == 3:
            # Logits, where a data set without targets is evaluated.
            y_pred = logit_log_likelihoods(y_pred, targets)
        return targets, y_pred, ops.cast(targets >= 0, "float32")

    def compute_loss(
        self,
        x: object = None,
        y: object = None,
        y_pred: Tensor | None = None,
        sample_weight: object = None,
        training: bool = True,
    ) -> Any:
        """Returns the mean loss of the targets plus auxiliary losses."""
        _, log_likelihoods, weights = self._weighed(x, y, y_pred, sample_weight)
        total = ops.sum(weights * log_likelihoods)
        loss = -total / ops.maximum(ops.sum(weights), 1.0)
        return sum(self.losses, loss)

    # Inference

    def predict(self, x: object, *args: object, **kwargs: object) -> Any:
        """Returns the logits (B, N, V) of texts, ids or a dict; rows are not packed."""
        return super().predict(self._rows(x), *args, **kwargs)

    def _rows(self, x):
        """A dict of texts or ids, a row for each; anything else as it is."""
        x = self._ids(x)
        if isinstance(x, list):
            padding_id = getattr(self.preprocessor, "padding_id", 0)
            return padded_rows(x, max(map(len, x)), padding_id)
        return padded_rows(x, x.shape[1]) if is_id_array(x) else x

    def score(
        self, inputs: object, per_token: bool = False, batch_size: int = 32
    ) -> np.ndarray:
        """Returns the log-likelihood of each sequence, given its first token.

        Args:
            inputs: texts, lists or an array of ids, or a dict of `"token_ids"` and
                `"padding_mask"`.
            per_token: whether to return one number per token.
            batch_size: sequences per batch.

        Returns: float32 (B,), or (B, N) with 0 for first tokens and padding.
        """
        inputs = self.training_inputs(self._rows(inputs))
        values = self.predict(inputs, batch_size=batch_size, verbose=0)
        # Position t has the log-likelihood of token t + 1.
        values = np.pad(values[:, :-1], ((0, 0), (1, 0)))
        return values if per_token else values.sum(axis=-1)

    def generate(
        self,
        inputs: object,
        max_length: int | None = None,
        stop_token_ids: Any = "auto",
        strip_prompt: bool = False,
    ) -> Any:
        """Continues prompts by the sampler of `compile`.

        Args:
            inputs: a text, several, or a dict of `"token_ids"` and `"padding_mask"`,
                which may be padded on either side.
            max_length: tokens of a prompt with its continuation; by default the longest
                that the model takes for texts, and the length of a dict's arrays.
            stop_token_ids: ids after which a text ends; `"auto"` is the tokenizer's end
                token, if any, and None is none.
            strip_prompt: whether to return continuations without the prompts.

        Returns: a text, a list of them, or a dict as `inputs`. Texts begin with their
        prompts; what follows has lower case if the tokenizer lower-cases, as CLIP's.
        """
        if isinstance(stop_token_ids, str) and stop_token_ids == "auto":
            end = getattr(self.preprocessor, "end_id", None)
            stop_token_ids = None if end is None else [end]
        if stop_token_ids is not None:
            largest = self.backbone.vocabulary_size - 1
            if not isinstance(stop_token_ids, (list, tuple, np.ndarray)):
                expected = "stop_token_ids to be 'auto', None or a list of ids"
                raise unfit(expected, stop_token_ids=stop_token_ids)
            stop_token_ids = tuple(
                check_integer("stop_token_ids", id, 0, largest) for id in stop_token_ids
            )
        if max_length is not None:
            check_integer("max_length", max_length, maximum=self.backbone.max_length)
        prompts = inputs
        given: Any = [inputs] if isinstance(inputs, str) else inputs
        if not isinstance(inputs, dict):
            max_length = max_length or self.backbone.max_length
            tokenizer = self._tokenizer()
            given = list(given) if isinstance(given, Iterator) else given
            rows = tokenizer.prompts(given)
            # Longer prompts are refused below, by their lengths.
            longest = max([max_length, *map(len, rows)])
            prompts = padded_rows(rows, longest, tokenizer.padding_id)
        prompts = self._checked_prompts(prompts, max_length)
        outputs = self.make_generate_function()(prompts, stop_token_ids=stop_token_ids)
        outputs = {name: ops.convert_to_numpy(x) for name, x in outputs.items()}
        ids, mask = outputs["token_ids"], outputs["padding_mask"]
        is_prompt = ops.convert_to_numpy(_is_prompt(prompts["padding_mask"]))
        if strip_prompt:
            mask = mask & ~is_prompt
        if isinstance(inputs, dict):
            return {"token_ids": ids, "padding_mask": mask}
        masks = (mask, mask & is_prompt)
        texts, own = (
            self._tokenizer().texts([row[kept] for row, kept in zip(ids, one)])
            for one in masks
        )
        if not strip_prompt:
            texts = [*map(_continued, given, own, texts)]
        return texts[0] if isinstance(inputs, str) else texts

    def _checked_prompts(self, prompts, max_length):
        """Prompts of the wanted length, as int32 arrays."""
        check_input_names(prompts, ("token_ids", "padding_mask"))
        prompts = {name: np.asarray(x) for name, x in prompts.items()}
        size = prompts["token_ids"].size
        if not size:
            raise ValueError("Expected at least one prompt; received: none")
        # Of any length, which is refused by the number of tokens below.
        check_texts(prompts, self.backbone.vocabulary_size, max_length=size)
        length = prompts["token_ids"].shape[-1] if max_length is None else max_length
        is_prompt = ops.convert_to_numpy(_is_prompt(prompts["padding_mask"]))
        longest = is_prompt.sum(axis=-1).max(initial=0)
        if longest >= length:
            raise ValueError(
                "Expected prompts of fewer tokens than max_length, at most "
                f"{self.backbone.max_length}; received: a prompt of {longest} tokens, "
                f"max_length={length}"
            )
        prompts = {name: x[:, :length] for name, x in prompts.items()}
        missing = length - prompts["token_ids"].shape[1]
        return {
            name: np.pad(x, ((0, 0), (0, missing))).astype("int32")
            for name, x in prompts.items()
        }

    def make_generate_function(self) -> Callable[..., dict]:
        with ONE_AT_A_TIME:
            if self.generate_function is None:
                self._compiled_logits = compiled(self, self._logits_after)
                function = super().make_generate_function()
                if keras.backend.backend() == "jax":
                    function = compiled_once(function)
                self.generate_function = function
            return self.generate_function

    def _logits_after(self, ids, cache, start):
        """The logits after one more token of each text, its outputs and the cache."""
        tokens, cache = self.backbone.call_with_cache(ids, cache, start)
        logits = self.backbone.logits(tokens)
        return ops.squeeze(logits, 1), ops.squeeze(tokens, 1), cache

    def generate_step(self, inputs: dict, stop_token_ids: Any = None) -> dict:
        """Generates a batch; compiled by `make_generate_function`."""
        token_ids, prompt_mask = inputs["token_ids"], inputs["padding_mask"]
        is_prompt = _is_prompt(prompt_mask)
        backbone = self.backbone
        cache = backbone.empty_cache(prompt_mask)
        hidden, cache = backbone.call_with_cache(token_ids, cache, 0)
        # All tokens after a prompt are real, and belong to its last document.
        prompt_mask = ops.cast(prompt_mask, "int32")
        last = ops.max(prompt_mask, axis=1, keepdims=True)
        mask = ops.where(is_prompt, prompt_mask, last)
        cache["padding_mask"] = mask

        logits_after = getattr(self, "_compiled_logits", self._logits_after)

        def next_logits(prompt, cache, index):
            shape = (ops.shape(prompt)[0], 1)
            ids = ops.slice(prompt, (0, index - 1), shape)
            return logits_after(ids, cache, index - 1)

        token_ids = self.sampler(
            next=next_logits,
            prompt=token_ids,
            cache=cache,
            # The first position that is not in every prompt.
            index=ops.min(ops.sum(ops.cast(is_prompt, "int32"), axis=-1)),
            mask=is_prompt,
            stop_token_ids=stop_token_ids,
            hidden_states=hidden,
            model=self,
        )
        mask = mask != 0
        if stop_token_ids is not None:
            ends = ops.zeros_like(is_prompt)
            for token in stop_token_ids:
                ends = ops.logical_or(ends, token_ids == token)
            ends = ops.cast(ops.logical_and(ends, ops.logical_not(is_prompt)), "int32")
            before = ops.cumsum(ends, axis=1) - ends == 0
            mask = ops.logical_and(mask, before)
        return {"token_ids": token_ids, "padding_mask": mask}


def _sampler(sampler):
    """One of KerasHub's samplers by its name, or itself."""
    samplers, known = keras_hub.samplers, sampler
    if isinstance(sampler, (str, dict)):
        known = samplers.get(sampler)
    if not isinstance(known, samplers.Sampler):
        expected = "one of keras_hub.samplers or its name, such as 'top_k'"
        raise unfit(expected, sampler=sampler)
    return known


def _continued(prompt, tokens_of_prompt, text):
    """A prompt as it was given, whose case and spaces tokens may not have kept."""
    if not text.startswith(tokens_of_prompt):
        return text
    rest = text.removeprefix(tokens_of_prompt)
    if prompt != tokens_of_prompt and prompt[-1:].isspace():
        rest = rest.lstrip(" ")
    return prompt + rest


def _documents(inputs):
    return {"token_ids": inputs["token_ids"], "documents": inputs["padding_mask"]}


def _is_prompt(padding_mask):
    """The positions up to a prompt's last token, with padding on the left."""
    later = ops.flip(ops.cast(padding_mask, "int32"), axis=1)
    return ops.flip(ops.cumsum(later, axis=1), axis=1) > 0


def _is_list_of(x, types):
    return isinstance(x, (list, tuple)) and len(x) > 0 and isinstance(x[0], types)
