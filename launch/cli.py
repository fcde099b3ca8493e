"""The `wavepp` command line: a model to try it with, a demonstration, decision logs, what-if plans.

The server is SGLang's own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_wavepp import __version__
from sglang_wavepp.errors import WavePPError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, `sys.argv` by default.

    Returns the exit code: 0, 1 if what was compared differs, 2 for an error that WavePP reports (one line on
    stderr), 130 after Ctrl-C.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser(args).parse_args(args)
        if options.command is None:
            _parser([]).print_help()
            return 0
        return _COMMANDS[options.command](options)
    except WavePPError as error:
        return _failed(str(error))
    except ModuleNotFoundError as error:
        return _failed(f"the module {error.name!r} is not installed")
    except KeyboardInterrupt:
        return 130


def _failed(text: str) -> int:
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return 2


def _parser(args: Sequence[str]) -> argparse.ArgumentParser:
    """The parser. It imports a command's module only if `args` call it: `--help` answers at once."""
    parser = argparse.ArgumentParser(
        prog="wavepp",
        description="WavePP for SGLang. Servers are started with SGLang itself: sglang serve ... --wavepp",
    )
    parser.add_argument("--version", action="version", version=f"wavepp {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    model = commands.add_parser(
        "make-model",
        help="write a small model with random weights",
        description="Write a model folder with a tokenizer and random weights, small enough for a CPU.",
    )
    demo = commands.add_parser("demo", help="compare SGLang with and without WavePP on this machine")
    log = commands.add_parser("log", help="read and compare what stages have decided (--wavepp-decision-log)")
    plan = commands.add_parser(
        "plan",
        help="predict throughput, completion times and bubbles for a list of requests",
        description="Predict what a WavePP server does with a list of requests, without a device: its own "
        "admission and planners run over a model of the pipeline, in simulated time.",
    )
    called = next((arg for arg in args if not arg.startswith("-")), None)
    if called == "make-model":
        _add_model_arguments(model)
    elif called == "demo":
        from sglang_wavepp.launch.demo import add_arguments

        add_arguments(demo)
    elif called == "plan":
        from sglang_wavepp.launch.plan import add_arguments

        add_arguments(plan)
    elif called == "log":
        from sglang_wavepp.launch.decision_log import add_arguments

        add_arguments(log)
    return parser


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    from sglang_wavepp.launch.models import ARCHITECTURES, ModelSpec

    default = ModelSpec()
    parser.add_argument("directory", metavar="DIR", help="folder to write")
    parser.add_argument(
        "--arch", choices=sorted(ARCHITECTURES), default=default.arch, help=f"architecture ({default.arch})"
    )
    for name, meaning in (
        ("layers", "number of layers"),
        ("hidden", "width of the hidden states"),
        ("context", "longest context in tokens"),
        ("seed", "seed of the random weights"),
    ):
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{meaning} ({value})")


def _make_model(options: argparse.Namespace) -> int:
    from sglang_wavepp.launch.models import make_model

    folder = make_model(
        options.directory,
        options.arch,
        layers=options.layers,
        hidden=options.hidden,
        context=options.context,
        seed=options.seed,
    )
    print(folder)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from sglang_wavepp.launch.demo import run

    return run(options)


def _log(options: argparse.Namespace) -> int:
    from sglang_wavepp.launch.decision_log import run

    return run(options)


def _plan(options: argparse.Namespace) -> int:
    from sglang_wavepp.launch.plan import run

    return run(options)


_COMMANDS = {"make-model": _make_model, "demo": _demo, "log": _log, "plan": _plan}


if __name__ == "__main__":
    raise SystemExit(main())
