"""Costs by the compiler of devices, without the devices."""

import json
import math
import os
import random
from importlib import metadata

import keras
import numpy as np
import pytest

from keras_moe import distribution, models, training
from keras_moe.distribution._program import Program
from keras_moe.distribution.chips import GENERATIONS
from tests.refusals import refuses

SMALL = {"num_layers": 1, "moe_layers": [0], "load_weights": False}
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'
PROGRAM = f"""HloModule jit_train_step

%inside (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %x = f32[8]{{0}} add(%p, %p), {CYCLES % 1000}
}}

%body (p: f32[8]) -> f32[8] {{
  %p.1 = f32[8]{{0}} parameter(0)
  ROOT %y = f32[8]{{0}} fusion(%p.1), calls=%inside, \
metadata={{op_name="jit(train_step)/moe/experts/dot_general"}}, \
{CYCLES % 5}
}}

%all-reduce-scatter.1 (p: f32[8]) -> f32[2] {{
  %p.3 = f32[8]{{0}} parameter(0)
  %q = f32[8]{{0}} all-reduce(%p.3), to_apply=%sum
  ROOT %z = f32[2]{{0}} dynamic-slice(%q)
}}

%starts (p: f32[8]) -> (f32[8], f32[32]) {{
  %p.4 = f32[8]{{0}} parameter(0)
  %o = f32[32]{{0}} all-gather(%p.4), replica_groups=[2,4]<=[8]
  ROOT %z.2 = (f32[8]{{0}}, f32[32]{{0}}) tuple(%p.4, %o)
}}

%sends (p: bf16[4,8]) -> bf16[5,8] {{
  ROOT %x = bf16[5,8]{{1,0}} ragged-all-to-all(%p, %p), replica_groups={{{{0,1}}}}
}}

%condition (p: f32[8]) -> pred[] {{
  ROOT %c = pred[] compare(%p, %p), direction=LT, {CYCLES % 2}
}}

%until (p: f32[8]) -> pred[] {{
  %limit = s32[] constant(4)
  ROOT %lt = pred[] compare(%p, %limit), direction=LT
}}

%waits (p: f32[8]) -> f32[8] {{
  ROOT %k = f32[8]{{0}} copy(%p), {CYCLES % 100}
}}

%updates (p: f32[8]) -> f32[8] {{
  ROOT %l = f32[8]{{0}} while(%p), condition=%until, body=%waits
}}

ENTRY %main (a: bf16[4,8]) -> f32[8] {{
  %a = bf16[4,8]{{1,0:T(8,128)(2,1)}} parameter(0)
  %w = f32[8]{{0}} while(%a), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
  %w.2 = f32[8]{{0}} while(%w), condition=%until, body=%body
  %w.3 = f32[8]{{0}} while(%w.2), condition=%condition, body=%body
  %w.4 = f32[8]{{0}} while(%w.3), condition=%until, body=%body, \
metadata={{op_name="moe/experts/further_rounds/while"}}
  %s = bf16[4,8]{{1,0:T(8,128)(2,1)}} all-to-all(%a), dimensions={{0}}, \
replica_groups=mesh['x'=2,'y'=8], device_ids=([8,2]T(1,0)) {{'x','y':(2)4}}
  %s.2 = ((bf16[4,8]{{1,0}}), bf16[4,8]{{1,0}}) all-to-all-start(%a), \
replica_groups=[4,2]<=[8]
  %s.3 = ((bf16[4,8]{{1,0}}, bf16[5,8]{{1,0}}), bf16[5,8]{{1,0}}, u32[]) \
async-start(%a), calls=%sends
  %g = (bf16[2,8]{{1,0}}, bf16[4,8]{{1,0}}) all-gather-start(%a), dimensions={{0}}
  %r = (f32[], f32[16]) all-reduce(%a, %w), replica_groups={{{{0,1,2}},{{3,4,5}}}}, \
to_apply=%sum
  %p.2 = (bf16[4,8]{{1,0}}, bf16[4,8]{{1,0}}, u32[], u32[]) \
collective-permute-start(%a), source_target_pairs={{{{0,1}}}}
  %t = f32[2]{{0}} fusion(%w), kind=kCustom, calls=%all-reduce-scatter.1
  %async-collective-start.1 = (f32[8]{{0}}, f32[32]{{0}}) fusion(%w), kind=kCustom, \
calls=%starts
  %async-collective-done.1 = f32[32]{{0}} fusion(%w), kind=kCustom, calls=%starts
  %d = f32[8]{{0}} fusion(%w), calls=%inside, \
metadata={{op_name="jit(train_step)/adam_w/sub"}}, {CYCLES % 7}
  %b = f32[8]{{0}} conditional(%s, %w, %w), \
branch_computations={{%waits, %updates}}
  %b.2 = f32[8]{{0}} conditional(%s, %w, %w), true_computation=%updates, \
false_computation=%waits
  %m = (bf16[4,6]{{1,0}}, s8[64]{{0}}) custom-call(%a, %d), backend_config={{\
"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"]}}}}
  %m.2 = f32[2,3]{{1,0}} dot(%a, %d), lhs_batch_dims={{}}, lhs_contracting_dims={{0,1}}
  ROOT %u = f32[8]{{0}} fusion(%d), calls=%inside, \
metadata={{op_name="block_1/moe/experts/ragged_dot_general"}}, \
{CYCLES % 9000}
}}
"""


