"""Figures of routers and experts while a model trains, without an effect on it."""

import csv
import functools
import json

import keras
import numpy as np
import pytest

from keras_moe import models, training
from keras_moe.analysis import expert_usage, prune_experts, select_experts
from tests.refusals import refuses
from tests.small_models import SMALL, with_weights
from tests.training.runs import assert_same_models

IMAGES = np.random.default_rng(0).normal(size=(8, 16, 8, 2)).astype("float32")
LABELS = np.eye(3, dtype="float32")[np.arange(8) % 3]
VIT = {**SMALL, "num_layers": 2, "seed": 0}
ROUTERS = {
    "token choice": {"capacity_factor": 1.0, "dropout_rate": 0.1},
    "expert choice": {"router": "softmax_expert_choice"},
    "soft": {"router": "soft"},
    "sinkhorn": {"router": "sinkhorn_token_choice"},
    "moe++": {"zero_experts": 1, "copy_experts": 1, "constant_experts": 1},
    "mumoe": {"router": "mumoe"},
}


def classifier(**options):
    keras.utils.set_random_seed(0)
    made = models.from_preset("vit_s16", num_classes=3, **{**VIT, **options})
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    made.compile("sgd", loss, metrics=[keras.metrics.CategoricalAccuracy()])
    return made


def fit(model, *callbacks, data=(IMAGES, LABELS), batch_size=4, epochs=3, **options):
    options = {"batch_size": batch_size, "epochs": epochs, "shuffle": False, **options}
    return model.fit(*data, **options, callbacks=callbacks, verbose=0).history


def quiet_health(**options):
    """A callback that never warns."""
    limits = {"min_entropy": 0.0, "max_share": 1.0, "max_dead": 1.0}
    return training.RouterHealth(IMAGES[:4], **limits, **options)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_has_figures(name):
    health = quiet_health()
    health.set_model(classifier(**ROUTERS[name]))
    with training.callbacks.unchanged(health.model):
        figures = health.measure()
    assert all(np.isfinite(list(figures.values())))
    # In float64, of up to some thousand tokens.
    assert 0 <= figures["router/entropy"] <= 1 + 1e-12
    assert 0 <= figures["router/dead"] <= 1
    (row,) = health._rows
    assert row["layer"] == "block_1"
    assert sum(row["expert_shares"]) == pytest.approx(1.0)
    counts = row["selected_experts"], row["tokens_per_expert"]
    # Two of four experts for nine tokens of each of four images.
    assert counts == {
        "token choice": (2, 18), "sinkhorn": (2, 18), "mumoe": (None, None),
    }.get(name, counts)  # fmt: skip
    assert (health.costs.routed_share > 0) == (name != "mumoe")
    has_choices = name in ("token choice", "sinkhorn", "moe++")
    assert (row["dropped_choices"] is not None) == has_choices
    if name == "token choice":
        # Training limits capacity: some choices meet a full expert.
        assert row["dropped_choices"] > 0
        inference = training.RouterHealth(IMAGES[:4], training=False)
        inference.set_model(health.model)
        assert inference.measure()["router/dropped"] == 0


@pytest.mark.parametrize("mask_padding", [True, False])
def test_pairs_have_figures_by_modality(mask_padding):
    blocks = {k: x for k, x in VIT.items() if k not in ("image_shape", "patch_size")}
    text = {"vocabulary_size": 9, "max_length": 4, "mask_padding": mask_padding}
    image = {**VIT, "evaluation": "batch_invariant", "eval_capacity": 1}
    keras.utils.set_random_seed(0)
    backbone = models.CLIPBackbone(image=image, text={**blocks, **text})
    model = models.ContrastiveModel(backbone)
    token_ids = np.array([[1, 7, 8, 0], [1, 8, 0, 0]], "int32")
    padding_mask = token_ids != 0
    pairs = {"images": IMAGES, "token_ids": token_ids, "padding_mask": padding_mask}
    refuses(r"lengths \[2, 8\]", training.RouterHealth, pairs)
    pairs["images"] = IMAGES[:2]
    health = training.RouterHealth(pairs, training=False)
    health.set_model(model)
    health.measure()
    of_images, of_texts = health._rows
    assert (of_images["layer"], of_texts["layer"]) == ("image/block_1", "text/block_1")
    # Experts of images serve one token each; nothing else limits those of texts, and
    # padding is no token that was dropped.
    assert of_images["dropped_choices"] > 0
    assert of_texts["dropped_choices"] == of_texts["dropped_tokens"] == 0
    records = keras.Model(model.input, model.routing).predict(pairs, verbose=0)
    gates = records["text/block_1"].gates.max(axis=-1)
    expected = gates[padding_mask].mean() if mask_padding else gates.mean()
    np.testing.assert_allclose(of_texts["mean_max_gate"], expected, rtol=1e-6)


