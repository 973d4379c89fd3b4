"""The examples and the help of all studies."""

from tools.studies import __main__ as studies


def test_examples_are_parsed_and_help_is_printed():
    parser = studies.make_parser()
    (action,) = (x for x in parser._actions if hasattr(x, "add_parser"))
    names = ["experts", "routers", "moepp", "mumoe", "limoe", "clip-up", "held-out"]
    assert list(action.choices) == [*names, "language"]
    for name, study in action.choices.items():
        for line in study.epilog.splitlines()[1:]:
            program, arguments = line.split()[:3], line.split()[3:]
            assert program == ["python", "-m", "tools.studies"]
            args = parser.parse_args(arguments)
            assert args.command.__name__ == f"tools.studies.{name.replace('-', '_')}"
        assert "--json" in study.format_help()
