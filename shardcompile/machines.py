"""Links and devices: the constants of the cost model, each with its source.

Times are in seconds, sizes in bytes, rates in bytes or floating point operations per second, all per rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Link:
    """The latency and bandwidth of a kind of interconnect.

    A collective over n ranks takes ``launch + hop * log2(n) + wire bytes / bandwidth``. The logarithm models trees and
    recursive doubling, which backends use where latency matters.

    Attributes:
        name: the name to print.
        launch: the fixed latency of every collective.
        hop: the additional latency per doubling of the group size.
        bandwidth: bytes per second and rank, in one direction. For NCCL it is what nccl-tests call the bus bandwidth
            (PERFORMANCE.md there).
        medium: ``ports`` if every rank has its own link, so that the rank with most to send or to receive is the
            bottleneck; ``shared`` if all ranks share one, as on the loopback of one machine, so that the total is.
        host: the seconds of the launch that block compute, because one thread runs Python and computes.
        busy: the fraction of a transfer that blocks compute, because the same cores move the bytes.
    """

    name: str
    launch: float
    hop: float
    bandwidth: float
    medium: Literal["ports", "shared"] = "ports"
    host: float = 0.0
    busy: float = 0.0

    def latency(self, group_size: int) -> float:
        """Returns the seconds of a collective that do not depend on its bytes."""
        return self.launch + self.hop * math.log2(max(group_size, 1))

    def seconds(self, wire_bytes: float, group_size: int) -> float:
        """Returns the seconds of a collective in which a rank moves `wire_bytes`; 0 for a group of one rank."""
        return 0.0 if group_size < 2 else self.latency(group_size) + wire_bytes / self.bandwidth


@dataclass(frozen=True)
class Price:
    """The cost of a collective, in seconds.

    Attributes:
        latency: the part that does not depend on its bytes.
        transfer: the time of its bytes on the link.
        packing: the compute before it starts.
        unpacking: the compute after it is awaited.
        held: the time before it starts in which compute is blocked, see `Link`; not included in the other figures.
    """

    latency: float
    transfer: float
    packing: float = 0.0
    unpacking: float = 0.0
    held: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds from start to completion."""
        return self.latency + self.transfer

    @property
    def before(self) -> float:
        """Seconds of compute, or of blocked compute, before it starts."""
        return self.packing + self.held


# Latency of NVLink and InfiniBand on H100: a table of collectives measured on 8 x 8 H100 (shipped with AutoParallel's
# overlap simulator) is fitted by 29 us and 335 GB/s among 8 ranks of one node, and by 87 us and 45 GB/s among 8 ranks
# of 8 nodes. The split of the latency into launch and hop is an estimate: 30 us is the base latency of torch's own
# profile of InfiniBand (torch/_inductor/comm_analysis.py), and 20 us are assigned to the launch on NVLink. Other
# generations are assigned the same latencies, also an estimate.
# Bandwidth: NVLink moves 300, 450 and 900 GB/s in one direction on A100, H100 and B200 (NVIDIA's data sheets give the
# sum of both directions, twice as much). 335 GB/s was measured on H100, which is 0.74 of 450; the same fraction is
# assumed for the others. InfiniBand: HDR is 200, NDR 400 Gbit/s for each GPU's adapter; 45 of NDR's 50 GB/s were
# measured, and the same fraction is assumed for HDR. PCIe: 10 GB/s is torch's figure for NCCL without NVLink
# (comm_analysis.py), of the 31.5 GB/s of 16 lanes of PCIe 4; twice that is assumed for PCIe 5.
NVLINK3 = Link("NVLink 3 (A100)", launch=20e-6, hop=3e-6, bandwidth=223e9)
NVLINK4 = Link("NVLink 4 (H100, H200)", launch=20e-6, hop=3e-6, bandwidth=335e9)
NVLINK5 = Link("NVLink 5 (B200)", launch=20e-6, hop=3e-6, bandwidth=670e9)
PCIE4 = Link("PCIe 4 x16", launch=20e-6, hop=5e-6, bandwidth=10e9)
PCIE5 = Link("PCIe 5 x16", launch=20e-6, hop=5e-6, bandwidth=20e9)
INFINIBAND_HDR = Link("InfiniBand HDR", launch=30e-6, hop=19e-6, bandwidth=22.5e9)
INFINIBAND_NDR = Link("InfiniBand NDR", launch=30e-6, hop=19e-6, bandwidth=45e9)