# PyTorch draws dropout without a seed, and the order of examples, from one generator.
@pytest.mark.parametrize("seed", [None, 5])
def test_training_is_the_same_with_it(tmp_path, seed):
    make = functools.partial(classifier, **ROUTERS["token choice"], seed=seed)
    expected = fit(plain := make(), shuffle=True)
    watched = make()
    board = tmp_path / "board"
    health = quiet_health(
        unit="steps", csv_path=tmp_path / "health.csv", tensorboard=board
    )
    examples = IMAGES, LABELS.argmax(1)

    def task(model):
        """An evaluator may do what it likes with metrics."""
        return {"loss": model.evaluate(IMAGES, LABELS, verbose=0)[0]}

    few_shot = training.FewShot(examples, examples, shots=(1, 2))
    evaluation = training.PeriodicEvaluation(
        {"few_shot": few_shot, "task": task}, every=2
    )
    history = fit(watched, health, evaluation, shuffle=True)
    assert {name: history[name] for name in expected} == expected
    assert_same_models(watched, plain)
    # Measured after each of the 2 x 3 steps, and reported at each epoch's end.
    assert [record["step"] for record in health.records] == [1, 2, 3, 4, 5, 6]
    assert len(history["router/entropy"]) == 3
    assert len(history["few_shot/1_shot"]) == len(history["task/loss"]) == 1
    rows = rows_of(tmp_path / "health.csv")
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    shares = [float(share) for share in rows[-1]["expert_shares"].split()]
    assert sum(shares) == pytest.approx(1.0, abs=1e-4)
    assert evaluation.records[0].keys() == {
        "epoch", "step", "few_shot/1_shot", "few_shot/2_shot", "task/loss",
    }  # fmt: skip
    events = _events(board, [])
    assert events["router/block_1/load_entropy", 6] == pytest.approx(
        health.layers[-1]["load_entropy"], rel=1e-6
    )
    assert ("router/block_1/load/3", 1) in events


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def _events(folder, hidden_from):
    import tensorflow as tf

    values = {}
    for path in folder.glob("events*"):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            # TensorBoard hides these steps, since a run began again.
            if event.session_log.status == tf.compat.v1.SessionLog.START:
                hidden_from.append(event.step)
            for value in event.summary.value:
                values[value.tag, event.step] = value.simple_value
    return values


def test_a_collapse_is_told():
    model = classifier(noise_std=0.0)
    router = model.backbone.get_layer("block_1").feed_forward.router
    kernel = next(w for w in router.weights if w.path.endswith("kernel"))
    # All tokens alike: all of them to the same two of four experts.
    kernel.assign(np.zeros(kernel.shape))
    health = training.RouterHealth(IMAGES[:4], training=False, max_dead=0.25)
    health.set_model(model)
    with pytest.warns(UserWarning, match=r"block_1 has collapsed in step 0: .*dead_ex"):
        health.on_epoch_end(0, {})
    assert health.layers[0]["dead_experts"] == 0.5


def test_a_run_that_goes_on_hides_the_events_of_steps_made_again(tmp_path):
    model, hidden_from = classifier(), []
    for step in (3, 2):
        health = quiet_health(tensorboard=tmp_path)
        health.set_model(model)
        health.measure()
        health.measured({"epoch": 0, "step": step})
    assert {step for _, step in _events(tmp_path, hidden_from)} == {2, 3}
    assert sorted(hidden_from) == [2, 3]


# Usage

SIX, CLASSES = IMAGES[:6], np.array([0, 1, 2, 0, 1, 2])
SPARSE = (SIX, CLASSES)


def sparse_classifier(**changes):
    model = with_weights(classifier(router="softmax_token_choice", **changes))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def test_the_window_has_the_last_counts_and_training_is_the_same():
    recorder = training.UsageRecorder(
        SIX, CLASSES, ["a", "b", "c"], every=2, last=4, batch_size=4
    )
    model, plain = sparse_classifier(), sparse_classifier()
    history, expected = (
        fit(*each, data=SPARSE, batch_size=2, epochs=2)
        for each in ((model, recorder), (plain,))
    )
    assert history["loss"] == expected["loss"]
    assert [record["step"] for record in recorder.records] == [2, 4, 6]
    assert 1 <= history["usage/experts"][-1] <= 4
    usage = recorder.usage
    assert usage.groups == ["a", "b", "c"]
    assert len(recorder.get_state()["counts"]) == 2
    kept = select_experts(usage, count=2, groups=["a", "b"])
    pruned = prune_experts(model, kept)
    assert pruned.predict(SIX, verbose=0).shape == (6, 3)


def test_batches_follow_in_turn_and_count_like_a_pass():
    model = sparse_classifier()
    options = {"every": 1, "last": 3, "batch_size": 4, "training": False}
    first = training.UsageRecorder(SIX, CLASSES, **options)
    first.set_model(model)
    for _ in range(2):
        first.measure()
    # A run goes on from its state.
    recorder = training.UsageRecorder(SIX, CLASSES, **options)
    recorder.set_state(json.loads(json.dumps(first.get_state())))
    recorder.set_model(model)
    for each in (first, recorder):
        each.measure()
    assert first.usage.to_dict() == recorder.usage.to_dict()
    # Three batches of four are the six images twice.
    once = expert_usage(model, SIX, CLASSES, verbose=0).blocks["block_1"]
    actual = recorder.usage.blocks["block_1"]
    np.testing.assert_array_equal(actual.tokens, 2 * once.tokens)
    np.testing.assert_allclose(actual.mass, 2 * once.mass, rtol=1e-5)
    recorder.measure()
    assert recorder.usage.blocks["block_1"].tokens.sum() == actual.tokens.sum()


def test_routing_is_that_of_training():
    # Half of the choices find no slot.
    model = sparse_classifier(capacity_factor=0.5, noise_std=0.0)
    totals = []
    for limits in (False, True):
        recorder = training.UsageRecorder(SIX, every=1, batch_size=6, training=limits)
        recorder.set_model(model)
        recorder.measure()
        totals.append(recorder.usage.blocks["block_1"].tokens.sum())
    assert totals[0] == 6 * 9 * 2
    assert totals[1] < 0.7 * totals[0]
