"""The command line of the example: ``python -m examples.poisson --ranks 4``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example, and returns 0 if all of its checks passed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.ranks < 1 or options.steps < 1 or options.seed < 0:
        parser.error("--ranks and --steps must be at least 1, --seed at least 0")
    missing = [name for name in ("matplotlib", "scipy") if find_spec(name) is None]
    if missing:
        parser.error(f"the example needs {' and '.join(missing)}; install shardcompile[demo]")
    # Importing torch takes seconds, and --help does not need it.
    from examples.poisson.ranks import Settings
    from examples.poisson.run import run_demo
    from shardcompile.launch import RankFailedError, backend_of

    try:
        backend = backend_of(options.backend, options.ranks)
    except ValueError as error:
        parser.error(str(error))
    settings = Settings(
        ranks=options.ranks,
        steps=options.steps,
        backend=backend,
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
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.poisson",
        description="Trains a point-cloud transformer on finite element solutions with a new partition at each step, "
        "checks the result against training in one process, and writes a report and a picture.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of processes")
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument(
        "--backend", choices=["auto", "gloo", "nccl"], default="auto", help="auto: nccl if there is a GPU for each rank"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("shardcompile-demo"), help="folder for report.txt, picture.png"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of samples, partitions and parameters")
    parser.add_argument(
        "--compile-backend",
        choices=["shardcompile", "inductor", "aot_eager", "eager"],
        default="shardcompile",
        help="backend of torch.compile; the default is Inductor with this library's passes",
    )
    parser.add_argument("--double", action="store_true", help="compute in float64")
    parser.add_argument("--no-compare", action="store_true", help="do not time eager and hand-written code")
    return parser


if __name__ == "__main__":
    sys.exit(main())
