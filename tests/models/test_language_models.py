"""Language models: causality, padding, packing, training, generation, bad input."""

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

from keras_moe import distribution, losses, models
from keras_moe.models import CausalLM, DecoderBackbone, TextTokenizer, pack
from tests.calls import compiled
from tests.compare import assert_close, assert_same
from tests.gradients import gradient_and_outputs
from tests.pair_models import TEXT
from tests.refusals import check_refused, refuses
from tests.small_models import GPT2, with_weights

pytestmark = pytest.mark.usefixtures("op_by_op")

SIZES = {
    **TEXT, "max_length": 8, "num_heads": 4, "num_key_value_heads": 2, "mlp_dim": 12,
    "seed": 3,
}  # fmt: skip
KINDS = {
    "dense": {},
    "vmoe": {"moe_layers": [1], "num_experts": 4, "num_selected_experts": 1},
    "moepp": {
        "moe_layers": "every_1", "num_experts": 3, "zero_experts": 1, "copy_experts": 1,
        "constant_experts": 1, "gated_experts": True, "expert_use_bias": False,
    },
    "mumoe": {
        **GPT2, "num_key_value_heads": None, "router": "mumoe", "num_experts": 4,
        "rank": 5, "input_norm": True, "block_norm": False,
    },
}  # fmt: skip
IDS = np.random.default_rng(5).integers(0, 20, (3, 8)).astype("int32")
TEXTS = ["one two three four", "two three four five six", "four five six seven"] * 4


def decoder(kind="moepp", **kwargs):
    return DecoderBackbone.from_config({**SIZES, **KINDS[kind], **kwargs})


def language_model(kind="moepp", **kwargs):
    return CausalLM(with_weights(decoder(kind, **kwargs)))


def inputs(ids=IDS, mask=None):
    mask = np.ones_like(ids) if mask is None else mask
    return {"token_ids": ids, "padding_mask": np.asarray(mask, "int32")}


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return language_model(request.param)


def test_a_later_token_changes_no_earlier_one(model):
    before = model.predict(inputs(), verbose=0)
    for position in (1, 4, 7):
        other = IDS.copy()
        other[:, position] = (other[:, position] + 3) % 20
        change = np.abs(model.predict(inputs(other), verbose=0) - before).max(axis=-1)
        assert change[:, :position].max() < 1e-5
        assert change[:, position].min() > 1e-4


def test_a_model_after_one_of_keras_hub():
    # KerasHub's takes Keras's `Functional` out of the bases of all tasks.
    keras_hub.models.Task(compile=False)
    language_model("dense")


def test_padding_and_the_batch_change_no_result(model):
    expected = model.predict(inputs(), verbose=0)
    padded = np.full((3, 8), 7, "int32")
    mask = np.zeros((3, 8), "int32")
    for row, (start, end) in enumerate([(0, 5), (3, 8), (2, 6)]):
        padded[row, start:end] = IDS[row, : end - start]
        mask[row, start:end] = 1
    received = model.predict(inputs(padded, mask), verbose=0)
    for row in range(3):
        length = mask[row].sum()
        real = received[row][mask[row] > 0]
        assert_close(real, expected[row, :length], 1e-4, 1e-5)
    alone = model.predict(inputs(IDS[:1, :4]), verbose=0)
    assert_close(alone, expected[:1, :4], 1e-4, 1e-5)


def test_documents_of_a_row_are_apart(model):
    expected = model.predict(inputs(), verbose=0)
    packed = np.concatenate([IDS[0, :3], IDS[1, :4]])[None]
    documents = np.array([[1, 1, 1, 2, 2, 2, 2]])
    received = model.predict(inputs(packed, documents), verbose=0)[0]
    assert_close(received[:3], expected[0, :3], 1e-4, 1e-5)
    assert_close(received[3:], expected[1, :4], 1e-4, 1e-5)
    scores = model.score(inputs(packed, documents), per_token=True)[0]
    wanted = model.score(inputs(), per_token=True)
    assert_close(scores[:3], wanted[0, :3], 1e-4, 1e-5)
    assert_close(scores[3:], wanted[1, :4], 1e-4, 1e-5)