@pytest.fixture
def compilation():
    if keras.backend.backend() != "jax":
        pytest.skip("compiles with JAX")

    from keras_moe._backends import jax_compilation

    return jax_compilation


@pytest.fixture
def on_this_machine(compilation, monkeypatch):
    """Compiles for the CPU instead, whose programs have no cycles."""
    devices = keras.distribution.list_devices()[:1]
    monkeypatch.setattr(compilation, "topology_devices", lambda _: devices)

    def compile(lowered, platform):
        program = lowered.compile()
        return program, program.as_text()

    monkeypatch.setattr(compilation, "compile_lowered", compile)
    monkeypatch.setattr(Program, "cycles_by_part", lambda _: {"experts": 1_503_000})
    return compilation


def test_a_program_by_hand():
    program = Program(PROGRAM, "adam_w")
    # Three rounds of the first loop, four of the second by its condition, one of the
    # third, and none of the last; a condition's cycles count once, for a round.
    assert program.num_open_loops() == 1
    # Of two branches, the longer one counts: four copies.
    copies, first, second, _ = program.longest(10)
    assert copies == ("other", "copy", 8, 800)
    assert program.cycles_by_part() == {"other": 804, "experts": 40, "optimizer": 7}
    assert first == ("experts", "moe/experts/dot_general", 8, 40)
    assert second == ("optimizer", "jit(train_step)/adam_w/sub", 1, 7)
    assert program.num_untimed() == 1
    assert program.collectives() == {
        "all-to-all": (2, 128),
        "ragged-all-to-all": (1, 80),
        "all-gather": (2, 64 + 128),
        "all-reduce": (1, 68),
        "collective-permute": (1, 64),
        "reduce-scatter": (1, 32),
    }
    groups = {kind: group for kind, group, *_ in program.transfers()}
    assert groups["all-reduce"] == 3
    assert [x[1] for x in program.transfers() if x[0] == "all-to-all"] == [8, 2]
    # (4, 8) x (8, 6), and all of the first operand with each of six columns.
    assert program.matmul_flops() == 2 * 4 * 8 * 6 + 2 * 32 * 6
    assert "optimizer" not in Program(PROGRAM).cycles_by_part()


