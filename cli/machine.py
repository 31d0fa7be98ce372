"""This machine: accelerators, memory, cores, disks, ports, addresses.

Launches, estimates and the questionnaire get all their facts about the machine here. `devices` imports torch if there
is a driver; the classes do not. The module changes nothing on the machine, except that `measure_disk` writes and
removes one file.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from zeroaccel.comm.environment import usable_cores
from zeroaccel.errors import ConfigError
from zeroaccel.offload.offload_folder import examine_folder

_GIB = 2**30
_NO_FILES = ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue")
_LOCAL = ("ext4", "ext3", "ext2", "xfs", "btrfs", "zfs", "f2fs", "apfs", "overlay")
# Device files of CUDA, CUDA on Jetson boards, CUDA in WSL, and ROCm.
_DRIVERS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
_FIRST_WITH_BF16 = 8  # compute capability of Ampere
_OF_THE_SYSTEM = ("/boot", "/dev", "/etc", "/proc", "/run", "/snap", "/sys")
_LEAST_FREE = 2 * _GIB  # a disk with less free space is too small for optimizer states

TRIED = {
    "torch": ("2.6", "2.15"),
    "transformers": ("4.56.2", "5.24"),
    "accelerate": ("1.10.1", "1.15"),
    "peft": ("0.17", "0.21"),
    "trl": ("1.0", "1.16"),
}
"""By package: the oldest version that is supported, and the newest that ran the tests, as in docs/releases.md."""


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        has_bf16: true if it computes in bf16 natively, not through fp32.
        pci: its address on the bus, as the system writes it; empty if torch does not report it.
    """

    name: str
    memory_nbytes: int
    has_bf16: bool
    pci: str = ""


@dataclass(frozen=True)
class Disk:
    """A folder on a local disk that could hold states offloaded to "nvme".

    Attributes:
        write, read: bytes per second, or None before a measurement.
    """

    folder: str
    file_system: str
    free_nbytes: int
    write: float | None = None
    read: float | None = None


