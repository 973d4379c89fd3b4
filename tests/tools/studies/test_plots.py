"""The pictures that no small study draws in the other tests."""

from tools.studies import plots

VALUE = {"mean": 0.5, "std": 0.1}


def test_pictures_are_drawn(tmp_path):
    tau = {"throughput_increase": 0.8, "by_flops": 1.0}
    speed = {"forms": {"limited": {"vanilla": {}, "0.5": tau}}}
    accuracy = {"test_accuracy": VALUE}
    training = {"rows": {"tau=0.5": accuracy, "vanilla": accuracy}}
    names = ("r1", "text_routing_entropy", "image_routing_entropy")
    figures = dict.fromkeys((*names, "text_experts", "image_experts"), VALUE)
    for draw, *arguments in (
        (plots.plot_tau_study, speed, training),
        (plots.plot_entropy_thresholds, [{"text": 2, "image": 4, "figures": figures}]),
        (plots.plot_group_sizes, {1: {"r1": VALUE, "seconds": VALUE}}),
        (plots.plot_group_sizes, {1: {"r1": VALUE, "seconds": None}}),
    ):
        path = tmp_path / f"{draw.__name__}.png"
        draw(*arguments, path)
        assert path.stat().st_size > 5_000, draw