@pytest.mark.every_backend
def test_a_compiler_says_how_much_is_too_much(compilation):
    error = RuntimeError("RESOURCE_EXHAUSTED: Used 45.25G of 15.75G hbm. Exceeded")
    assert compilation.explained(error, "x").args == (45.25, 15.75)
    error = RuntimeError("temporaries (54.50G) exceeds available HBM (512.0M)")
    assert compilation.explained(error, "x").args == (54.5, 0.5)
    other = RuntimeError("INTERNAL")
    assert compilation.explained(other, "x") is other
    error = RuntimeError("INVALID_ARGUMENT: Failed to upgrade versioned StableHLO.")
    assert "of JAX's version: pip install 'jaxlib" in str(
        compilation.explained(error, "jaxlib")
    )


@pytest.mark.parametrize(("arguments", "message"), [
    (("vmoe_b16", "v5e:4x5", 256), "shape of v5e: 1x1, 2x2.*'v5e:4x5'"),
    (("vmoe_b16", "v5e:4x4", 0), "batch_size=0"),
    (("vmoe_b16", "v5e:4x4", 256, "serve"), "step='serve'"),
])  # fmt: skip
def test_bad_arguments(arguments, message):
    refuses(message, distribution.compiled_costs, *arguments)


@pytest.mark.every_backend
@pytest.mark.parametrize(
    ("topology", "extra"), [("v5e:1x1", "tpu-plan"), ("h200:8", "cuda-plan")]
)
def test_what_is_not_there_is_named(monkeypatch, topology, extra):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises((ImportError, ValueError), match=f"KERAS_BACKEND=jax|{extra}"):
        distribution.compiled_costs("vmoe_digits", topology, 8)


@pytest.mark.every_backend
@pytest.mark.parametrize(("kind", "error", "message"), [
    (OSError, "The TPU is already in use by process 3.", "no other process.* 3"),
    (ImportError, "PJRT", r"pip install 'libtpu==.*jaxlib \S+, libtpu 0.9: PJRT"),
])  # fmt: skip
def test_a_compiler_that_does_not_start(compilation, monkeypatch, kind, error, message):
    def fails(**options):
        raise RuntimeError(error)

    version = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "0.9" if name == "libtpu" else version(name)
    )
    monkeypatch.setattr(compilation.topologies, "get_topology_desc", fails)
    with pytest.raises(kind, match=message):
        distribution.compiled_costs("vmoe_digits", "v5e:1x1", 8)


@pytest.mark.every_backend
def test_a_batch_that_devices_cannot_share(compilation, monkeypatch):
    devices = keras.distribution.list_devices()[:1] * 4
    monkeypatch.setattr(compilation, "topology_devices", lambda _: devices)
    refuses("batch_size=6", distribution.compiled_costs, "vmoe_digits", "v5e:2x2", 6)


def size(variable):
    return math.prod(variable.shape)


@pytest.mark.every_backend
def test_memory_and_rates(on_this_machine):
    found = distribution.compiled_costs(
        "vmoe_digits", "v5e:1x1", 8, dtype="float32", **SMALL
    )
    model = models.abstract("vmoe_digits", **SMALL)
    assert found.memory["weights"] == 4 * sum(map(size, model.variables))
    # Two moments, and a few numbers.
    moments = 8 * sum(map(size, model.trainable_variables))
    assert 0 <= found.memory["optimizer"] - moments < 100
    assert found.memory["batch"] == 8 * (16 * 16 * 4 + 4)
    # 1.5 million cycles of 1.5 GHz.
    assert found.seconds["experts"] == pytest.approx(1e-3, rel=1e-3)
    flops = 3 * 8 * sum(part.flops for part in model.describe().parts)
    assert found.model_flops == flops
    assert found.utilization == pytest.approx(flops / 197e12 / 1e-3, rel=1e-3)
    json.dumps(found._asdict())


