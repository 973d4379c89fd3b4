"""The table of compiled steps, without compiling."""

import json

from keras_moe import distribution
from tools import compile_table


def test_a_second_run_compiles_what_failed(monkeypatch, tmp_path, capsys):
    asked, fails = [], True

    def compiled_costs(preset, topology, batch_size, step, **arguments):
        asked.append((preset, topology, step, arguments.get("router")))
        if fails and step == "predict":
            raise RuntimeError("no\nway")
        seconds = None if topology == "h200:1" else {"experts": 0.1, "collectives": 0}
        return distribution.CompiledCosts(
            preset, topology, 1, step, batch_size, {"weights": 2**30}, 2**34, 1, 1,
            seconds, None, {}, [], 1, {}, 1.0,
        )  # fmt: skip

    monkeypatch.setattr(distribution, "compiled_costs", compiled_costs)
    file = tmp_path / "table.json"
    rows = ["ViT", "soft", "softmax_token_choice, dropless"]
    command = [str(file), "--rows", *rows, "--topologies", "v5e:1x1", "h200:1"]
    compile_table.main(command)
    stored = json.loads(file.read_text())
    assert stored["ViT | v5e:1x1 | train"] == {"ms": 100.0, "GiB": 1.0, "untimed": 1}
    assert stored["soft | h200:1 | predict"] == {"error": "no way"}
    table = capsys.readouterr().out
    assert "| soft | 100.00 ms+, 1.00 GiB | 1.00 GiB |" in table
    assert "| soft | no | no |" in table
    assert ("vmoe_s32", "v5e:1x1", "train", "soft") in asked
    # Predictions have no capacity anyway.
    assert not [key for key in stored if "dropless" in key and "predict" in key]

    asked.clear()
    fails = False
    compile_table.main(command)
    assert {step for _, _, step, _ in asked} == {"predict"}
    assert len(asked) == 4
    assert " no " not in capsys.readouterr().out
