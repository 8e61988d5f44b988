"""The command line: ``python -m shardcompile demo`` or ``calibrate``, or ``shardcompile demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code.

    Args:
        arguments: in place of the command line's.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return _calibrate(parser, options) if options.command == "calibrate" else _demo(parser, options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shardcompile", description="Sharded tensors under torch.compile.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="train a model on uneven blocks and check the result",
        description="Trains a point-cloud transformer on finite element solutions that are cut anew at each step, "
        "checks the result against training in one process, and leaves a report and a picture.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--ranks", type=_positive, default=2, help="number of processes")
    demo.add_argument("--steps", type=_positive, default=60, help="training steps")
    demo.add_argument(
        "--backend", choices=["auto", "gloo", "nccl"], default="auto", help="auto: nccl if there is a GPU for each rank"
    )
    demo.add_argument("--out", type=Path, default=Path("shardcompile-demo"), help="folder for report.txt, picture.png")
    demo.add_argument("--seed", type=_natural, default=0, help="of samples, cuts and parameters")
    demo.add_argument(
        "--compile-backend",
        choices=["shardcompile", "inductor", "aot_eager", "eager"],
        default="shardcompile",
        help="of torch.compile; the default is Inductor with this library's passes",
    )
    demo.add_argument("--double", action="store_true", help="compute in float64")
    demo.add_argument("--no-compare", action="store_true", help="do not time eager and hand-written code")
    calibrate = commands.add_parser(
        "calibrate",
        help="measure the link between the ranks of this machine, for the cost model",
        description="Times collectives between the ranks of this machine, fits latency and bandwidth, and saves "
        "them for shardcompile.passes.CostModel. Every rank of a job has to use the same file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    calibrate.add_argument("--ranks", type=_positive, default=2, help="number of processes")
    calibrate.add_argument("--backend", choices=["auto", "gloo", "nccl"], default="auto", help="as for the demo")
    calibrate.add_argument("--out", type=Path, default=Path("link.json"), help="file to save to")
    return parser


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
    return number


def _demo(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    missing = _missing_packages("matplotlib", "scipy")
    if missing:
        parser.error(f"the demo needs {' and '.join(missing)}; install shardcompile[demo]")
    # Imported here: torch takes seconds, and --help needs none of it.
    from shardcompile.demo.launch import RankFailedError
    from shardcompile.demo.ranks import Settings
    from shardcompile.demo.run import run_demo

    settings = Settings(
        ranks=options.ranks,
        steps=options.steps,
        backend=_backend(parser, options.backend, options.ranks),
        compiler=options.compile_backend,
        seed=options.seed,
        double=options.double,
        compare=not options.no_compare,
        out=options.out,
    )
    try:
        return 0 if run_demo(settings) else 1
    except RankFailedError as error:
        print(error, file=sys.stderr)
        return 1


def _calibrate(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.ranks < 2:
        parser.error("a link joins at least 2 ranks")
    from shardcompile.demo.launch import RankFailedError, launch
    from shardcompile.passes.calibrate import measure_link, save

    backend = _backend(parser, options.backend, options.ranks)
    try:
        link = launch(measure_link, None, options.ranks, backend)[0]
    except RankFailedError as error:
        print(error, file=sys.stderr)
        return 1
    save(link, options.out)
    latency, bandwidth = 1e6 * link.latency(options.ranks), link.bandwidth / 1e9
    print(f"{options.ranks} ranks, {backend}: latency {latency:.0f} us, {bandwidth:.2f} GB/s; saved to {options.out}")
    return 0


def _missing_packages(*names: str) -> list[str]:
    from importlib.util import find_spec

    return [name for name in names if find_spec(name) is None]


def _backend(parser: argparse.ArgumentParser, wanted: str, ranks: int) -> str:
    import torch

    gpus = torch.cuda.device_count()
    if wanted == "nccl" and gpus < ranks:
        parser.error(f"--backend nccl needs a GPU for each of the {ranks} ranks, found {gpus}")
    if wanted == "auto":
        return "nccl" if gpus >= ranks else "gloo"
    return wanted


if __name__ == "__main__":
    sys.exit(main())
