"""Programs whose ranks do not do the same, and what each rank ends with.

    [SCENE_BACKEND=nccl] [SCENE_QUEUED=1] python -m tests.support.divergence_scenes results.json scene ...

With SCENE_QUEUED gloo behaves as NCCL does, see `queued_gloo`.

Ranks are processes that are forked from one that has imported everything; several scenes run at a time, since ranks
mostly wait in them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardcompile import ShardTensor, config
from shardcompile.collectives.transport import device_type, gpus
from tests.support import queued_gloo

WORLD = 3
BACKEND = os.environ.get("SCENE_BACKEND", "gloo")
LIMIT_SECONDS = 45
AT_ONCE = 4

Scene = Callable[[DeviceMesh, int], Any]
SCENES: dict[str, Scene] = {}
_EVENT_FILE: list[Path] = []


def scene(function: Scene) -> Scene:
    SCENES[function.__name__] = function
    return function


def event() -> None:
    """Note that ranks differ from now on."""
    if _EVENT_FILE:
        _EVENT_FILE.pop().write_text(str(time.time()))


def points(mesh: DeviceMesh, rank: int, sizes: tuple[int, ...] = (3, 0, 4), **options: Any) -> ShardTensor:
    columns = options.pop("columns", 4)
    torch.manual_seed(rank)
    local = torch.randn(sizes[rank], columns, **{"dtype": torch.float64, "device": mesh.device_type, **options})
    return ShardTensor.from_local(local, mesh, [Shard(0)], {0: list(sizes)})


def replicated_twice(x: Any) -> torch.Tensor:
    return x.redistribute(placements=[Replicate()]).to_local() * 2


def summed_twice(x: Any) -> torch.Tensor:
    return x.sum(0).redistribute(placements=[Replicate()]).to_local() * 2


def die() -> None:
    event()
    os.kill(os.getpid(), signal.SIGKILL)


# A value that one rank alone reads


@scene
def item_on_one_rank(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    loss = x.sum()
    if rank == 0:
        event()
        loss.item()
    for _ in range(3):
        (x.t() @ x).full_tensor()


@scene
def format_on_one_rank_at_the_end(mesh: DeviceMesh, rank: int) -> None:
    loss = points(mesh, rank).sum()
    if rank == 0:
        event()
        f"{loss:.3f}"


@scene
def full_tensor_on_one_rank(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    for step in range(20):
        y = x.sum(0).full_tensor()
        if rank == 1 and step == 12:
            event()
            print(x.full_tensor().sum() + y.sum())


# A rank that ends


@scene
def raises_before(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    if rank == 1:
        event()
        raise ValueError("a bad batch")
    x.full_tensor()


@scene
def raises_where_the_store_is(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    x.full_tensor()
    if rank == 0:
        event()
        raise ValueError("a bad batch")
    x.full_tensor()


@scene
def raises_after_a_long_time(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    if rank == 1:
        time.sleep(5)
        event()
        raise ValueError("a bad batch")
    x.full_tensor()


@scene
def exits(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    x.full_tensor()
    if rank == 2:
        event()
        sys.exit(3)
    x.full_tensor()


@scene
def killed_before(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    if rank == 1:
        die()
    x.full_tensor()


@scene
def killed_where_the_store_is(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    x.full_tensor()
    if rank == 0:
        die()
    x.full_tensor()


@scene
def killed_inside_a_collective(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    x.full_tensor()
    if rank == 1:
        threading.Timer(1.0, die).start()
    if rank == 2:
        time.sleep(3)
    x.full_tensor()


@scene
def killed_between_collectives(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    for i in range(4000):
        x.full_tensor()
        if rank == 2 and i == 300:
            die()


@scene
def killed_while_saving(mesh: DeviceMesh, rank: int) -> None:
    """Into $SCENE_FOLDER. Files of the second checkpoint are there, but it is not complete."""
    x = points(mesh, rank)
    folder = os.environ["SCENE_FOLDER"]
    dcp.save({"x": x}, checkpoint_id=f"{folder}/1")
    whole = x.full_tensor()
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    write = dcp.FileSystemWriter.write_data

    def write_and_die(*args: Any) -> Any:
        written = write(*args)
        if rank == 2:
            written.wait()
            die()
        return written

    dcp.FileSystemWriter.write_data = write_and_die  # type: ignore[method-assign]
    dcp.save({"x": x * 2}, checkpoint_id=f"{folder}/2")


# Calls that differ


@scene
def other_layout(mesh: DeviceMesh, rank: int) -> None:
    event()
    points(mesh, rank, (2, 1, 4) if rank == 2 else (3, 0, 4)).full_tensor()


@scene
def other_dtype(mesh: DeviceMesh, rank: int) -> None:
    event()
    points(mesh, rank, dtype=torch.float32 if rank == 2 else torch.float64).full_tensor()


@scene
def other_dtype_of_a_sum(mesh: DeviceMesh, rank: int) -> None:
    event()
    points(mesh, rank, dtype=torch.float32 if rank == 2 else torch.float64).sum().full_tensor()


@scene
def other_shape(mesh: DeviceMesh, rank: int) -> None:
    event()
    points(mesh, rank, columns=5 if rank == 2 else 4).full_tensor()


@scene
def other_shape_of_a_sum(mesh: DeviceMesh, rank: int) -> None:
    event()
    points(mesh, rank, columns=5 if rank == 2 else 4).sum(0).full_tensor()


@scene
def other_branch(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    event()
    (x.sum(0) if rank == 0 else x.amax(0)).full_tensor()


@scene
def skipped_call(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    event()
    if rank != 1:
        x.full_tensor()
    (x.t() @ x).full_tensor()


@scene
def error_that_is_swallowed(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    event()
    try:
        if rank == 1:
            raise ValueError("swallowed")
        x.full_tensor()
    except ValueError:
        pass
    (x.t() @ x).full_tensor()


@scene
def two_threads(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    x.full_tensor()
    if rank == 2:
        time.sleep(3)
        x.full_tensor()
        return
    waiting = threading.Thread(target=x.full_tensor)
    waiting.start()
    time.sleep(1)
    try:
        x.sum(0).full_tensor()
    except RuntimeError as error:
        if "another thread of this rank is in all_gather_v" not in str(error):
            raise
    else:
        raise AssertionError("two threads were in collectives of one group")
    waiting.join()


@scene
def index_out_of_range(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    numbers = torch.tensor([0, 1, 9 if rank == 2 else 2], device=mesh.device_type)
    index = ShardTensor.from_local(numbers, mesh, [Shard(0)], {0: [3, 3, 3]})
    event()
    x[index].full_tensor()


# Compiled functions


@scene
def raises_while_tracing(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)

    def function(x: Any) -> Any:
        if rank == 1:
            event()
            raise ValueError("while tracing")
        return replicated_twice(x)

    torch.compile(function, backend="aot_eager")(x)


@scene
def raises_while_tracing_verified(mesh: DeviceMesh, rank: int) -> None:
    config.verify = True
    raises_while_tracing(mesh, rank)


@scene
def killed_while_compiling(mesh: DeviceMesh, rank: int) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        if rank == 1:
            die()
        return graph

    torch.compile(replicated_twice, fullgraph=True, backend=aot_autograd(fw_compiler=backend))(points(mesh, rank))


@scene
def killed_before_a_compiled_sum(mesh: DeviceMesh, rank: int) -> None:
    x, run = points(mesh, rank), torch.compile(summed_twice, fullgraph=True, backend="aot_eager")
    run(x)
    if rank == 1:
        die()
    run(x)


@scene
def another_call_beside_a_compiled_sum(mesh: DeviceMesh, rank: int) -> None:
    x, run = points(mesh, rank), torch.compile(summed_twice, fullgraph=True, backend="aot_eager")
    run(x)
    event()
    if rank == 1:
        x.full_tensor()
    run(x)


@scene
def other_shape_of_a_compiled_sum(mesh: DeviceMesh, rank: int) -> None:
    def compiled(graph: Any, inputs: Any) -> Any:
        event()
        return graph

    x = points(mesh, rank, columns=5 if rank == 2 else 4)
    torch.compile(summed_twice, fullgraph=True, backend=aot_autograd(fw_compiler=compiled))(x)


@scene
def other_shape_of_a_sum_that_was_seen(mesh: DeviceMesh, rank: int) -> None:
    run = torch.compile(summed_twice, backend="aot_eager", dynamic=True)
    few, many = points(mesh, rank), points(mesh, rank, columns=5)
    for x in (few, few, many, many, few):
        run(x)
    event()
    for _ in range(3):
        run(many if rank == 2 else few)


@scene
def other_branch_compiled(mesh: DeviceMesh, rank: int) -> None:
    def function(x: Any, whole: bool) -> Any:
        return x.redistribute(placements=[Replicate() if whole else Shard(1)]).to_local() * 2

    event()
    torch.compile(function, fullgraph=True, backend="aot_eager")(points(mesh, rank), rank == 1)


# Ranks that only are slow


@scene
def slow_in_python(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    if rank == 1:
        time.sleep(9)
    x.full_tensor()


@scene
def slow_in_a_kernel(mesh: DeviceMesh, rank: int) -> None:
    x, a = points(mesh, rank), torch.randn(1200, 1200, device=mesh.device_type)
    end = time.time() + 9
    while rank == 1 and time.time() < end:
        a = a @ a / 40
    x.sum().full_tensor()


@scene
def one_rank_alone_does_what_needs_no_other(mesh: DeviceMesh, rank: int) -> None:
    x = points(mesh, rank)
    for _ in range(3):
        if rank == 0:
            print((x * 2).to_local().sum(), x.placements)
        x.full_tensor()


# Running them


def _store(port_file: Path, rank: int) -> dist.Store:
    """The key-value store, on a port that the system chooses: other scenes look for one at the same time."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, WORLD, is_master=True, wait_for_workers=False)
        port_file.with_suffix(".tmp").write_text(str(store.port))
        port_file.with_suffix(".tmp").rename(port_file)
        return store
    while not port_file.exists():
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(port_file.read_text()), WORLD, is_master=False)


