"""The slowest rank of a run.

In synchronous training, all ranks take equally long for a step, because they wait for the slowest one in collectives.
The slowest rank is therefore found by its own work: the time that a rank waits for its loader, plus the time from the
start of a step to the point where the rank first waits for the others. This point is the first collective of the
forward pass, or its end if it has none. When ranks start a step, they have just left a collective of the step before
together, so a rank with a slow loader, CPU or GPU reaches the point later than the others.

The rest of a step is not measured: from this point on, all ranks wait for each other. Under engines that shard weights
(FSDP2, ZeRO-3), ranks already wait for each other at the start of the forward pass. There, own work is the wait for the
loader, and the transfer and colour changes of the images.
"""

import logging
import os
import socket
from collections.abc import Sequence
from statistics import median_low
from typing import Any

import torch

log = logging.getLogger(__name__)
LAG = 1.5
"""A rank is slow if its own work takes this number of times as long as that of the median rank."""
COST = 0.02
"""A rank is slow only if it lags behind the median rank by more than this share of a step."""
PATIENCE = 60.0
"""Seconds after which a slow rank is named in the log."""


def rank_name(device: torch.device) -> str:
    """Return the name of this process for a user, such as `node3 rank 29 (GPU 5)`."""
    where = f" (GPU {device.index or 0})" if device.type == "cuda" else ""
    return f"{socket.gethostname()} rank {os.environ.get('RANK', '0')}{where}"


class SlowestRank:
    """Finds the slowest rank, and names a rank in the log that stays slow.

    Args:
        names: names of the ranks, in rank order, on the process that writes the log; None on the others.
    """

    def __init__(self, names: Sequence[str] | None) -> None:
        self.names = names
        self.slow: int | None = None
        """The rank that was slow at the newest record."""
        self.since = 0.0
        """Seconds for which this rank has been slow."""
        self.told: int | None = None
        """The rank that was last named in the log."""

    def judge(self, own: Sequence[float], seconds: float, steps: int) -> dict[str, Any]:
        """Return the metrics `slowest_rank`, a name, and `slowest_rank_lag`. With one rank, return no metrics.

        The lag is the own work of the slowest rank, divided by that of the median rank. With an even number of ranks,
        the median is the faster one of the two in the middle, so that two ranks can be compared.

        Args:
            own: own work of each rank since the last call, in seconds.
            seconds: training time since the last call.
            steps: number of steps since the last call.
        """
        if len(own) < 2:
            return {}
        slowest = max(range(len(own)), key=own.__getitem__)
        median = median_low(own)
        name = self.names[slowest] if self.names else f"rank {slowest}"
        lag = own[slowest] / max(median, 1e-9)
        slow = slowest if lag >= LAG and own[slowest] - median > COST * seconds else None
        self.since = self.since + seconds if slow == self.slow else seconds
        self.slow = slow
        if slow is not None and slow != self.told and self.since >= PATIENCE:
            self.told = slow
            log.log(
                logging.WARNING if self.names else logging.DEBUG,
                "%s is slow: its loader and forward pass took %.1f times as long as those of the median rank for %.0f "
                "s (%.3g s a step, median %.3g s). All ranks wait for it. Check the load of its CPUs, its disk and the "
                "clock of its GPU, or leave the node out.",
                name,
                lag,
                self.since,
                own[slow] / max(steps, 1),
                median / max(steps, 1),
            )
        return {"slowest_rank": name, "slowest_rank_lag": lag}