@pytest.mark.parametrize("kind", ["moepp", "mumoe"])
def test_decoding_equals_the_whole_sequence(kind):
    model = language_model(kind)
    backbone, mask = model.backbone, np.ones_like(IDS)
    mask[0, :3] = 0
    expected = model.predict(inputs(mask=mask), verbose=0)
    cache = backbone.empty_cache(mask)
    step = compiled(backbone.call_with_cache)
    for start, end in ((0, 4), (4, 5), (5, 6), (6, 8)):
        tokens, cache = step(IDS[:, start:end], cache, start)
        received = ops.convert_to_numpy(backbone.logits(tokens))
        real = mask[:, start:end] > 0
        assert_close(received[real], expected[:, start:end][real], 1e-4, 1e-5)


def test_costs_on_many_devices():
    costs = distribution.costs("moepp_lm_0.6b", 8, batch_size=64)
    assert costs.memory["activations"] > 0
    rules = distribution.layouts("moepp_lm_0.6b", 8, model_parallel=2)
    name = "(.*/)?attention/(query|key|value)/kernel"
    assert rules.weights[name] == (None, "model", None)
    options = {"model_parallel": 2, "num_key_value_heads": 3}
    message = "num_key_value_heads=3"
    refuses(message, distribution.layouts, "moepp_lm_0.6b", 8, **options)


def test_only_chosen_experts_are_computed_for_few_tokens(monkeypatch):
    """Experts that are not chosen may hold anything, and cost nothing."""
    model = language_model("vmoe", num_experts=16)
    router = model.backbone.get_layer("block_1").feed_forward.router
    router.kernel.assign(np.eye(8, 16, dtype="float32") * 50)
    cache = model.backbone.empty_cache(np.ones((1, 2), "int32"))
    experts = model.backbone.get_layer("block_1").feed_forward.experts
    sizes = []
    call = type(experts).call

    def recorded(self, rows, group_sizes=None, training=None):
        sizes.append((tuple(rows.shape), ops.convert_to_numpy(group_sizes)))
        return call(self, rows, group_sizes, training=training)

    monkeypatch.setattr(type(experts), "call", recorded)
    model.backbone.call_with_cache(IDS[:1, :1], cache, 0)
    ((shape, group_sizes),) = sizes
    # One row for one expert.
    assert shape == (1, 8)
    assert sorted(group_sizes)[-2:] == [0, 1]


def test_scores_by_hand(model):
    logits = model.predict(inputs(IDS[:, :5]), verbose=0)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = np.take_along_axis(logits[:, :-1], IDS[:, 1:5, None], -1)[..., 0]
    received = model.score(IDS[:, :5], per_token=True)
    assert_close(received, np.pad(expected, ((0, 0), (1, 0))), 1e-4, 1e-5)
    rows = [IDS[0, :5].tolist(), IDS[1, :3].tolist()]
    scores = [expected[0].sum(), expected[1, :2].sum()]
    assert_close(model.score(rows), np.array(scores), 1e-4, 1e-5)


@pytest.mark.every_backend
def test_chunks_give_the_whole_loss_and_gradient():
    generator = np.random.default_rng(0)
    tokens = generator.normal(size=(2, 7, 4)).astype("float32")
    kernel = generator.normal(size=(4, 9)).astype("float32")
    cotangent = generator.normal(size=(2, 7)).astype("float32")
    targets = generator.integers(-1, 9, (2, 7))

    def scored(tokens, kernel, size=128):
        values = losses.token_log_likelihoods(tokens, kernel, targets, chunk_size=size)
        return ops.sum(ops.multiply(values, cotangent)), [values]

    whole = gradient_and_outputs(scored, tokens, kernel)
    assert min(np.abs(x).max() for x in whole[0]) > 0.1
    logits = (tokens @ kernel).astype("float64")
    own = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    expected = own - np.log(np.exp(logits).sum(axis=-1))
    assert_close(whole[1][0], np.where(targets < 0, 0, expected), 1e-5, 1e-6)
    for size in (3, 7):
        parts = gradient_and_outputs(lambda *x, n=size: scored(*x, n), tokens, kernel)
        assert_close(parts, whole, 1e-4, 1e-6)


