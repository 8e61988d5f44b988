"""The command line: ``shardcompile``, or ``python -m shardcompile``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit code.

    Args:
        arguments: the arguments; those of the command line by default.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return int(_COMMANDS[options.command](parser, options))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    """Builds the parser of all subcommands and their options."""
    parser = argparse.ArgumentParser(prog="shardcompile", description="Sharded tensors under torch.compile.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_explain(commands)
    _add_precompile(commands)
    _add_diff(commands)
    _add_selftest(commands)
    commands.add_parser(
        "doctor",
        help="say what of torch is changed and set, and whether a compiled step is right",
        description="Prints versions, backends, devices, settings and changes of torch, and runs a compiled step on "
        "ranks in one process. Exits with 1 if that is wrong.",
    )
    _add_op(commands)
    calibrate = commands.add_parser(
        "calibrate",
        help="measure the link between the ranks of this machine, for the cost model",
        description="Times collectives between the ranks of this machine, fits latency and bandwidth, and saves "
        "them for shardcompile.passes.CostModel. Every rank of a job has to use the same file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    calibrate.add_argument("--ranks", type=_positive, default=2, help="number of processes")
    calibrate.add_argument(
        "--backend", choices=["auto", "gloo", "nccl"], default="auto", help="auto: nccl if there is a GPU for each rank"
    )
    calibrate.add_argument(
        "--compute", action="store_true", help="also measure compute on CPUs; the file then describes a device"
    )
    calibrate.add_argument("--out", type=Path, default=Path("link.json"), help="file to save to")
    return parser


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explain = commands.add_parser(
        "explain",
        help="trace a function on a fake process group and show what it communicates",
        description="Traces a function offline for any number of ranks, on a fake process group and without a GPU, and "
        "shows its collectives, what the passes do to them, and the predicted timeline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    explain.add_argument(
        "target",
        help="module:function or path/to/file.py:function; called with a mesh, it returns a function and a tuple of "
        "arguments",
    )
    explain.add_argument("--world-size", type=_positive, default=64, help="number of ranks")
    explain.add_argument("--mesh", type=_shape, help="shape of the mesh, such as 8x8; one dim if it is left out")
    explain.add_argument("--rank", type=_natural, default=0, help="the rank to trace as")
    explain.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="the device to trace for")
    explain.add_argument("--off", nargs="*", default=[], metavar="PASS", help="passes to disable")
    explain.add_argument("--no-backward", action="store_true", help="trace the forward pass only")
    explain.add_argument("--save", type=Path, metavar="FOLDER", help="write text, JSON, HTML, timeline and graphs")
    explain.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON, for diff")


def _add_precompile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    precompile = commands.add_parser(
        "precompile",
        help="compile a function before a job, for shardcompile.load_artifacts",
        description="Compiles a function, forward and backward, as one rank of a fake process group, and writes the "
        "code to a file that every rank of a job can load. Nothing runs. The code serves other partitions, and "
        "mostly other world sizes. For the CPU, set OMP_NUM_THREADS as in the job; for CUDA, this needs one GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    precompile.add_argument("target", help="as for explain, with the dtypes and settings of the job")
    precompile.add_argument("--world-size", type=_positive, nargs="+", default=[64], help="numbers of ranks")
    precompile.add_argument("--mesh", type=_shape, help="shape of the mesh, such as 8x8; one dim if it is left out")
    precompile.add_argument("--device", choices=["cuda", "cpu"], default="cpu", help="the device to compile for")
    precompile.add_argument("--no-backward", action="store_true", help="compile a call without gradients")
    precompile.add_argument("--out", type=Path, default=Path("step.artifacts"), help="file to write")


def _add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    diff = commands.add_parser(
        "diff",
        help="compare two reports",
        description="Prints what changed between two reports that explain has written as JSON. Exits with 1 if there "
        "is a difference.",
    )
    diff.add_argument("before", type=Path, help="report.json")
    diff.add_argument("after", type=Path, help="report.json")


def _add_selftest(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    selftest = commands.add_parser(
        "selftest",
        help="check results and timings on this machine",
        description="Runs collectives of all dtypes, families of ops, attention, a compiled model, halo exchange, "
        "routing, neighbor search and checkpoints between ranks of this machine, compares with plain PyTorch, and "
        "prints a table. Exits with 1 if anything is wrong.",
    )
    selftest.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto", help="auto: GPUs if there are")
    selftest.add_argument(
        "--one-process", action="store_true", help="run ranks as threads of one process; they may share a GPU"
    )
    selftest.add_argument("--ranks", type=_positive, help="number of ranks: all GPUs, or 2 on a CPU or in one process")
    selftest.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run checks with these name prefixes")


def _add_op(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    op = commands.add_parser(
        "op",
        help="show how an op runs on sharded tensors",
        description="Prints the record of an op: its rule and its decompositions with their files, and, for an example "
        "of a call, what is communicated if a tensor is sharded along a dim. The example runs on in-process ranks.",
    )
    op.add_argument("names", nargs="*", metavar="OP", help="as torch.ops names it: aten.cumprod, or one overload of it")
    op.add_argument("--table", action="store_true", help="print the table of docs/operators.md")


def _shape(text: str) -> tuple[int, ...]:
    return tuple(_positive(n) for n in text.split("x"))


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(minimum: int, text: str) -> int:
    number = int(text)
    if number < minimum:
        raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {number}")
    return number


def _calibrate(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.ranks < 2:
        parser.error("a link joins at least 2 ranks")
    # Importing torch takes seconds, and --help does not need it.
    from shardcompile.launch import RankFailedError, launch
    from shardcompile.machines import Link
    from shardcompile.passes.cost.calibrate import measure_device, measure_link, save

    backend = _backend(parser, options.backend, options.ranks)
    measure = measure_device if options.compute else measure_link
    try:
        measured = launch(measure, None, options.ranks, backend)[0]
    except RankFailedError as error:
        print(error, file=sys.stderr)
        return 1
    save(measured, options.out)
    link = measured if isinstance(measured, Link) else measured.intra
    latency, bandwidth = 1e6 * link.latency(options.ranks), link.bandwidth / 1e9
    print(f"{options.ranks} ranks, {backend}: latency {latency:.0f} us, {bandwidth:.2f} GB/s; saved to {options.out}")
    return 0


def _selftest(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    # Importing torch takes seconds, and --help does not need it.
    import torch

    from shardcompile.launch import RankFailedError, launch
    from shardcompile.selftest import Job, print_table, run_checks, traced_collectives
    from shardcompile.testing import LocalRanks

    gpus = torch.cuda.device_count()
    device: Literal["cpu", "cuda"] = options.device if options.device != "auto" else "cuda" if gpus else "cpu"
    ranks = options.ranks or (gpus if device == "cuda" and gpus and not options.one_process else 2)
    if options.one_process and device == "cuda" and not gpus:
        parser.error("--device cuda needs a GPU, found none")
    backend = "one process" if options.one_process else _backend(parser, "nccl" if device == "cuda" else "gloo", ranks)
    print(f"{ranks} rank{'s' * (ranks > 1)}, {device}, {backend}, torch {torch.__version__}", flush=True)
    job = Job(traced_collectives(ranks, device), tuple(options.only))
    if options.one_process:
        with LocalRanks(ranks, processes=False, device=device) as threads:
            findings = threads(lambda _: run_checks(job), timeout=3600.0)[0]
        return 0 if print_table(findings) else 1
    try:
        findings = launch(run_checks, job, ranks, backend)[0]
    except RankFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if print_table(findings) else 1


def _op(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if not options.names and not options.table:
        parser.error("name an op, such as aten.cumprod, or ask for --table")
    # Importing torch takes seconds, and --help does not need it.
    from shardcompile.operators import Ranks, describe, ops_named, table

    try:
        ops = [op for name in options.names for op in ops_named(name)]
    except LookupError as error:
        parser.error(error.args[0])
    with Ranks() as ranks:
        texts = [describe(op, ranks) for op in ops] + ([table(ranks)] if options.table else [])
    print("\n\n\n".join(texts))
    return 0


def _explain(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    build, name = _build_of(parser, options.target)
    print(f"tracing {name} for {options.world_size} ranks, {options.device} ...", file=sys.stderr)
    # Importing torch takes seconds, and --help does not need it.
    from shardcompile.errors import ShardError
    from shardcompile.inspect import explain

    start = time.monotonic()
    try:
        report = explain(
            build,
            world_size=options.world_size,
            mesh_shape=options.mesh,
            rank=options.rank,
            device=options.device,
            off=options.off,
            backward=not options.no_backward,
        )
    except ShardError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"traced in {time.monotonic() - start:.1f} s", file=sys.stderr)
    print(report)
    if options.save is not None:
        print(f"saved to {report.save(options.save)}", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(report.to_json())
    return 0


def _precompile(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    build, name = _build_of(parser, options.target)
    print(f"compiling {name} for {options.device} ...", file=sys.stderr)
    # Importing torch takes seconds, and --help does not need it.
    from shardcompile.errors import ShardError
    from shardcompile.inspect.offline import precompile

    start = time.monotonic()
    try:
        precompile(
            build,
            options.out,
            world_size=options.world_size,
            mesh_shape=options.mesh,
            device=options.device,
            backward=not options.no_backward,
        )
    except ShardError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    megabytes = options.out.stat().st_size / 1e6
    print(f"compiled in {time.monotonic() - start:.1f} s; saved to {options.out}, {megabytes:.1f} MB")
    return 0


def _diff(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    # Importing torch takes seconds, and --help does not need it.
    from shardcompile.inspect import Report

    try:
        before, after = (Report.from_json(path.read_text()) for path in (options.before, options.after))
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"not a report: {error}")
    difference = before.diff(after)
    print(difference)
    return 1 if difference else 0


def _build_of(parser: argparse.ArgumentParser, target: str) -> tuple[Any, str]:
    """Returns the function that a target names, and its name."""
    path, _, name = target.rpartition(":")
    if path.endswith(".py") or not path:
        if not Path(path).is_file():
            parser.error(f"there is no file {path or target}; the target is path/to/file.py:function")
        module = _import_file(Path(path))
    else:
        sys.path.insert(0, os.getcwd())  # the script `shardcompile` does not have it
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            parser.error(f"{error}; the target is module:function or path/to/file.py:function")
    build = getattr(module, name, None)
    if build is None:
        parser.error(f"{path} has no function {name}")
    return build, name


def _import_file(path: Path) -> ModuleType:
    """Imports a file as a module, which can import the modules of its folder."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _missing_packages(*names: str) -> list[str]:
    return [name for name in names if find_spec(name) is None]


def _backend(parser: argparse.ArgumentParser, wanted: str, ranks: int) -> str:
    # Importing torch takes seconds, and --help does not need it.
    from shardcompile.launch import backend_of

    try:
        return backend_of(wanted, ranks)
    except ValueError as error:
        parser.error(str(error))


def _doctor(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    # Importing torch takes seconds, and --help does not need it.
    from shardcompile.doctor import report

    text, is_right = report()
    print(text)
    return 0 if is_right else 1


_COMMANDS = {
    "calibrate": _calibrate,
    "explain": _explain,
    "precompile": _precompile,
    "diff": _diff,
    "selftest": _selftest,
    "doctor": _doctor,
    "op": _op,
}


if __name__ == "__main__":
    sys.exit(main())
