import json

SMALL = (
    "--set", "hidden_dim=8", "mlp_dim=8", "num_layers=2", "num_heads=1",
    "moe_layers=[1]", "num_experts=2", "--recipe-set", "schedule.epochs=1",
    "schedule.cooldown_steps=0", "schedule.warmup_steps=0", "data.batch_size=512",
)  # fmt: skip


def test_one_command_compares_and_resumes(done, mistake, tmp_path):
    command = (
        "twins", "vmoe_digits", "--seeds", 1, "--rates", 0.1, "--held-out", 300,
        "--timed-steps", 1, "--output", tmp_path / "run", *SMALL,
    )  # fmt: skip
    output = done(*command)
    assert "1 of 7: experts, learning rate 0.1, seed 0" in output
    assert "Twins on digits" in output
    stored = json.loads((tmp_path / "run" / "twins.json").read_text())
    assert output.endswith(f"\n{stored['sentence']}\n")
    # The experts' settings are in none of the others.
    models = stored["models"]
    assert models["experts"]["model"]["num_experts"] == 2
    assert models["dense"]["model"]["moe"] is None
    assert models["wide"]["parameters"] > models["dense"]["parameters"]
    picture = tmp_path / "run" / "twins.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = done(*command, "--json")
    assert " of 7: " not in again
    assert json.loads(again)["models"] == stored["models"]
    error = mistake(*command, "--recipe-set", "data.batch_size=256")
    assert "data.batch_size=256 (there 512)" in error
    # What only a twin lacks is found before any run.
    frozen = ("--set", 'frozen=["block_1/moe/router"]', "--output", tmp_path / "new")
    assert "block_1/moe/router" in mistake(*command, *frozen)
    assert not (tmp_path / "new").exists()