@pytest.mark.every_backend
@pytest.mark.parametrize(
    ("preset", "step"),
    [("clip_emoji", "train"), ("limoe_emoji", "predict"), ("moepp_digits", "predict")],
)
def test_every_kind_of_model(on_this_machine, preset, step):
    small = {"num_layers": 1, "load_weights": False} if step == "train" else {}
    found = distribution.compiled_costs(preset, "v5e:1x1", 4, step, **small)
    assert found.name == preset
    assert found.memory_bytes > found.memory["weights"] > 0
    assert (found.memory["optimizer"] > 0) == (step == "train")


@pytest.mark.every_backend
def test_generation(on_this_machine, capsys):
    """A prompt, and a loop over tokens, whose cache is among the activations."""
    sizes = {**SMALL, "vocabulary_size": 64, "hidden_dim": 16, "num_heads": 2}
    sizes |= {"mlp_dim": 16, "num_experts": 2, "dtype": "float32"}
    made = [
        distribution.compiled_costs(
            "moe_lm_0.6b", "v5e:1x1", 2, "generate", max_length=length, **sizes
        )
        for length in (32, 96)
    ]
    cache, names = 4 * 2 * 2 * 16 * (96 - 32), "activations and gradients"
    assert made[1].memory[names] - made[0].memory[names] >= cache
    assert made[0].utilization is None
    assert made[0].num_open_loops
    made[0].print()
    assert "one round (one token) of each of" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"CausalLM for step='generate'.*Classifier"):
        distribution.compiled_costs("vmoe_digits", "v5e:1x1", 4, "generate")


@pytest.mark.every_backend
def test_a_model_of_ones_own(on_this_machine):
    model = models.from_preset("vmoe_digits", num_classes=10, **SMALL)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, name="mine")
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss)
    before = [variable.path for variable in model.optimizer.variables]
    found = distribution.compiled_costs(model, "v5e:1x1", 8)
    # Plain gradient descent has no moments.
    assert found.memory["optimizer"] < 100
    # One number for the class of an image.
    assert found.memory["batch"] == 4 * 8 * (16 * 16 + 1)
    assert [variable.path for variable in model.optimizer.variables] == before
    # Frozen weights have no moments, and one-hot labels are as wide as the classes.
    model.backbone.trainable = False
    one_hot = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=lambda y, x: one_hot(y, x))
    found = distribution.compiled_costs(model, "v5e:1x1", 8)
    head = 8 * sum(map(size, model.trainable_variables))
    assert 0 < found.memory["optimizer"] - head < 100
    assert found.memory["batch"] == 4 * 8 * (16 * 16 + 10)
    with pytest.raises(ValueError, match="dtype='float32'"):
        distribution.compiled_costs(model, "v5e:1x1", 8, dtype="float32")
    refuses("a ViTBackbone", distribution.compiled_costs, model.backbone, "v5e:1x1", 8)
    found = distribution.compiled_costs(model.backbone, "v5e:1x1", 8, "predict")
    assert found.memory["weights"] > 4 * model.backbone.count_params() - 100


@pytest.mark.every_backend
def test_a_recipe(on_this_machine):
    changes = {"optimizer": {"name": "sgd", "gradient_accumulation_steps": 2}}
    changes["optimizer"]["ema_momentum"] = None
    changes["model"] = {**SMALL, "dtype": "mixed_bfloat16"}
    recipe = training.load_recipe("vmoe_digits", **changes)
    model = recipe.abstract_model(num_classes=10)
    found = distribution.compiled_costs(model, "v5e:1x1", 8)
    # The gradients of the first half of a batch.
    summed = 4 * sum(map(size, model.trainable_variables))
    assert 0 < found.memory["optimizer"] - summed < 100
    assert found.model_flops == 3 * 8 * sum(x.flops for x in model.describe().parts)


