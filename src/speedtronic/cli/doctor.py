"""`speedtronic doctor`: what a run would find on this machine, and what is likely to go wrong."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from speedtronic.cli import output
from speedtronic.cli.arguments import add_config_arguments, load_from_arguments
from speedtronic.errors import RunFolderError, SpeedtronicError

if TYPE_CHECKING:
    from speedtronic.config import SpeedtronicConfig

State = Literal["ok", "note", "warning", "problem"]

_PROBE = 64 * 10**6  # bytes that are written to see how fast a disk is
_LITTLE_SPACE = 2 * 10**9  # bytes
_LITTLE_SHARED_MEMORY = 10**9  # bytes; a container's usual 64 MB end data workers with a bus error
_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "9p", "ceph", "lustre", "afs"})
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^\]]*\])?\s*(?:>=\s*([\d.]+))?.*?(?:extra\s*==\s*['\"]([\w-]+)['\"])?\s*")


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        part: what was looked at.
        state: a `problem` stops a run, a `warning` makes it slow or is likely to stop it later, a `note` is worth
            knowing.
        says: what was found, and the remedy.
    """

    part: str
    state: State
    says: str


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="look at this machine: versions, devices, disk, store, common mistakes",
        description="Look at what a run finds on this machine: installed parts, devices and their precisions, the "
        "disk of run.output_dir, the store that nodes share, and common mistakes. With a configuration it looks at "
        "what that needs. It writes a file of 64 MB to measure the disk, and removes it. Exit code 1 if there is a "
        "problem.",
    )
    add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of the table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = load_from_arguments(args)[0] if args.config is not None or args.words else None
    findings = list(examine(config))
    if args.json:
        output.write(json.dumps([finding._asdict() for finding in findings], indent=2, ensure_ascii=False) + "\n")
    else:
        output.write_table(("part", "", "what was found"), findings)
    return 1 if any(finding.state == "problem" for finding in findings) else 0


def examine(config: SpeedtronicConfig | None) -> Iterator[Finding]:
    """Everything that the command looks at, in its order."""
    yield from look_at_packages(_requirements())
    torch_works = True
    for finding in look_at_devices():
        torch_works = torch_works and finding.state != "problem"
        yield finding
    yield from look_at_compilers(os.environ, compiles=config is not None and config.compile)
    yield from look_at_threads(os.environ)
    yield from look_at_shared_memory(Path("/dev/shm"), workers=config is not None and config.data.num_workers > 0)
    yield from look_at_cache()
    folder = Path(config.run.output_dir if config is not None else "runs").absolute()
    yield from look_at_folder(folder, Path("/proc/mounts"))
    if config is not None:
        yield from look_at_config(config)
        if config.distributed.enabled and torch_works:
            yield from look_at_store(config)


# ---------------------------------------------------------------------- software


def _requirements() -> list[str]:
    """What the installed package asks for; nothing where the source runs without being installed."""
    try:
        return requires("speedtronic") or []
    except PackageNotFoundError:
        return []


