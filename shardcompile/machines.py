"""What links and devices can do: the constants of the cost model, each with where it comes from.

Times are in seconds, sizes in bytes, rates in bytes or floating point operations per second, all for one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Link:
    """A class of links, as latency and bandwidth.

    A collective over n ranks takes ``launch + hop * log2(n) + wire bytes / bandwidth``. The logarithm stands for trees
    and recursive doubling, which backends take where latency matters.

    Attributes:
        name: for people.
        launch: seconds that every collective takes.
        hop: seconds more for each doubling of the group.
        bandwidth: bytes per second and rank, in one direction. For NCCL it is what nccl-tests call the bus bandwidth
            (PERFORMANCE.md there).
        medium: ``ports`` if every rank has a link of its own, so that the rank with most to send or to receive decides;
            ``shared`` if all ranks share one, as on the loopback of one machine, so that the sum over ranks decides.
        host: seconds of the launch in which what computes is held up, because one thread runs Python and computes.
        busy: the share of a transfer in which what computes is held up, because the same cores move the bytes.
    """

    name: str
    launch: float
    hop: float
    bandwidth: float
    medium: Literal["ports", "shared"] = "ports"
    host: float = 0.0
    busy: float = 0.0

    def latency(self, group_size: int) -> float:
        """Seconds that a collective takes however little it moves."""
        return self.launch + self.hop * math.log2(max(group_size, 1))

    def seconds(self, wire_bytes: float, group_size: int) -> float:
        """Seconds of a collective in which a rank moves so many bytes; none in a group of one."""
        return 0.0 if group_size < 2 else self.latency(group_size) + wire_bytes / self.bandwidth


@dataclass(frozen=True)
class Price:
    """Seconds of a collective.

    Attributes:
        latency: that it takes however little it moves.
        transfer: that its bytes take on the link.
        packing: of compute before it starts.
        unpacking: of compute when it is awaited.
        held: in which what computes is held up before it starts, see `Link`; they are in none of the others.
    """

    latency: float
    transfer: float
    packing: float = 0.0
    unpacking: float = 0.0
    held: float = 0.0

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.latency + self.transfer

    @property
    def before(self) -> float:
        """What compute does, or waits for, before it starts."""
        return self.packing + self.held


# Latency. Of NVLink and InfiniBand on H100: a table of collectives measured on 8 x 8 H100 (shipped with AutoParallel's
# overlap simulator) was fitted by 29 us and 335 GB/s among 8 ranks of a node, 87 us and 45 GB/s among 8 ranks of 8
# nodes. How the latency divides into a launch and a share for each doubling is an estimate: 30 us is the base latency
# of torch's own profile of InfiniBand (torch/_inductor/comm_analysis.py), 20 us of it are given to the launch on
# NVLink. Other generations are given the same latencies, an estimate as well.
# Bandwidth. NVLink moves 300, 450 and 900 GB/s in one direction on A100, H100 and B200 (NVIDIA's data sheets of the
# three give twice as much for both). 335 GB/s was measured on H100, which is 0.74 of 450; the others are that share, an
# estimate. InfiniBand: HDR is 200, NDR 400 Gbit/s for each GPU's adapter; 45 of NDR's 50 GB/s were measured, HDR is
# given the same share. PCIe: 10 GB/s is torch's figure for NCCL without NVLink (comm_analysis.py), of the 31.5 GB/s of
# 16 lanes of PCIe 4; PCIe 5 is given twice that, an estimate.
NVLINK3 = Link("NVLink 3 (A100)", launch=20e-6, hop=3e-6, bandwidth=223e9)
NVLINK4 = Link("NVLink 4 (H100, H200)", launch=20e-6, hop=3e-6, bandwidth=335e9)
NVLINK5 = Link("NVLink 5 (B200)", launch=20e-6, hop=3e-6, bandwidth=670e9)
PCIE4 = Link("PCIe 4 x16", launch=20e-6, hop=5e-6, bandwidth=10e9)
PCIE5 = Link("PCIe 5 x16", launch=20e-6, hop=5e-6, bandwidth=20e9)
INFINIBAND_HDR = Link("InfiniBand HDR", launch=30e-6, hop=19e-6, bandwidth=22.5e9)
INFINIBAND_NDR = Link("InfiniBand NDR", launch=30e-6, hop=19e-6, bandwidth=45e9)

# `measure_link` on two shared cores: 0.30 to 0.34 ms and 1.0 to 1.1 GB/s with 2 ranks, 0.68 ms and 0.8 GB/s with 4.
GLOO_LOOPBACK = Link("gloo on loopback", launch=100e-6, hop=250e-6, bandwidth=0.9e9, medium="shared")


@dataclass(frozen=True)
class Device:
    """What one rank computes with, as a roofline.

    Attributes:
        name: for people.
        kind: torch's device type.
        flops: peak floating point operations per second of matrix products, by dtype; others are taken for float32.
        memory: bytes per second to and from memory, the peak.
        share: how much of either peak kernels reach.
        kernel: seconds to launch a kernel.
        element: seconds for one element of a function that is no arithmetic, such as exp, beside moving it.
        call: seconds of Python around each run of a graph, in which nothing is computed.
        mask: seconds for one bool that a kernel stores or reads, beside moving it: half of what it takes to do both.
        intra: the link within a node.
        inter: the link between nodes.
    """

    name: str
    kind: str
    flops: Mapping[torch.dtype, float]
    memory: float
    share: float
    kernel: float
    intra: Link
    inter: Link
    element: float = 0.0
    call: float = 0.0
    mask: float = 0.0

    def compute_seconds(
        self, flops: float, nbytes: float, dtype: torch.dtype, elements: float = 0, masks: float = 0
    ) -> float:
        """Seconds of a kernel and its launch.

        A GPU hides the shorter of computing and moving behind the longer (Williams et al., "Roofline", 2009). A CPU
        core does one after the other: results lie in new memory, and what it reads has left the caches.

        Args:
            flops: operations of products.
            nbytes: to and from memory.
            dtype: of the numbers.
            elements: for which a function is computed that is no arithmetic.
            masks: bools that are stored or read.
        """
        peak = self.flops.get(dtype, self.flops[torch.float32])
        computing = max(flops / peak / self.share, elements * self.element + masks * self.mask)
        moving = nbytes / self.memory / self.share
        return self.kernel + (computing + moving if self.kind == "cpu" else max(computing, moving))


# Peaks: NVIDIA's data sheets of A100 80 GB SXM, H100 SXM, H200 SXM and B200, without sparsity; float64 by tensor cores.
# float32 is torch's default, which keeps matrix products off TF32. That kernels reach 0.7 of a peak, and that a
# launch costs 4 us between kernels of a busy stream, are estimates.
A100 = Device(
    "A100",
    "cuda",
    {torch.bfloat16: 312e12, torch.float16: 312e12, torch.float32: 19.5e12, torch.float64: 19.5e12},
    memory=2.039e12,
    share=0.7,
    kernel=4e-6,
    intra=NVLINK3,
    inter=INFINIBAND_HDR,
)
H100 = Device(
    "H100",
    "cuda",
    {torch.bfloat16: 989e12, torch.float16: 989e12, torch.float32: 67e12, torch.float64: 67e12},
    memory=3.35e12,
    share=0.7,
    kernel=4e-6,
    intra=NVLINK4,
    inter=INFINIBAND_NDR,
)
H200 = Device("H200", "cuda", H100.flops, 4.8e12, H100.share, H100.kernel, NVLINK4, INFINIBAND_NDR)
B200 = Device(
    "B200",
    "cuda",
    {torch.bfloat16: 2250e12, torch.float16: 2250e12, torch.float32: 75e12, torch.float64: 37e12},
    memory=8e12,
    share=0.7,
    kernel=4e-6,
    intra=NVLINK5,
    inter=INFINIBAND_NDR,
)
# One core with AVX2 at 3 GHz: 2 units x 8 floats x 2 operations make 96 GFLOP/s; its part of a server's memory
# bandwidth is of the order of 10 GB/s. Both are estimates, as is the cost of calling a kernel.
CPU_CORE = Device(
    "one CPU core",
    "cpu",
    {torch.float32: 96e9, torch.float64: 48e9},
    memory=10e9,
    share=0.7,
    kernel=2e-6,
    intra=GLOO_LOOPBACK,
    inter=GLOO_LOOPBACK,
)

DEVICES = {"a100": A100, "h100": H100, "h200": H200, "b200": B200, "cpu": CPU_CORE}
"""By their names in small letters."""

RANKS_PER_NODE = 8
"""GPUs of a DGX or HGX node."""


def device_of(kind: str) -> Device:
    """What to reckon with where nothing more is known: a core for ``cpu``, an H100 for everything else.

    The GPU at hand is not asked: ranks with different ones would reckon with different costs.

    Args:
        kind: torch's device type.
    """
    return CPU_CORE if kind == "cpu" else H100


def link_of(device: Device, group_size: int, ranks_per_node: int = RANKS_PER_NODE, spread: bool | None = None) -> Link:
    """The link that limits a group: within a node if the group is in one.

    Reads nothing that could differ between ranks. Between nodes each rank is assumed to have an adapter of its own,
    however many ranks of its node are in the group.

    Args:
        device: of every rank.
        group_size: ranks in the group.
        ranks_per_node: of every node.
        spread: whether the group, or another one along the same mesh dim, has ranks on several nodes, see
            `spans_nodes`; None if that is not known: then a group is in one node if it fits.
    """
    spread = group_size > ranks_per_node if spread is None else spread
    return device.inter if spread else device.intra


def spans_nodes(ranks: Sequence[int], world_size: int, ranks_per_node: int = RANKS_PER_NODE) -> bool:
    """Whether a group has ranks on several nodes, or could have: the same for all groups along a mesh dim.

    Ranks are numbered node by node. The groups along a mesh dim have the same number of ranks, at the same distance
    from each other. So none crosses the border of a node if their reach divides a node. Otherwise some do, and all
    ranks have to reckon with the slower link. So they do for a group whose ranks are not at equal distances.

    Args:
        ranks: of the group, by their number in the world.
        world_size: ranks in all.
        ranks_per_node: of every node.
    """
    if world_size <= ranks_per_node or len(ranks) < 2:
        return False
    step = ranks[1] - ranks[0]
    if step <= 0 or list(ranks) != list(range(ranks[0], ranks[0] + step * len(ranks), step)):
        return True
    return ranks_per_node % (step * len(ranks)) != 0