@pytest.mark.every_backend
def test_gpus_have_no_times(on_this_machine, monkeypatch, capsys):
    compile, compiled = on_this_machine.compile_lowered, []

    def kept(*arguments):
        compiled[:] = compile(*arguments)
        return compiled

    monkeypatch.setattr(on_this_machine, "compile_lowered", kept)
    found = distribution.compiled_costs("vmoe_digits", "h200:1", 8, **SMALL)
    assert found.capacity == 141 * 2**30
    assert (found.seconds, found.step_seconds, found.utilization) == (None,) * 3
    assert found.operations == []
    found.print()
    output = capsys.readouterr().out
    assert "time is unknown" in output
    assert "nothing ran on a GPU" in output
    assert "time of a step" not in output
    # Their compiler leaves it to the caller to compare.
    small = GENERATIONS["h200"]._replace(capacity=2**20)
    monkeypatch.setitem(GENERATIONS, "h200", small)
    monkeypatch.setattr(on_this_machine, "compile_lowered", lambda *_: compiled)
    message = r"0\.00 GiB.*batch_size=8.*rematerialize=True"
    refuses(message, distribution.compiled_costs, "vmoe_digits", "h200:1", 8, **SMALL)


@pytest.mark.every_backend
def test_what_the_user_has_stays(on_this_machine):
    devices = keras.distribution.list_devices()[:1]
    mine = distribution.auto("vmoe_digits", devices)

    def states():
        _, keys, *rest = np.random.get_state()
        return random.getstate(), keys.tolist(), rest, dict(os.environ)

    with mine.scope():
        before = states()
        found = distribution.compiled_costs("vmoe_digits", "v5e:1x1", 8, **SMALL)
        models.abstract("vmoe_digits")
        assert found.num_devices == 1
        assert keras.distribution.distribution() is mine
        assert states() == before


@pytest.mark.every_backend
def test_what_does_not_fit_is_made_smaller(on_this_machine, monkeypatch):
    compile, tried = on_this_machine.compile_lowered, []

    def narrow(lowered, platform):
        tried.append(lowered.in_avals[0][1][0].shape[0])
        if len(tried) < 3:
            raise MemoryError(20.0, 15.5)
        return compile(lowered, platform)

    monkeypatch.setattr(on_this_machine, "compile_lowered", narrow)
    with pytest.raises(ValueError, match=r"batch_size=8.*4\.50 more"):
        distribution.compiled_costs("vmoe_digits", "v5e:1x1", 8, **SMALL)
    tried.clear()
    found = distribution.compiled_costs("vmoe_digits", "v5e:1x1", 8, fit=True, **SMALL)
    assert tried == [8, 8, 4]
    assert found.changes == {"rematerialize": True, "batch_size": 4}
    assert found.batch_size == 4


@pytest.mark.every_backend
def test_libtpu_compiles_what_it_plans(compilation, capfd):
    pytest.importorskip("libtpu", reason="needs libtpu, the extra tpu-plan")
    # A group of eight images for each device: with fewer, tokens would be gathered.
    found = distribution.compiled_costs(
        "vmoe_s32", "v5e:2x2", 32, num_layers=2, num_experts=4, num_classes=8
    )
    assert {"experts", "router", "attention", "optimizer"} <= {*found.seconds}
    assert min(found.seconds.values()) > 0
    # To the experts and back, and the same for the gradient.
    assert found.collectives["all-to-all"][0] >= 4
    assert 0 < found.utilization < 1
    found.print()
    assert "nothing ran on a TPU" in capfd.readouterr().out


@pytest.mark.every_backend
def test_the_cuda_plugin_compiles_what_it_plans(compilation):
    pytest.importorskip("jax_cuda13_plugin", reason="needs the extra cuda-plan")
    sizes = {"num_layers": 2, "num_experts": 4, "num_classes": 8}
    found = distribution.compiled_costs("vmoe_s32", "h200:4", 32, **sizes)
    # To the experts and back, and the same for the gradient.
    assert found.collectives["all-to-all"][0] >= 4
    assert 0.9 < found.flops / found.model_flops < 1.1
    assert found.memory["activations and gradients"] > 0
