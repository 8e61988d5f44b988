"""The link of real ranks, measured: positive, the same on every rank, and of some use for a size in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardcompile.errors import CollectiveError
from shardcompile.passes.cost import calibrate as calibration
from shardcompile.testing import rank, world_size


@pytest.mark.ranks(2)
def test_a_measured_link_is_the_same_on_every_rank_and_predicts_a_size_in_between(tmp_path: Path) -> None:
    link = calibration.measure_link(repeats=2)
    assert link.launch > 0 and link.hop > 0 and link.bandwidth > 0
    assert (link.medium, world_size()) == ("shared", 2)
    found: list[object] = [None] * world_size()
    dist.all_gather_object(found, link)
    assert found == [link] * world_size()

    path = tmp_path / f"link{rank()}.json"
    calibration.save(link, path)
    assert calibration.load(path) == link

    group = dist.group.WORLD
    assert group is not None
    shard = 1 << 17  # 512 KiB in floats, none of the sizes that were measured
    x = torch.zeros(shard)
    took = calibration._fastest({"gather": lambda: calibration._gather(x, group)}, group, x.device, 10)["gather"]
    predicted = link.seconds((world_size() - 1) * 4 * shard, world_size())
    # A machine that others use as well: a factor of 10 tells a fit from nonsense, and no more is claimed.
    assert predicted / 10 < took < predicted * 10


@pytest.mark.ranks(2)
def test_one_rank_has_no_link() -> None:
    alone = [dist.new_group([r]) for r in range(world_size())][rank()]
    with pytest.raises(CollectiveError, match="at least two ranks"):
        calibration.measure_link(alone)


@pytest.mark.nightly
@pytest.mark.ranks(2)
def test_a_measured_device_is_the_same_on_every_rank_and_has_all_its_parts(tmp_path: Path) -> None:
    device = calibration.measure_device(repeats=3)
    found: list[object] = [None] * world_size()
    dist.all_gather_object(found, device)
    assert found == [device] * world_size()
    parts = (device.memory, device.kernel, *device.flops.values(), device.intra.host)
    assert all(part > 0 for part in parts) and min(device.call, device.element, device.mask) >= 0
    assert device.intra.host <= device.intra.latency(world_size()) and 0 <= device.intra.busy <= 1
    path = tmp_path / f"device{rank()}.json"
    calibration.save(device, path)
    assert calibration.load_device(path) == device
