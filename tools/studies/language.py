"""Compare small language models: dense, a vanilla mixture, MoE++ and muMoE.

The text is the documentation of Python's standard library (PSF-2.0), its source code
(python_sources, some 10M tokens), or other --data. It is split by document; the
tokenizer is trained on the training documents. No model but the wide one has more
active parameters than the dense one. They train for equal steps on the same rows.

rates trains the dense model and the vanilla mixture for a third of the steps, to choose
the learning rate; ngrams chooses the order of a Kneser-Ney model; both look at the
validation documents alone. training trains all models from several seeds by the chosen
rate, and looks at the test documents once, at its end. contexts says where n-grams and
models are ahead of each other there: by how many of the tokens before a token the
training documents have in a row, and for n-grams of no more rows than models train on.
types trains MoE++ with several numbers of constant experts (Figure 3 of the paper),
removes types of experts after training (Table C), and counts the experts of each type
by the class of the token (Figure 4), all on validation documents.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rich.console import Console

from keras_moe import analysis, models
from keras_moe.analysis.tokens import flow_statistics, main_experts
from keras_moe.cli._arguments import RESUMES, Result, add_count, add_output
from keras_moe.cli.train import backend_and_versions
from keras_moe.losses.language import logit_log_likelihoods
from keras_moe.ops.expert_types import EXPERT_TYPES
from tools.studies import plots
from tools.studies.moepp import REMOVALS
from tools.studies.ngrams import KneserNey
from tools.studies.study import (
    OnProgress,
    Part,
    Run,
    Study,
    add_numbers,
    add_parts,
    new_table,
    percent,
    plus_minus,
    run_parts,
    spread,
    spread_of,
)
from tools.studies.texts import CLASSES, Texts

EXAMPLES = """\
python -m tools.studies language
python -m tools.studies language --data python_sources --steps 20000 --hidden-dim 64
python -m tools.studies language --parts ngrams"""
INTERRUPTED = RESUMES
PARTS = ("rates", "ngrams", "training", "contexts", "types")
ORDERS = range(2, 11)
# Points of each curve of validation perplexities.
POINTS = 10
# Rows of a batch without training.
EVALUATED = 64
WITHOUT_RESIDUALS = "MoE++, tau=0.75, no gating residuals"
# The presets and what they do not share. A dense SwiGLU layer of 2 H has the weights of
# two experts of H, and of a muMoE layer of match_dense with 3 H. Without a width it has
# the weights of all experts.
MODELS = {
    "dense": ("moe_lm_0.6b", {"moe_layers": None}, 2),
    "wide dense": ("moe_lm_0.6b", {"moe_layers": None}, None),
    "vanilla MoE": ("moe_lm_0.6b", {}, 1),
    "MoE++, tau=0.75": ("moepp_lm_0.6b", {"tau": 0.75}, 1),
    "MoE++, tau=0.25": ("moepp_lm_0.6b", {"tau": 0.25}, 1),
    WITHOUT_RESIDUALS: ("moepp_lm_0.6b", {"tau": 0.75, "gating_residual": False}, 1),
    "muMoE": (
        "mumoe_gpt2_cp",
        {
            "num_experts": 64,
            "rank": "match_dense",
            "positions": "rotary",
            "norm": "rms",
            "use_bias": False,
        },
        3,
    ),
}
# MoE++ by its number of constant experts, beside one zero and one copy expert.
CONSTANTS = {
    f"MoE++, {number} constant experts": (
        "moepp_lm_0.6b",
        {"tau": 0.75, "constant_experts": number},
        1,
    )
    for number in (0, 2, 4, 6)
}
DEFAULT_TYPES = "MoE++, 2 constant experts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, PARTS)
    parser.add_argument(
        "--data", default="python_docs", metavar="SOURCE", help="The texts."
    )
    group = parser.add_argument_group("runs")
    group.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        metavar="MODEL",
        help="The models of training, by their names in its table.",
    )
    what = "The learning rates to choose from."
    add_numbers(group, "--rates", "RATE", what, [1e-3, 3e-3, 1e-2, 3e-2])
    for name, default, text in (
        ("seeds", 3, "The number of seeds from which each model trains."),
        ("steps", 500, "The number of steps of each model."),
        ("batch-size", 8, "Rows in a step."),
        ("length", 64, "Tokens in a row."),
        ("vocabulary-size", 1024, "The number of tokens of the vocabulary."),
        ("hidden-dim", 128, "The size of a token in the models."),
        ("mlp-dim", 128, "The size of an expert's hidden layer."),
        ("layers", 4, "The number of blocks."),
        ("experts", 8, "The number of experts of a layer."),
    ):
        add_count(group, f"--{name}", text, default)
    add_output(group, "The folder of the results.", Path("runs/language_study"))
    group.add_argument(
        "--restart", action="store_true", help="Delete the finished runs first."
    )


def run(args: argparse.Namespace, console: Console) -> Result:
    names = ("data", "steps", "batch_size", "length", "vocabulary_size")
    names += ("hidden_dim", "mlp_dim", "layers", "experts")
    settings = {name: getattr(args, name) for name in names}
    texts = Texts(args.data, args.vocabulary_size, args.length)
    # Of the library's texts, another version of Python has others.
    settings = {**settings, "texts": texts.digest, **backend_and_versions()}
    study = Study(args.output, settings, console, args.restart)
    trainer = Trainer(texts, settings)
    rates = Rates(study, trainer, args.rates)
    ngrams = Ngrams(study, texts)
    trained = Training(study, trainer, args.seeds, rates, models=args.models)
    parts = {
        "rates": rates,
        "ngrams": ngrams,
        "training": trained,
        "contexts": Contexts(study, ngrams, trained),
        "types": Types(study, trainer, args.seeds, rates),
    }
    return run_parts(study, {x: parts[x] for x in PARTS if x in args.parts})


class Trainer:
    """Trains models, each compiled once for all its seeds."""

    def __init__(self, texts: Texts, settings: dict):
        self.texts, self.settings = texts, settings
        self._kept = (None, None)

    def of(self, name: str) -> tuple[str, dict[str, Any], int | None]:
        """A model's preset, its overrides and its width."""
        return {**MODELS, **CONSTANTS}[name]

    def overrides(self, name: str) -> dict[str, Any]:
        """The overrides of a model's preset."""
        _, own, width = self.of(name)
        size = self.settings
        experts = {}
        if own.get("moe_layers", 1) is not None and "num_experts" not in own:
            experts = {"num_experts": size["experts"]}
        return {
            "vocabulary_size": size["vocabulary_size"],
            "max_length": size["length"],
            "hidden_dim": size["hidden_dim"],
            "num_layers": size["layers"],
            "num_heads": 4,
            "mlp_dim": (width or size["experts"]) * size["mlp_dim"],
            "tied_embeddings": True,
            **experts,
            **own,
        }

    def new_model(self, name: str, seed: int) -> keras.Model:
        """A model with the weights of a seed."""
        return models.from_preset(
            self.of(name)[0],
            task="causal_lm",
            load_weights=False,
            seed=seed,
            **self.overrides(name),
        )

    def prepared(self, name: str, seed: int, rate: float, steps: int) -> keras.Model:
        """A compiled model at step 0."""
        keras.utils.set_random_seed(seed)
        key, new = (name, rate, steps), self.new_model(name, seed)
        if self._kept[0] != key:
            schedule = keras.optimizers.schedules.CosineDecay(
                0.0, steps, 0.1, warmup_target=rate, warmup_steps=steps // 10
            )
            optimizer = keras.optimizers.AdamW(
                schedule, weight_decay=0.1, global_clipnorm=1.0, beta_2=0.95
            )
            new.compile(optimizer)
            self._kept = (key, new)
            # Compiles outside the measured time; the step is undone below.
            self._fit(new, self.batches(seed), 1)
            keras.utils.set_random_seed(seed)
            new = self.new_model(name, seed)
        model = self._kept[1]
        model.set_weights(new.get_weights())
        for variable in model.optimizer.variables:
            if variable is not model.optimizer._learning_rate:
                variable.assign(np.zeros(variable.shape))
        return model

    def batches(self, seed: int) -> Iterator[dict[str, np.ndarray]]:
        """The rows of each step: another order of all rows in each pass."""
        rows = self.texts.rows["train"]
        count, size = len(rows["token_ids"]), self.settings["batch_size"]
        for number in itertools.count():
            order = np.random.default_rng([seed, number]).permutation(count)
            for chosen in order[: count // size * size].reshape(-1, size):
                yield {name: x[chosen] for name, x in rows.items()}

    def fit(
        self, name: str, seed: int, rate: float, steps: int, on_progress: OnProgress
    ) -> tuple[keras.Model, dict]:
        """Trains a model; returns it with CPU seconds per step and a curve."""
        model, seconds, curve = self.prepared(name, seed, rate, steps), 0.0, []
        ends = sorted({steps * point // POINTS for point in range(POINTS + 1)})
        validation = {k: x[:192] for k, x in self.texts.rows["validation"].items()}
        batches = self.batches(seed)
        for begin, end in itertools.pairwise(ends):
            # Of all cores, whatever else the machine does.
            before = time.process_time()
            self._fit(model, batches, end - begin)
            seconds += time.process_time() - before
            value = self.perplexity(model, validation)
            curve.append([end, seconds, value])
            on_progress(f"step {end} of {steps}, perplexity {value:.1f}")
        return model, {"seconds_per_step": seconds / steps, "curve": curve}

    def _fit(self, model, batches, steps):
        own = ((rows,) for rows in itertools.islice(batches, steps))
        model.fit(own, steps_per_epoch=steps, shuffle=False, verbose=0)

    def perplexity(self, model: keras.Model, rows: dict[str, np.ndarray]) -> float:
        """The perplexity of rows; rows without targets fill the last batch."""
        size, missing = EVALUATED, -len(rows["targets"]) % EVALUATED
        rows = {
            k: np.concatenate([x, x[:1].repeat(missing, 0)]) for k, x in rows.items()
        }
        rows["targets"][len(rows["targets"]) - missing :] = -1
        values = model.evaluate(rows, batch_size=size, verbose=0, return_dict=True)
        return float(values["perplexity"])

    def losses(self, model: keras.Model, rows: dict[str, np.ndarray]) -> np.ndarray:
        """The loss of each target of rows, in nats."""
        found = []
        for first in range(0, len(rows["targets"]), EVALUATED):
            batch = {k: x[first : first + EVALUATED] for k, x in rows.items()}
            targets = batch.pop("targets")
            values = logit_log_likelihoods(model.predict_on_batch(batch), targets)
            found.append(-keras.ops.convert_to_numpy(values)[targets >= 0])
        return np.concatenate(found)

    def routing(self, model: keras.Model) -> tuple[dict, *tuple[np.ndarray, ...]]:
        """Routing of validation rows; which tokens are real, their ids and classes."""
        rows = {k: x[:192] for k, x in self.texts.rows["validation"].items()}
        inputs = {name: rows[name] for name in ("token_ids", "padding_mask")}
        routing = keras.Model(model.input, model.routing).predict(
            inputs, batch_size=EVALUATED, verbose=0
        )
        mask = rows["padding_mask"] > 0
        ids = rows["token_ids"][mask]
        return routing, mask, ids, self.texts.classes()[ids]


class Rates(Part):
    """Validation perplexities by learning rate, after a third of the steps."""

    def __init__(self, study: Study, trainer: Trainer, rates: Sequence[float]):
        super().__init__(study)
        self.trainer, self.rates = trainer, rates

    def results(self) -> dict:
        names = ("dense", "vanilla MoE")
        steps = max(self.trainer.settings["steps"] // 3, 1)

        def make(name, rate, on_progress):
            return self.trainer.fit(name, 100, rate, steps, on_progress)[1], {}

        runs = [
            Run(
                f"{name}, rate {rate:g}",
                100,
                {"overrides": self.trainer.overrides(name), "steps": steps},
                functools.partial(make, name, rate),
            )
            for name in names
            for rate in self.rates
        ]
        found = self.study.finish_all(runs)
        rows = {row: x[0]["curve"][-1][-1] for row, x in found.items()}
        by_rate = {
            rate: np.mean([np.log(rows[f"{name}, rate {rate:g}"]) for name in names])
            for rate in self.rates
        }
        return {"rows": rows, "chosen": min(by_rate, key=by_rate.get)}

    def show(self, results: dict, console: Console) -> None:
        table = new_table(
            f"Learning rates; chosen: {results['chosen']:g}",
            *("model", "validation perplexity"),
        )
        for name, value in results["rows"].items():
            table.add_row(name, f"{value:.2f}")
        console.print(table)


class Ngrams(Part):
    """Kneser-Ney models by order, on the rows that the other models see."""

    def __init__(self, study: Study, texts: Texts):
        super().__init__(study)
        self.texts = texts

    @functools.cached_property
    def found(self) -> dict[int, tuple[float, KneserNey]]:
        """Models by order, with their validation perplexities."""
        documents = self.texts.documents["train"]
        models = {x: KneserNey(documents, self.texts.size, x) for x in ORDERS}
        return {
            order: (self.perplexity(model, "validation"), model)
            for order, model in models.items()
        }

    @property
    def chosen(self) -> int:
        """The order that validation documents choose."""
        return min(self.found, key=lambda order: self.found[order][0])

    def results(self) -> dict:
        model = self.found[self.chosen][1]
        return {
            "tokens": sum(map(len, self.texts.documents["train"])),
            "rows": {order: value for order, (value, _) in self.found.items()},
            "chosen": self.chosen,
            "test": self.perplexity(model, "test"),
            "ngrams": sum(len(level.keys) for level in model.levels),
        }

    def losses(self, model: KneserNey, split: str) -> tuple[np.ndarray, np.ndarray]:
        """The loss of each target of a split's rows, and its known context.

        Documents of a row are on their own; the first token of each is no target.
        """
        found = [
            model.log_likelihoods(document)
            for document in documents_of(self.texts.rows[split])
        ]
        values, known = (np.concatenate([x[1:] for x in part]) for part in zip(*found))
        return -values, known

    def perplexity(self, model: KneserNey, split: str) -> float:
        """The perplexity of the targets of a split's rows."""
        return float(np.exp(self.losses(model, split)[0].mean()))

    def show(self, results: dict, console: Console) -> None:
        table = new_table(
            f"Kneser-Ney; chosen: order {results['chosen']}, {results['ngrams']:,} "
            f"n-grams, test perplexity {results['test']:.2f}",
            *("order", "validation perplexity"),
        )
        for order, value in results["rows"].items():
            table.add_row(str(order), f"{value:.2f}")
        console.print(table)


def documents_of(rows: dict[str, np.ndarray]) -> Iterator[np.ndarray]:
    """The token ids of the documents, or parts of them, of each row."""
    for ids, mask in zip(rows["token_ids"], rows["padding_mask"]):
        for document in range(1, mask.max() + 1):
            yield ids[mask == document]


class Seeds(Part):
    """A part that trains models from several seeds by the chosen rate."""

    def __init__(self, study: Study, trainer: Trainer, seeds: int, rates: Rates):
        super().__init__(study)
        self.trainer, self.seeds, self.rates = trainer, seeds, rates

    def finish_all(self, names: Iterable[str], rate: float) -> dict[str, list[dict]]:
        """What `measure` says of each model, from each seed."""
        return self.study.finish_all(
            [run for name in names for run in self.runs_of(name, rate)]
        )

    def runs_of(self, name: str, rate: float) -> list[Run]:
        """The runs of a model, one for each seed."""
        settings = {"overrides": self.trainer.overrides(name), "rate": rate}
        return [
            Run(name, seed, settings, functools.partial(self.train, name, seed, rate))
            for seed in range(self.seeds)
        ]

    def train(
        self, name: str, seed: int, rate: float, on_progress: OnProgress
    ) -> tuple[dict, dict]:
        """Trains from a seed and measures the model."""
        steps = self.trainer.settings["steps"]
        model, result = self.trainer.fit(name, seed, rate, steps, on_progress)
        return self.measure(name, model, result, on_progress)

    def measure(
        self, name: str, model: keras.Model, result: dict, on_progress: OnProgress
    ) -> tuple[dict, dict]:
        """The result and the arrays of a run, given the result of its training."""
        raise NotImplementedError


class Training(Seeds):
    """The models, and what their experts do."""

    def __init__(self, *args: Any, models: Sequence[str]):
        super().__init__(*args)
        self.models = dict.fromkeys(("dense", *models))

    def runs(self) -> dict[str, list[Run]]:
        """The runs of each model, done."""
        rate = self.rates.results()["chosen"]
        self.finish_all(self.models, rate)
        return {name: self.runs_of(name, rate) for name in self.models}

    def results(self) -> dict:
        rate, rows = self.rates.results()["chosen"], {}
        for name, results in self.finish_all(self.models, rate).items():
            figures = [x for x in results[0] if isinstance(results[0][x], float)]
            rows[name] = {x: spread_of(results, x) for x in figures}
            rows[name]["curve"] = [x["curve"] for x in results]
            rows[name]["losses"] = [float(np.log(x["test"])) for x in results]
            rows[name] |= {x: results[0][x] for x in ("parameters", "active")}
        dense = rows["dense"]["seconds_per_step"]["mean"]
        for row in rows.values():
            row["time"] = row["seconds_per_step"]["mean"] / dense
            losses = zip(row["losses"], rows["dense"]["losses"])
            row["difference"] = spread([x - y for x, y in losses])
            times = [
                _seconds_until(own, base[-1][-1]) / base[-1][1]
                for own, base in zip(row["curve"], rows["dense"]["curve"])
            ]
            reached = [x for x in times if np.isfinite(x)]
            row["until_dense"] = spread(reached) if reached else None
            row["reached"] = len(reached)
        return {"rate": rate, "steps": self.trainer.settings["steps"], "rows": rows}

    def measure(self, name, model, result, on_progress):
        texts, overrides = self.trainer.texts, self.trainer.overrides(name)
        costs = models.describe(MODELS[name][0], load_weights=False, **overrides)
        losses = self.trainer.losses(model, texts.rows["test"])
        result["validation"] = self.trainer.perplexity(model, texts.rows["validation"])
        result["test"] = float(np.exp(losses.mean()))
        result["parameters"] = model.count_params()
        result["active"] = costs.active_parameters
        if model.routing:
            result |= self.routed(model)
        return result, {"losses": losses}

    def routed(self, model: keras.Model) -> dict[str, float]:
        """What the experts do with the validation documents."""
        routing, mask, ids, classes = self.trainer.routing(model)
        records = list(routing.values())
        experts = [main_experts(record)[mask] for record in records]
        scores = [analysis.routing_scores(record) for record in records]
        flows = [
            flow_statistics(analysis.token_flows(a, b, mask)).information
            for a, b in itertools.pairwise(records)
        ]
        result = {
            "variance_of_gates": float(np.mean([x.highest.var() for x in scores])),
            "same_expert": float(
                np.mean([np.mean(a == b) for a, b in itertools.pairwise(experts)])
            ),
            "next_layer": float(np.mean(flows)),
            "by_class": float(np.mean([_explained(classes, x) for x in experts])),
            "by_token": float(np.mean([_explained(ids, x) for x in experts])),
        }
        types = model.backbone.expert_types
        if types is not None and types.zero_computation:
            per_token = analysis.experts_per_token(routing, types)[mask]
            result["ffn_experts"] = float(per_token.mean())
        return result

    def show(self, results: dict, console: Console) -> None:
        table = new_table(
            f"{results['steps']} steps",
            "model",
            *("parameters", "active", "validation", "test", "loss - dense"),
            *("time", "until dense"),
            *("FFN per token", "variance of gates", "next layer %", "class %", "id %"),
        )
        for name, row in results["rows"].items():
            until, reached = row["until_dense"], row["reached"]
            cells = [f"{plus_minus(until)}, {reached} seeds" if reached else "never"]
            for key, text in (
                ("ffn_experts", plus_minus),
                ("variance_of_gates", functools.partial(plus_minus, digits=4)),
                ("next_layer", percent),
                ("by_class", percent),
                ("by_token", percent),
            ):
                cells.append(text(row[key]) if key in row else "")
            table.add_row(
                name,
                f"{row['parameters']:,}",
                f"{row['active']:,}",
                plus_minus(row["validation"]),
                plus_minus(row["test"]),
                plus_minus(row["difference"], 3),
                f"{row['time']:.2f}",
                *cells,
            )
        console.print(table)

    def draw(self, every: dict) -> list[Path]:
        path = self.study.folder / "language.png"
        rows = every["training"]["rows"]
        plots.plot_losses_over_steps(rows, path, "Language models")
        return [path]


class Contexts(Part):
    """Where n-grams are ahead of trained models, and where they are behind."""

    def __init__(self, study: Study, ngrams: Ngrams, trained: Training):
        super().__init__(study)
        self.ngrams, self.trained = ngrams, trained

    def results(self) -> dict:
        trainer, order = self.trained.trainer, self.ngrams.chosen
        own, known = self.ngrams.losses(self.ngrams.found[order][1], "test")
        seen = KneserNey(self.seen(), trainer.texts.size, order)
        losses = {
            "n-grams": own,
            "n-grams of as many rows": self.ngrams.losses(seen, "test")[0],
            **{
                name: np.mean([self.study.arrays(run)["losses"] for run in runs], 0)
                for name, runs in self.trained.runs().items()
            },
        }
        return {
            "order": order,
            "perplexities": {k: float(np.exp(x.mean())) for k, x in losses.items()},
            "rows": {
                int(length): {
                    "share": float(np.mean(known == length)),
                    **{k: float(x[known == length].mean()) for k, x in losses.items()},
                }
                for length in np.unique(known)
            },
        }

    def seen(self) -> list[np.ndarray]:
        """The documents of the rows of seed 0's steps, each row once."""
        trainer = self.trained.trainer
        size, steps = (trainer.settings[x] for x in ("batch_size", "steps"))
        steps = min(steps, len(trainer.texts.rows["train"]["token_ids"]) // size)
        batches = itertools.islice(trainer.batches(0), steps)
        return [document for rows in batches for document in documents_of(rows)]

    def show(self, results: dict, console: Console) -> None:
        names = list(results["perplexities"])
        table = new_table(
            f"Test losses by known context; n-grams of order {results['order']}",
            *("known tokens before", "share %", *names),
        )
        for length, row in results["rows"].items():
            cells = (f"{row[name]:.2f}" for name in names)
            table.add_row(str(length), f"{100 * row['share']:.1f}", *cells)
        cells = (f"{x:.2f}" for x in results["perplexities"].values())
        table.add_row("perplexity", "", *cells)
        console.print(table)


class Types(Seeds):
    """What the types of experts of MoE++ are for, on validation documents."""

    def results(self) -> dict:
        found = self.finish_all(CONSTANTS, self.rates.results()["chosen"])
        default = found[DEFAULT_TYPES]
        return {
            "constants": {
                name: {x: spread_of(results, x) for x in ("perplexity", "ffn_experts")}
                for name, results in found.items()
            },
            "removed": {
                types: spread([x["removed"][types] for x in default])
                for types in default[0]["removed"]
            },
            "by_class": {
                name: {
                    types: spread([x["by_class"][name][types] for x in default])
                    for types in EXPERT_TYPES
                }
                for name in default[0]["by_class"]
            },
        }

    def measure(self, name, model, result, on_progress):
        trainer = self.trainer
        rows = trainer.texts.rows["validation"]
        routing, mask, _, classes = trainer.routing(model)
        counts = {
            expert_type: analysis.experts_per_token(
                routing, model.backbone.expert_types, expert_type
            )[mask]
            for expert_type in EXPERT_TYPES
        }
        result = {
            "perplexity": trainer.perplexity(model, rows),
            "ffn_experts": float(counts["ffn"].mean()),
        }
        if name == DEFAULT_TYPES:
            result["by_class"] = {
                CLASSES[index]: {
                    types: float(x[classes == index].mean())
                    for types, x in counts.items()
                }
                for index in np.unique(classes)
            }
            result["removed"] = {}
            for types in REMOVALS:
                without = analysis.exclude_experts(model, types)
                without.compile()
                label = types if isinstance(types, str) else " and ".join(types)
                result["removed"][label] = trainer.perplexity(without, rows)
                on_progress(f"without {label}")
        return result, {}

    def show(self, results: dict, console: Console) -> None:
        table = new_table(
            "Constant experts", "model", "validation perplexity", "FFN per token"
        )
        for name, row in results["constants"].items():
            cells = (plus_minus(row[x]) for x in ("perplexity", "ffn_experts"))
            table.add_row(name, *cells)
        console.print(table)
        table = new_table("Removed after training", "types", "validation perplexity")
        for name, value in results["removed"].items():
            table.add_row(name, plus_minus(value))
        console.print(table)
        table = new_table("Experts of a token", "class", *EXPERT_TYPES)
        for name, row in results["by_class"].items():
            table.add_row(name, *(plus_minus(row[x]) for x in EXPERT_TYPES))
        console.print(table)


def _seconds_until(curve, perplexity):
    """Seconds until a curve falls to a perplexity, by its logarithm between points."""
    for (_, before, last), (_, after, value) in zip([curve[0], *curve], curve):
        if value <= perplexity:
            if value == last:
                return after
            share = np.log(last / perplexity) / np.log(last / value)
            return before + share * (after - before)
    return float("inf")


def _explained(groups, experts):
    """Share of the experts' entropy that groups explain, less that of shuffled groups.

    Few tokens of many groups explain something by chance.
    """

    def information(groups):
        counts = np.zeros((groups.max() + 2, experts.max() + 2))
        np.add.at(counts, (groups, experts), 1)
        return flow_statistics(counts).information

    shuffled = np.random.default_rng(0).permutation(groups)
    return information(groups) - information(shuffled)
