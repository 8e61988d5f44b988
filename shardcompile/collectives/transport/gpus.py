"""Assigns GPUs to the ranks of this machine, also one GPU to several ranks.

NCCL refuses two ranks of one host on one GPU ("Duplicate GPU detected"). Ranks that each claim to be a separate host
(``NCCL_HOSTID``) pass that check and connect by sockets. So the NCCL paths of several ranks can be tested on a machine
with one GPU. Results are those of several GPUs; times are not.
"""

from __future__ import annotations

import os

import torch

SHARE = "SHARDCOMPILE_SHARE_GPUS"
"""Environment variable; 1 lets more ranks run than there are GPUs."""

_SEPARATE_HOSTS = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}


def are_enough(ranks: int) -> bool:
    """Returns whether so many ranks may run on this machine: with one GPU each, or with shared GPUs (`SHARE`)."""
    gpus = torch.cuda.device_count()
    return gpus >= ranks or (gpus > 0 and os.environ.get(SHARE) == "1")


def take(rank: int, ranks: int) -> None:
    """Selects the GPU of this process. Call it before creating a process group, when NCCL reads the environment.

    Args:
        rank: rank of this process.
        ranks: number of ranks on this machine.
    """
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % gpus)
    if ranks > gpus:
        os.environ.update({"NCCL_HOSTID": f"rank-{rank}"} | _SEPARATE_HOSTS)
