"""What a launcher of several processes, such as torchrun, says to each of them. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from speedtronic.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """This process among those that a launcher has started.

    Attributes:
        rank: its number among all.
        size: how many there are.
        local_rank: its number on this machine.
        local_size: how many there are on this machine.
        address, port: where the processes meet.
        attempt: how often the launcher has started them again.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    attempt: int = 0


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Read the variables that torchrun sets; None in a process that was started alone.

    Raises:
        ConfigError: there are several processes, and a variable is missing or no number.
    """
    if "RANK" not in environment or environment.get("WORLD_SIZE", "1") == "1":
        return None
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if not environment.get(name)]:
        raise ConfigError(
            f"the environment names several processes (RANK, WORLD_SIZE), and lacks {', '.join(missing)}: start them "
            "with torchrun, which sets all, or set parallel: none to train in this process alone"
        )
    try:
        return Launch(
            rank=int(environment["RANK"]),
            size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            local_size=int(environment.get("LOCAL_WORLD_SIZE") or 1),
            address=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0),
        )
    except ValueError as error:
        raise ConfigError(f"the environment of a launcher must hold whole numbers ({error}): use torchrun") from None