@dataclass(frozen=True)
class Machine:
    """The hardware of this machine.

    Attributes:
        memory_nbytes: RAM of the machine, or of the container around this process.
        job: the job of a cluster's scheduler, in words; empty without a scheduler.
        torch: version of torch.
    """

    devices: tuple[Device, ...] = ()
    memory_nbytes: int = 0
    cores: int = 1
    disks: tuple[Disk, ...] = ()
    job: str = ""
    torch: str = ""

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields the machine as pairs of a heading and its content."""
        if self.devices:
            first = self.devices[0]
            kinds = {(device.name, device.memory_nbytes) for device in self.devices}
            names = (
                f"{len(self.devices)} x {first.name}" if len(kinds) == 1 else ", ".join(d.name for d in self.devices)
            )
            bf16 = "bf16" if all(device.has_bf16 for device in self.devices) else "no bf16"
            yield "accelerators", f"{names}, {gib(first.memory_nbytes)} each, {bf16}"
        else:
            yield "accelerators", "none; processes would run on the CPU"
        yield "memory", gib(self.memory_nbytes)
        yield "cores", str(self.cores)
        for disk in self.disks:
            speeds = (
                ""
                if disk.write is None or disk.read is None
                else f", {_speed(disk.write)} write, {_speed(disk.read)} read"
            )
            yield "disk", f"{disk.folder} ({disk.file_system}), {gib(disk.free_nbytes)} free{speeds}"
        if not self.disks:
            yield "disk", "no local disk with enough space for offload"
        if self.job:
            yield "job", self.job
        yield "torch", self.torch or "not installed"


def look(environ: Mapping[str, str]) -> Machine:
    """Examines this machine.

    Args:
        environ: environment with the variables of a scheduler.
    """
    return Machine(
        devices=devices(),
        memory_nbytes=memory_nbytes(),
        cores=usable_cores(),
        disks=tuple(local_disks()),
        job=_job(environ),
        torch=version("torch"),
    )


def devices() -> tuple[Device, ...]:
    """Returns the CUDA devices that processes started from here will see, according to CUDA_VISIBLE_DEVICES."""
    if sys.platform == "linux" and not any(os.path.exists(driver) for driver in _DRIVERS):
        return ()  # without importing torch
    import torch

    if not torch.cuda.is_available():
        return ()
    each = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    by_rocm = torch.version.hip is not None
    return tuple(
        Device(device.name, int(device.total_memory), by_rocm or device.major >= _FIRST_WITH_BF16, _pci_address(device))
        for device in each
    )


def _pci_address(properties: Any) -> str:
    if not hasattr(properties, "pci_bus_id"):  # before torch 2.7
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def memory_nbytes(cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Returns the memory of this machine, or of the container around this process if that has less."""
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(cgroup.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return total


def local_disks() -> Iterator[Disk]:
    """Yields writable folders on local disks: mount points, the home folder and the folder for temporary files."""
    seen: set[int] = set()
    mounts = [partition.mountpoint for partition in psutil.disk_partitions() if partition.fstype in _LOCAL]
    for folder in [*mounts, os.path.expanduser("~"), tempfile.gettempdir()]:
        if folder == "/" or folder.startswith(_OF_THE_SYSTEM) or folder_trouble(folder):
            continue
        device, facts = os.stat(folder).st_dev, examine_folder(folder, "")
        if device not in seen and facts.free_nbytes >= _LEAST_FREE:
            seen.add(device)
            yield Disk(folder, facts.file_system, facts.free_nbytes)


def measure_disk(disk: Disk, nbytes: int = 64 * 2**20) -> Disk:
    """Returns the disk with its speeds, measured by writing one file of `nbytes` through to the disk and reading it.

    Before reading, it drops the file from the page cache, if the system allows that.
    """
    path = Path(disk.folder, f".zeroaccel-speed-{os.getpid()}")
    block = os.urandom(2**20)
    try:
        start = time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            for _ in range(nbytes // len(block)):
                file.write(block)
            os.fsync(file.fileno())
            written = time.perf_counter() - start
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        with open(path, "rb", buffering=0) as file:
            while file.read(len(block)):
                pass
        read = time.perf_counter() - start
    except OSError:
        return disk
    finally:
        with suppress(OSError):
            path.unlink()
    return replace(disk, write=nbytes / written, read=nbytes / read)


def folder_trouble(folder: str, needed_nbytes: int = 0) -> str:
    """Returns the reason why a folder cannot hold states offloaded to "nvme", and a remedy; "" if it can."""
    try:
        facts = examine_folder(folder, "")
    except ConfigError as error:
        return str(error).removeprefix(": ")
    if facts.file_system in _NO_FILES:
        return f"{folder} is not on a disk; name a folder on a local disk"
    if facts.free_nbytes < needed_nbytes:
        words = f"{folder} has {gib(facts.free_nbytes)} free, but {gib(needed_nbytes)} are needed"
        return f"{words}; name a folder with more space, or free some"
    return ""


def _job(environ: Mapping[str, str]) -> str:
    if "SLURM_JOB_ID" in environ:
        nodes = environ.get("SLURM_NNODES") or environ.get("SLURM_JOB_NUM_NODES", "1")
        return f"SLURM job {environ['SLURM_JOB_ID']} on {nodes} machines"
    return ""


def allocator_variable() -> str:
    """Returns this torch's variable for expandable segments, which torch 2.10 renamed; "" if it has none."""
    torch = version("torch")
    if "rocm" in torch:
        return ""
    return "PYTORCH_CUDA_ALLOC_CONF" if _numbers(torch) < [2, 10] else "PYTORCH_ALLOC_CONF"


def version(package: str) -> str:
    """Returns the version of an installed package, "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def untried_versions() -> Iterator[tuple[str, bool]]:
    """Yields (line, True if it is too old) for each installed library older than supported or newer than tried."""
    for package, (oldest, newest) in TRIED.items():
        found = version(package)
        numbers = _numbers(found)
        if numbers and numbers < _numbers(oldest):
            yield f"{package} {found}: expected {oldest} or newer: pip install '{package}>={oldest}'", True
        elif numbers[:2] > _numbers(newest):
            tried = f"{newest}, the newest that ran zeroaccel's tests"
            yield (
                f"{package} {found} is newer than {tried}; if a call fails, try pip install '{package}=={newest}.*'",
                False,
            )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.partition("+")[0].split(".") if number.isdigit()]


def gib(nbytes: int) -> str:
    """Formats a number of bytes in GiB."""
    return f"{nbytes / _GIB:.0f} GiB" if nbytes >= 10 * _GIB else f"{nbytes / _GIB:.1f} GiB"


def _speed(per_second: float) -> str:
    return f"{per_second / 1e9:.1f} GB/s"


def divide_cores(cores: list[int], num_local: int) -> tuple[str, ...]:
    """Divides cores evenly into one list per process, written as numbers with commas.

    Args:
        cores: numbers of cores, with neighbouring cores next to each other.

    Raises:
        ConfigError: there are fewer cores than processes.
    """
    share = len(cores) // num_local
    if not share:
        expected = f"at most {len(cores)} processes, one for each core"
        raise ConfigError("--enable_cpu_affinity", expected=expected, got=num_local, fix="leave it out")
    return tuple(",".join(map(str, sorted(cores[rank * share : (rank + 1) * share]))) for rank in range(num_local))


def neighbouring_cores(topology: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Returns the cores that this process may use, in the order of packages, cores and their hardware threads."""
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("--enable_cpu_affinity: this system does not bind processes to cores", fix="leave it out")

    def place(core: int) -> tuple[int, int, int]:
        folder = topology / f"cpu{core}" / "topology"
        try:
            return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text()), core
        except (OSError, ValueError):  # a container hides them; use the numbers as order
            return 0, core, core

    return sorted(os.sched_getaffinity(0), key=place)


def node_cores(pci: str, folder: Path = Path("/sys/bus/pci/devices")) -> list[int]:
    """Returns the usable cores of a PCI device's NUMA node; nothing if these are all cores, or are unknown.

    Memory follows the cores: the kernel takes a page from the node of the core that writes it first, if one is free.
    """
    device = folder / pci
    if not pci or not hasattr(os, "sched_getaffinity"):
        return []
    try:
        if int((device / "numa_node").read_text()) < 0:
            return []
        ranges = [text.partition("-") for text in (device / "local_cpulist").read_text().strip().split(",") if text]
        local = {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):  # a container hides them
        return []
    usable = os.sched_getaffinity(0)
    return sorted(local & usable) if usable - local else []


def port_trouble(port: int) -> str:
    """Returns the reason why a server on this machine cannot listen on `port`; "" if it can."""
    families = [socket.AF_INET, socket.AF_INET6] if socket.has_dualstack_ipv6() else [socket.AF_INET]
    for family in families:
        # create_server sets SO_REUSEADDR, like torch's store: a port whose last job has just ended is free.
        try:
            socket.create_server(("", port), family=family).close()
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):  # others: no IPv6 here
                return os.strerror(error.errno).lower()
    return ""


def is_known_host(host: str) -> bool:
    """Returns True if `host` is an address or a name that resolves."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def is_own_host(host: str) -> bool:
    """Returns True if `host` is an address of this machine."""
    try:
        socket.create_server((host, 0)).close()
    except OSError:
        return False
    return True


def own_address_towards(host: str) -> str:
    """Returns the address of this machine at which `host` can reach it.

    The machine's own name would be simpler, but in many containers and clusters it does not resolve, or is localhost.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing; the kernel only chooses a route
        found: str = probe.getsockname()[0]
        return found