def test_packing_by_hand():
    rows = pack([[1, 2, 3, 4, 5], [6], [], [7, 8]], 3, padding_id=9)
    assert rows["token_ids"].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert rows["padding_mask"].tolist() == [[1, 1, 1], [1, 1, 2], [1, 1, 0]]
    refuses("received: none", pack, [[], []], 3)
    for padding_id in (-1, 2**31, 0.5):
        refuses(f"padding_id={padding_id}", pack, [[1]], 3, padding_id)


@pytest.mark.parametrize("ids", [[2**32 + 5], [2**70], [0.5, 1.7], [3, -1], [True]])
def test_ids_are_neither_wrapped_nor_cut(ids):
    model = language_model("dense", num_layers=1)
    for call in (model.fit, model.evaluate, model.score, model.predict):
        refuses(r"token ids|list of integers", call, [[1, 2], ids])
    refuses(r"token ids|list of integers", pack, [ids], 4)
    wide = np.array([[1, 2**32 + 5]])
    refuses("token ids", model.score, wide)


class Batches(keras.utils.PyDataset):
    """A batch of inputs without targets."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return (self.batch,)


def test_ids_of_a_data_set_are_looked_at():
    model = language_model("dense", num_layers=1)
    rows = {"token_ids": np.array([[1, 20]]), "padding_mask": np.ones((1, 2))}
    for call in (model.fit, model.evaluate):
        refuses(r"token ids from 0 .*; received: 20", call, Batches(rows), verbose=0)


@pytest.mark.parametrize("kind", ["texts", "lists", "array", "dict", "data set"])
def test_fit_takes(kind):
    model = language_model("vmoe", num_layers=1, moe_layers=[0], vocabulary_size=520)
    tokenizer = TextTokenizer.trained(TEXTS, 520, max_length=8)
    model.preprocessor = tokenizer
    documents = tokenizer.documents(TEXTS)
    packed = pack(documents, 8, tokenizer.padding_id)
    sources = {"texts": TEXTS, "lists": documents, "array": IDS, "dict": packed}
    x = {**sources, "data set": Batches(packed)}[kind]
    options = {"batch_size": None if kind == "data set" else 64, "verbose": 0}
    loss = model.evaluate(x, **options)[0]
    if kind != "array":
        values = model.score(packed, per_token=True)
        count = (model.training_inputs(packed)["targets"] >= 0).sum()
        assert_close(np.float32(loss), np.float32(-values.sum() / count), 1e-4)
    history = model.fit(x, validation_data=x, **options).history
    assert {"loss", "perplexity", "val_perplexity"} <= set(history)
    refuses("received: y of ndarray", model.fit, packed, packed["token_ids"])
    with pytest.raises(ValueError, match="received: sample_weight"):
        model.fit(packed, sample_weight=np.ones(len(packed["token_ids"])))


@pytest.mark.every_backend
def test_loss_of_ragged_rows_does_not_depend_on_the_batch_size():
    model = language_model("dense", num_layers=1)
    model.compile(keras.optimizers.SGD(0.0))
    lengths = np.array([[8], [2], [3], [6]])
    rows = inputs(np.arange(32, dtype="int32").reshape(4, 8) % 20)
    rows["padding_mask"] = (np.arange(8) < lengths).astype("int32")
    expected = -model.score(rows).sum() / (lengths - 1).sum()
    for size in (1, 2, 4):
        loss, perplexity = model.evaluate(rows, batch_size=size, verbose=0)
        assert_close(np.array([loss, np.log(perplexity)]), [expected] * 2, 1e-5)
        history = model.fit(rows, batch_size=size, verbose=0).history
        assert_close(np.array(history["loss"]), [expected], 1e-5)


@pytest.mark.every_backend
@pytest.mark.usefixtures("traced")
def test_fit_then_generate(tmp_path):
    """It learns to count, is saved with its tokenizer, and goes on counting."""
    keras.utils.set_random_seed(0)
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    texts = [" ".join(words[i : i + 5]) for i in range(3)] * 8
    tokenizer = TextTokenizer.trained(texts, 560, max_length=8)
    sizes = {"vocabulary_size": 560, "hidden_dim": 32, "num_layers": 1}
    backbone = decoder("moepp", **sizes, mlp_dim=32, max_length=16)
    model = CausalLM(backbone, tokenizer)
    model.compile(keras.optimizers.Adam(3e-2), sampler="greedy")
    history = model.fit(texts, epochs=12, batch_size=8, verbose=0).history
    assert history["perplexity"][-1] < 0.1 * history["perplexity"][0]
    # The losses of the experts add to it.
    assert history["loss"][-1] > np.log(history["perplexity"][-1])
    prompts = ["one two", "two three four"]
    received = model.generate(prompts, max_length=8)
    assert received[0].split()[:4] == words[:4]
    assert received[1].split()[:4] == words[1:5]
    rest = model.generate(prompts, max_length=8, strip_prompt=True)
    assert rest[0].split()[:2] == words[2:4]
    scores = model.score(["one two three", "three one two"])
    assert scores[0] > scores[1]
    model.save_to_preset(tmp_path / "saved")
    again = models.from_preset(str(tmp_path / "saved"))
    assert isinstance(again, CausalLM)
    assert again.preprocessor.texts(again.preprocessor.prompts(prompts)) == prompts
    scored = ["one two three", "three one two"]
    assert_close(again.score(scored), scores, 1e-5, 1e-5)


def test_a_continuation_belongs_to_the_last_document_of_its_prompt():
    model = language_model("dense")
    model.compile(sampler="greedy")
    prompt = np.array([[3, 5, 7, 8]] * 3)
    masks = np.array([[1, 1, 1, 1], [2, 2, 2, 2], [1, 1, 2, 2]])
    received = model.generate(inputs(prompt, masks), max_length=8)["token_ids"]
    assert_same(received[1], received[0])
    # Rotary positions are relative, so that the first document changes nothing.
    alone = model.generate(inputs(prompt[:1, 2:]), max_length=6)["token_ids"]
    assert_same(received[2, 2:], alone[0])


def test_predict_and_score_take_what_fit_takes():
    tokenizer = TextTokenizer.trained(TEXTS, 520, max_length=6)
    backbone = decoder("dense", vocabulary_size=520, max_length=16)
    model = CausalLM(with_weights(backbone), tokenizer)
    ids = tokenizer.documents(TEXTS[:1])
    assert model.predict(TEXTS[:1], verbose=0).shape == (1, len(ids[0]), 520)
    # Whole texts, not cut to the tokenizer's length.
    long = TEXTS[0]
    (expected,) = model.score(tokenizer.documents([long]))
    assert len(tokenizer.documents([long])[0]) > 6
    for texts in (long, [long], np.array([long])):
        assert_close(model.score(texts)[0], expected, 1e-6)
    assert_close(model.score(ops.convert_to_tensor(IDS)), model.score(IDS), 1e-6)
    for x in ([], ()):
        for method in (model.score, model.fit, model.predict):
            refuses(r"at least one text.*none", method, x)
    model.fit(TEXTS, validation_data=(TEXTS, None), verbose=0)


def test_generation_stops_and_samples():
    model = language_model("dense")
    model.compile(sampler="greedy")
    prompts = {"token_ids": IDS[:, :3], "padding_mask": np.ones((3, 3), "int32")}
    whole = model.generate(prompts, max_length=8)
    assert whole["padding_mask"].all()
    end = int(whole["token_ids"][0, 4])
    stopped = model.generate(prompts, max_length=8, stop_token_ids=[end])
    for row, ids in enumerate(stopped["token_ids"]):
        places = np.flatnonzero(ids[3:] == end)
        length = 8 if not len(places) else 4 + places[0]
        assert stopped["padding_mask"][row].sum() == length
    for sampler in ("top_k", "top_p", "random", "beam", "contrastive"):
        if sampler == "contrastive":
            import keras_hub

            sampler = keras_hub.samplers.ContrastiveSampler(k=2)
        model.compile(sampler=sampler)
        received = model.generate(prompts, max_length=6)["token_ids"]
        assert_same(received[:, :3], IDS[:, :3])
        assert received.shape == (3, 6)


def test_decoders_train_rematerialised_and_in_half_precision():
    half = {"rematerialize": True, "dtype": "mixed_bfloat16"}
    model = CausalLM(decoder(**half, attention_dropout=0.1))
    history = model.fit(IDS, epochs=2, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert model.predict(inputs(), verbose=0).shape == (3, 8, 20)


@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_a_preset_gives_its_backbone(tmp_path):
    language_model("moepp").save_to_preset(tmp_path / "saved")
    backbone = models.from_preset(str(tmp_path / "saved"), task="backbone")
    assert type(backbone) is DecoderBackbone
    with pytest.raises(ValueError, match="vocabulary_size=21"):
        models.from_preset(str(tmp_path / "saved"), vocabulary_size=21)


def test_compiled_settings_are_saved(tmp_path):
    model = language_model("dense")
    model.compile("sgd", sampler="greedy")
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again.sampler).__name__ == "GreedySampler"
    assert [metric.name for metric in again.metrics] == ["loss", "perplexity"]
    assert_same(again.predict(inputs(), verbose=0), model.predict(inputs(), verbose=0))


@pytest.mark.parametrize(("preset", "overrides", "published"), [
    ("moepp_lm_0.6b", {"gate_hidden_dim": 96}, 582_934_464),
    ("moepp_lm_0.6b", {}, 582_146_496),
    ("moepp_lm_1b", {"gate_hidden_dim": 160}, 1_036_536_768),
    ("moepp_lm_1b", {}, 1_035_208_128),
    ("moepp_lm_2b", {"gate_hidden_dim": 320}, 1_944_221_184),
    ("moepp_lm_2b", {}, 1_941_487_104),
    ("moepp_lm_7b", {"gate_hidden_dim": 160}, 7_681_857_408),
    ("moepp_lm_7b", {}, 7_676_619_648),
    ("moepp_lm_7b", {"tied_embeddings": True}, 7_676_619_648 - 65_536 * 1536),
    ("gpt2", {}, 124_475_904),
    ("gpt2", {"use_bias": False}, 124_373_760),
    ("mumoe_gpt2_cp", {}, 124_836_384),
    ("mumoe_gpt2_tr", {}, 125_205_984),
])  # fmt: skip
def test_published_sizes(preset, overrides, published):
    assert models.describe(preset, **overrides).parameters == published


@pytest.mark.parametrize(
    ("preset", "published"),
    [("mumoe_gpt2_cp", 57_048_096), ("mumoe_gpt2_tr", 57_417_696)],
)
def test_published_sizes_of_the_mlps(preset, published):
    """Table 4."""
    model = models.abstract(preset)
    blocks = [model.get_layer(name).feed_forward for name in model.block_names]
    assert sum(block.count_params() for block in blocks) == published


def test_vanilla_twins():
    for size in ("0.6b", "1b", "2b", "7b"):
        twin = models.resolve(f"moe_lm_{size}").config["moe"]
        aware = models.resolve(f"moepp_lm_{size}").config["moe"]
        same = ("num_experts", "gated_experts", "expert_use_bias", "moe_layers")
        assert all(twin[name] == aware[name] for name in same)
        assert twin["zero_experts"] == twin["constant_experts"] == 0
        router = models.resolve(f"moepp_lm_{size}").unbuilt_blocks()[0]
        router = router.feed_forward.router
        assert (router.tau, router.capacity_factor, router.noise_std) == (0.75, 1.1, 0)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"router": "soft"}, "look ahead.*'name': 'soft'"),
    ({"router": "softmax_expert_choice"}, "'softmax_expert_choice'"),
    ({"router": "sinkhorn_token_choice"}, "affinity='softmax'.*sinkhorn"),
    ({"evaluation": "official"}, "without a capacity.*official"),
    ({"num_modalities": 2}, "without modalities.*num_modalities"),
    ({"positions": "sines"}, "positions='sines'"),
    ({"num_heads": 8, "num_key_value_heads": 8}, "even size.*num_heads=8"),
    ({"rope_theta": 0.0}, "rope_theta=0.0"),
    ({"gating_residual": "all"}, "gating_residual='all'"),
])  # fmt: skip
def test_bad_arguments(arguments, message):
    check_refused(lambda **kw: decoder("vmoe", **kw), arguments, message)


@pytest.mark.parametrize(("x", "message"), [
    (inputs(IDS + 15), "vocabulary_size - 1 = 19; received: "),
    (inputs(np.tile(IDS, 2)), r"max_length=8.*\(3, 16\)"),
    (inputs(mask=np.zeros_like(IDS)), "no padding in each text"),
    ({"token_ids": IDS}, "padding_mask alone"),
    (np.ones((3, 4, 2)), "dict of token_ids and padding_mask; received: inputs of"),
    ({**inputs(), "targets": IDS + 20}, "targets to be integers.*or -1"),
    ({**inputs(), "targets": IDS[:, :3]}, r"targets.*\(3, 8\).*\(3, 3\)"),
])  # fmt: skip
def test_bad_inputs(x, message):
    model = language_model("dense")
    for method in ("predict", "fit", "evaluate"):
        refuses(message, getattr(model, method), x)


@pytest.mark.parametrize(("prompts", "max_length", "message"), [
    (inputs(), None, "a prompt of 8 tokens, max_length=8"),
    (inputs(IDS[:, :3]), 9, "max_length=9"),
    (inputs(IDS[:, :3], np.zeros((3, 3))), 6, "no padding in each text"),
    (inputs(IDS[:, :3] + 18), 6, "vocabulary_size - 1 = 19"),
    ("a text", None, "model with a TextTokenizer"),
    ("a text", 0, "max_length=0"),
    (inputs(IDS[:, :3], -np.ones((3, 3))), 6, "without negative numbers.* -1"),
])  # fmt: skip
def test_bad_prompts(prompts, max_length, message):
    model = language_model("dense")
    refuses(message, model.generate, prompts, max_length)


def test_bad_texts():
    tokenizer = TextTokenizer.trained(TEXTS, 520, max_length=8)
    model = CausalLM(decoder("dense", vocabulary_size=520), tokenizer)
    with pytest.raises(ValueError, match=r"a prompt of \d+ tokens, max_length=8"):
        model.generate("one two three four five six seven eight nine")
    # The start token alone is a prompt.
    assert isinstance(model.generate(""), str)
    tokenizer = TextTokenizer(tokenizer.tokenizer, max_length=8)
    model.preprocessor = tokenizer
    refuses("no padding in each text", model.generate, "")
    refuses("vocabulary_size=520", CausalLM, decoder("dense"), tokenizer)
    refuses("DecoderBackbone; received: backbone=3", CausalLM, 3)
    for arguments, message in (
        ({"loss": "mse"}, "loss='mse'"),
        ({"sampler": "greddy"}, "such as 'top_k'.*sampler='greddy'"),
        ({"sampler": 3}, "sampler=3"),
        ({"metrics": ["accuracy"]}, "received: 'accuracy'"),
    ):
        refuses(message, model.compile, **arguments)
    for ids in ([1.5], [20_000], 3, "x"):
        refuses("stop_token_ids", model.generate, "one", stop_token_ids=ids)
    for documents in ([[1.5, 2]], [3, 4]):
        refuses("list of integers for each document", pack, documents, 4)