def look_at_packages(requirements: list[str]) -> Iterator[Finding]:
    """Python, and each package that Speedtronic needs or can use, with its version."""
    from speedtronic import __version__

    yield Finding("speedtronic", "ok", f"{__version__}, Python {sys.version.split()[0]} on {sys.platform}")
    missing: dict[str, list[str]] = {}
    told: set[str] = set()
    for requirement in requirements:
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None or match[3] == "dev":
            continue
        name, least, extra = match[1], match[2], match[3]
        if name in told:  # several extras need it
            continue
        try:
            found = version(name)
        except PackageNotFoundError:
            if extra is None:
                yield Finding(name, "problem", f"not installed; pip install {name}")
            else:
                missing.setdefault(extra, []).append(name)
            continue
        told.add(name)
        if least is not None and _numbers(found) < _numbers(least):
            yield Finding(name, "problem", f"{found} is too old: at least {least}; pip install --upgrade {name}")
        else:
            yield Finding(name, "ok", found)
    if missing:
        words = ", ".join(f"speedtronic[{extra}]" for extra in missing)
        yield Finding("not installed", "note", f"{words}: install what you need")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def look_at_devices() -> Iterator[Finding]:
    """The devices that torch finds, and the precisions that each runs in."""
    try:
        import torch

        from speedtronic.precision import available_devices, resolve_precision
    except Exception as error:  # noqa: BLE001 - a broken installation fails in any way, and says how
        yield Finding("torch", "problem", f"cannot be imported: {type(error).__name__}: {error}")
        return
    if Path("/dev/nvidia0").exists() and not torch.cuda.is_available():
        built = torch.version.cuda
        reason = "this torch is built without CUDA" if built is None else f"torch for CUDA {built} cannot use it"
        yield Finding("gpu", "warning", f"there is an NVIDIA device, and {reason}; install torch for its driver")
    for device in available_devices():
        # A mode that cannot run becomes fp32, of which nobody need be told here.
        plans = {mode: resolve_precision(mode, device, warn=lambda _: None) for mode in ("fp32", "bf16", "fp16")}
        modes = [mode for mode, plan in plans.items() if plan.mode == mode]
        words = [", ".join(modes)]
        if device.startswith("cuda"):
            properties = torch.cuda.get_device_properties(torch.device(device))
            words = [properties.name, f"{properties.total_memory / 1e9:.0f} GB", *words]
        elif device == "cpu":
            words = [f"{output.counted(torch.get_num_threads(), 'thread')} of {_processors()} processors", *words]
        yield Finding(device, "ok", "; ".join(words))


def look_at_compilers(environment: Mapping[str, str], *, compiles: bool) -> Iterator[Finding]:
    """The C++ compiler, without which `compile` falls back to the eager model on a CPU."""
    names = [environment["CXX"]] if environment.get("CXX") else ["g++", "clang++", "c++", "cl"]
    if found := next((name for name in names if shutil.which(name)), None):
        yield Finding("compiler", "ok", found)
    else:
        state: State = "warning" if compiles else "note"
        yield Finding("compiler", state, f"no {' or '.join(names)}: compile: true needs a C++ compiler, such as g++")


# ---------------------------------------------------------------------- machine


def _processors() -> int:
    """The processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows do not say
        return os.cpu_count() or 1


def look_at_threads(environment: Mapping[str, str], processors: Callable[[], int] = _processors) -> Iterator[Finding]:
    """Environment variables that leave processors idle, or have several threads share one."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if (value := environment.get(name, "")).isdecimal():
            threads, there = int(value), processors()
            if threads < there:
                yield Finding(
                    name, "warning", f"{threads} of {there} processors; unset it, or set run.threads, to use all"
                )
            elif threads > there:
                yield Finding(name, "warning", f"{threads} threads share {there} processors; unset it")


def look_at_shared_memory(place: Path, *, workers: bool) -> Iterator[Finding]:
    """The memory through which data workers send batches. A container's is small unless it was asked for more."""
    try:
        size = shutil.disk_usage(place).total
    except OSError:
        return  # other systems have no such folder
    if size < _LITTLE_SHARED_MEMORY:
        state: State = "warning" if workers else "note"
        yield Finding(
            str(place), state, f"{size / 1e6:.0f} MB: too little for data.num_workers; docker run --shm-size=8g"
        )
    else:
        yield Finding(str(place), "ok", f"{size / 1e9:.0f} GB for data workers")


