"""From what the launcher says to the group of this process, and to its device."""

from __future__ import annotations

import atexit
import warnings
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, and in no __all__
from torch.distributed.rendezvous import rendezvous

from speedtronic.config import ParallelConfig
from speedtronic.errors import ConfigError, DeviceError, RankError
from speedtronic.parallel.launch import Launch, launched
from speedtronic.parallel.process_group import ProcessGroup
from speedtronic.parallel.watch import Watch
from speedtronic.precision import resolve_device
from speedtronic.ranks import Group, SingleProcess

# torch's own limit comes later than that of the watch, which says more.
_SLACK = 60.0
_STORE_TIMEOUT = 10.0  # seconds that the watch waits for an answer

_group: ProcessGroup | None = None


def join_group(section: ParallelConfig, requested: str | torch.device | None) -> tuple[Group, torch.device]:
    """The group of this process, and its device. The first call waits until all processes have come.

    Args:
        section: how to train together.
        requested: the device that the configuration names, alike in all processes.

    Raises:
        ConfigError: the launcher's variables are not complete, or the device is one card for several processes.
        DeviceError: the device does not exist, or processes cannot train together on it.
        RankError: the other processes did not come.
    """
    global _group
    if section.strategy == "none":
        return SingleProcess(), resolve_device(requested)
    launch = launched()
    if launch is None:
        if _group is None and dist.is_initialized() and dist.get_world_size() > 1:
            _group = ProcessGroup()  # started by the user's own code, and watched by nobody
        return _group or SingleProcess(), resolve_device(requested)
    device = _device_of(launch, requested)
    if _group is None:
        if not dist.is_initialized():
            _start(section, launch, device)
        _group = ProcessGroup(_start_watch(section, launch))
    return _group, device


def _device_of(launch: Launch, requested: str | torch.device | None) -> torch.device:
    """The device of one process among those of its machine."""
    device = resolve_device(requested)
    if device.type == "cuda":
        own = torch.device("cuda", launch.local_rank)
        if device.index not in (None, launch.local_rank) and launch.local_size > 1:
            raise ConfigError(
                f"run.device: {device} is one card, and {launch.local_size} processes on this machine need one each; "
                "set it to cuda, or to auto"
            )
        if launch.local_rank >= torch.cuda.device_count() and device.index is None:
            raise DeviceError(
                f"{launch.local_size} processes were started on this machine, which has {torch.cuda.device_count()} "
                "CUDA devices: start as many as there are (torchrun --nproc-per-node)"
            )
        return own if device.index is None else device
    if device.type != "cpu":
        raise DeviceError(
            f"processes cannot train together on {device.type}: set run.device to cpu, or train in one process"
        )
    return device


def _start(section: ParallelConfig, launch: Launch, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        with warnings.catch_warnings():
            # torch warns of its own defaults, such as a device that it guesses.
            warnings.simplefilter("ignore")
            timeout = timedelta(seconds=section.timeout + _SLACK)
            store, _, _ = next(rendezvous("env://", timeout=timeout))
            # torchrun keeps one store for all attempts, and what is left of the last one would lead nowhere.
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore(f"speedtronic/{launch.attempt}", store),
                rank=launch.rank,
                world_size=launch.size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {launch.rank} of {launch.size} could not meet the others at {launch.address}:{launch.port}: {error}"
        ) from error
    atexit.register(_leave)


def _start_watch(section: ParallelConfig, launch: Launch) -> Watch:
    connection = TCPStore(
        launch.address,
        launch.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_STORE_TIMEOUT),
    )
    store = PrefixStore(f"speedtronic/watch/{launch.attempt}", connection)
    watch = Watch(store, launch.rank, launch.size, section.timeout)
    watch.start()
    atexit.register(watch.stop)
    return watch


def _leave() -> None:
    """NCCL warns of a process that ends without this."""
    global _group
    _group = None
    # After the loss of another rank nothing can be closed in order.
    with suppress(RuntimeError):
        dist.destroy_process_group()