# `measure_link` on two shared cores: 0.20 to 0.34 ms and 1.0 to 1.8 GB/s with 2 ranks, 0.54 to 0.68 ms and 0.8 GB/s
# with 4. A start takes the host 0.09 to 0.10 ms, and transfers keep the cores busy all the time that they take.
GLOO_LOOPBACK = Link(
    "gloo on loopback", launch=100e-6, hop=250e-6, bandwidth=0.9e9, medium="shared", host=90e-6, busy=1.0
)


@dataclass(frozen=True)
class Device:
    """The roofline model of the device that one rank computes on.

    Attributes:
        name: the name to print.
        kind: torch's device type.
        flops: the peak floating point operations per second of matrix products, by dtype; float32's for other dtypes.
        memory: the peak memory bandwidth in bytes per second.
        share: the fraction of either peak that kernels reach.
        kernel: seconds to launch a kernel.
        element: seconds per element of a transcendental function such as exp, in addition to moving the element.
        call: seconds of Python overhead per run of a graph, in which nothing is computed.
        mask: seconds per bool that a kernel stores or reads, in addition to moving it: half of what both take together.
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
        """Returns the seconds of a kernel and its launch.

        A GPU overlaps compute and memory traffic, so the longer of the two counts (Williams et al., "Roofline", 2009).
        A CPU core does one after the other: results are written to new memory, and operands have left the caches.

        Args:
            flops: the floating point operations of matrix products.
            nbytes: the bytes to and from memory.
            dtype: the dtype of the operands.
            elements: the number of elements for which a transcendental function is computed.
            masks: the number of bools that are stored or read.
        """
        peak = self.flops.get(dtype, self.flops[torch.float32])
        computing = max(flops / peak / self.share, elements * self.element + masks * self.mask)
        moving = nbytes / self.memory / self.share
        return self.kernel + (computing + moving if self.kind == "cpu" else max(computing, moving))


# Peaks: NVIDIA's data sheets of A100 80 GB SXM, H100 SXM, H200 SXM and B200, without sparsity; float64 on tensor cores.
# float32 is without TF32, which is torch's default for matrix products. That kernels reach 0.7 of a peak, and that a
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
# One core with AVX2 at 3 GHz: 2 FMA units x 8 floats x 2 operations give 96 GFLOP/s; one core's part of a server's
# memory bandwidth is of the order of 10 GB/s. Both are estimates, as is the cost of a kernel launch.
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
"""The devices by their names in lower case."""

RANKS_PER_NODE = 8
"""The number of GPUs of a DGX or HGX node."""


def device_of(kind: str) -> Device:
    """Returns the default device of the cost model: a CPU core for ``cpu``, an H100 for everything else.

    The actual GPU is not queried: ranks with different GPUs would compute different costs.

    Args:
        kind: torch's device type.
    """
    return CPU_CORE if kind == "cpu" else H100


def link_of(device: Device, group_size: int, ranks_per_node: int = RANKS_PER_NODE, spread: bool | None = None) -> Link:
    """Returns the link that limits a group: the link within a node if the group lies in one, else that between nodes.

    The answer is rank-invariant. Between nodes each rank is assumed to have its own adapter, however many ranks of its
    node are in the group.

    Args:
        device: the device of every rank.
        group_size: the number of ranks in the group.
        ranks_per_node: the number of ranks on every node.
        spread: whether the group, or another one along the same mesh dim, has ranks on several nodes, see
            `spans_nodes`; None if unknown: a group that fits into a node is then assumed to lie in one.
    """
    spread = group_size > ranks_per_node if spread is None else spread
    return device.inter if spread else device.intra


def spans_nodes(ranks: Sequence[int], world_size: int, ranks_per_node: int = RANKS_PER_NODE) -> bool:
    """Whether some group along the same mesh dim may have ranks on several nodes; equal for all groups of the mesh dim.

    Ranks are numbered node by node. The groups along a mesh dim have the same number of ranks and the same stride
    between them. If stride times group size divides the ranks of a node, no group crosses a node boundary. Otherwise
    some group does, and all ranks assume the slower link. They also assume it for a group without a constant stride.

    Args:
        ranks: the global ranks of the group.
        world_size: the number of ranks in the job.
        ranks_per_node: the number of ranks on every node.
    """
    if world_size <= ranks_per_node or len(ranks) < 2:
        return False
    step = ranks[1] - ranks[0]
    if step <= 0 or list(ranks) != list(range(ranks[0], ranks[0] + step * len(ranks), step)):
        return True
    return ranks_per_node % (step * len(ranks)) != 0