def look_at_cache() -> Iterator[Finding]:
    """The folder of the caches: encoded text, tuning, compiled code."""
    own = os.environ.get("SPEEDTRONIC_CACHE")
    base = Path(own or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "speedtronic")
    place = _nearest(base)
    if os.access(place, os.W_OK):
        yield Finding("cache", "ok", str(base))
    else:
        yield Finding(
            "cache", "warning", f"{place} cannot be written: text is encoded and code compiled anew by each run; set "
            "SPEEDTRONIC_CACHE to a folder that can"
        )  # fmt: skip


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def look_at_folder(folder: Path, mounts: Path, clock: Callable[[], float] = time.perf_counter) -> Iterator[Finding]:
    """Whether the folder of a run can be written and locked, how much room it has, and how fast its disk writes.

    Args:
        folder: `run.output_dir`, absolute; it need not exist.
        mounts: the system's table of mounts.
        clock: seconds.
    """
    from speedtronic.durable.lock import FolderLock

    place = _nearest(folder)
    try:
        with tempfile.TemporaryDirectory(prefix=".speedtronic-doctor-", dir=place) as name:
            probe = Path(name)
            free = shutil.disk_usage(probe).free
            state: State = "warning" if free < _LITTLE_SPACE else "ok"
            yield Finding("disk", state, f"{free / 1e9:.1f} GB free at {place}")
            if free > 2 * _PROBE:
                rate = _PROBE / max(_write(probe / "data", clock), 1e-9)
                yield Finding("disk speed", "ok", f"{rate / 1e6:.0f} MB/s, written and flushed")
            lock = FolderLock(
                probe,
                held=lambda holder: RunFolderError(f"held by {holder}"),
                unusable=lambda error: RunFolderError(error.strerror or str(error)),
            )
            with lock:
                yield Finding("locks", "ok", "a second run in a folder is refused")
    except RunFolderError as error:
        yield Finding("locks", "problem", f"{place}: {error}; choose a run.output_dir on a disk with locks")
    except OSError as error:
        yield Finding("disk", "problem", f"{place} cannot be written: {error.strerror or error}; set run.output_dir")
    if (kind := _kind_of_mount(place.resolve(), mounts)) in _REMOTE:
        yield Finding("mount", "note", f"{place} is on {kind}: let only one machine at a time train in a folder there")


def _write(file: Path, clock: Callable[[], float]) -> float:
    """Seconds to write the probe and to have it on the disk."""
    from speedtronic.durable.files import sync

    block = os.urandom(10**6)
    began = clock()
    with file.open("wb", buffering=0) as opened:
        for _ in range(_PROBE // len(block)):
            opened.write(block)
        sync(opened.fileno())
    return clock() - began


def _kind_of_mount(place: Path, mounts: Path) -> str | None:
    """The file system that a folder is on; None where the system has no table of mounts."""
    found: tuple[int, str | None] = (-1, None)
    with suppress(OSError, UnicodeDecodeError):
        for line in mounts.read_text(encoding="utf-8").splitlines():
            _, point, kind, *_ = line.split(" ")
            point = point.replace("\\040", " ")
            if place.is_relative_to(point):
                found = max(found, (len(point), kind), key=lambda pair: pair[0])
    return found[1]


# ---------------------------------------------------------------------- a run


def look_at_config(config: SpeedtronicConfig) -> Iterator[Finding]:
    """What is certain to stop the run, what is most likely not meant, and files that are not there."""
    from speedtronic.config.checks import doubts, refuse_what_cannot_be_trained
    from speedtronic.errors import ConfigError

    before = None
    try:
        refuse_what_cannot_be_trained(config)
    except ConfigError as error:
        before = error
        for line in str(error).splitlines():
            yield Finding("configuration", "problem", line)
    for doubt in doubts(config):
        yield Finding("configuration", "warning", doubt)
    for key, value in (
        ("data.shards", config.data.shards),
        ("data.text_path", config.data.text_path),
        ("data.chat", config.data.chat),
        *(("data.mixture", folder) for folder in config.data.mixture or ()),
        ("run.init_from", config.run.init_from),
    ):
        if value is not None and not Path(value).exists():
            before = ConfigError(key)
            yield Finding("configuration", "problem", f"{key}: there is no {value}")
    if before is None:
        yield Finding("configuration", "ok", config.run.name)


def look_at_store(config: SpeedtronicConfig) -> Iterator[Finding]:
    """Whether the store that nodes share answers. It is read only."""
    from speedtronic.distributed.stores.open import open_store

    try:
        store = open_store(str(config.distributed.repo_id), **config.distributed.store_options)
        try:
            began = time.perf_counter()
            identity = store.get("store.json", limit=10**6)
            took = time.perf_counter() - began
        finally:
            store.close()
    except SpeedtronicError as error:
        yield Finding("store", "problem", str(error))
        return
    says = f"{store.url} answers in {took * 1000:.0f} ms"
    if identity is None:
        yield Finding("store", "note", f"{says}; it holds no run yet")
    else:
        yield Finding("store", "ok", says)