def _be_rank(name: str, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    _EVENT_FILE.append(Path(folder) / f"{name}.{rank}.event")
    errors = open(Path(folder) / f"{name}.{rank}.err", "w")  # noqa: SIM115
    os.dup2(errors.fileno(), 2)
    device = device_type(BACKEND)
    if device == "cuda":
        gpus.take(rank, WORLD)
    dist.init_process_group(BACKEND, store=_store(Path(folder) / f"{name}.port", rank), rank=rank, world_size=WORLD)
    mesh = init_device_mesh(device, (WORLD,))
    outcome: dict[str, Any] = {"error": None}
    try:
        SCENES[name](mesh, rank)
    except BaseException as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        outcome["time"] = time.time()
        (Path(folder) / f"{name}.{rank}.json").write_text(json.dumps(outcome))


class _Played:
    """A scene whose ranks run: three processes, and the time by which they have to end."""

    def __init__(self, name: str, folder: str) -> None:
        self.name, self.folder = name, Path(folder)
        fork = multiprocessing.get_context("fork")
        self.ranks = [fork.Process(target=_be_rank, args=(name, rank, folder)) for rank in range(WORLD)]
        for rank in self.ranks:
            rank.start()
        self.end = time.monotonic() + LIMIT_SECONDS

    def runs(self) -> bool:
        return any(rank.is_alive() for rank in self.ranks) and time.monotonic() < self.end

    def found(self) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        for number, process in enumerate(self.ranks):
            hung = process.is_alive()
            if hung:
                process.kill()
            process.join()
            file = self.folder / f"{self.name}.{number}.json"
            outcome = json.loads(file.read_text()) if file.exists() else {"error": None, "time": None}
            shown = (self.folder / f"{self.name}.{number}.err").read_text()
            found.append({**outcome, "hung": hung, "status": process.exitcode, "shown": shown[-4000:]})
        events = [float(f.read_text()) for f in self.folder.glob(f"{self.name}.*.event")]
        return {"ranks": found, "event": min(events, default=None)}


def main(results: str, names: list[str]) -> None:
    """Plays the scenes, all from one thread: where several wait for processes, one takes the end of another's."""
    found: dict[str, Any] = {}
    waiting = list(names)
    playing: list[_Played] = []
    with tempfile.TemporaryDirectory() as folder:
        while waiting or playing:
            while waiting and len(playing) < AT_ONCE:
                playing.append(_Played(waiting.pop(0), folder))
            time.sleep(0.05)
            for played in [scene for scene in playing if not scene.runs()]:
                found[played.name] = played.found()
                playing.remove(played)
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    if os.environ.get("SCENE_QUEUED"):
        queued_gloo.put_in()
    main(sys.argv[1], sys.argv[2:] or list(SCENES))
