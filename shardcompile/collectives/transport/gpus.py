"""Which GPU a rank of this machine uses, and ranks that share one.

NCCL refuses two ranks of one host on one GPU ("Duplicate GPU detected"). Ranks that each say that they are a host of
their own (``NCCL_HOSTID``) pass that check, and reach one another by sockets. So the NCCL paths of several ranks can be
tried on a machine with one GPU. Results are those of several GPUs; times are not.
"""

from __future__ import annotations

import os

import torch

SHARE = "SHARDCOMPILE_SHARE_GPUS"
"""Set to 1 in the environment, it lets more ranks run than there are GPUs."""

_HOSTS_OF_THEIR_OWN = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}


def are_enough(ranks: int) -> bool:
    """Whether so many ranks may run on the GPUs of this machine: one for each, or one that is shared (`SHARE`)."""
    gpus = torch.cuda.device_count()
    return gpus >= ranks or (gpus > 0 and os.environ.get(SHARE) == "1")


def take(rank: int, ranks: int) -> None:
    """Have this process use its GPU. Before a process group is made: NCCL reads the environment then.

    Args:
        rank: of this process.
        ranks: that run on this machine.
    """
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % gpus)
    if ranks > gpus:
        os.environ.update({"NCCL_HOSTID": f"rank-{rank}"} | _HOSTS_OF_THEIR_OWN)
