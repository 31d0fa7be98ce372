"""`zeroaccel doctor` and `zeroaccel env`: the features of this machine, their speed, and remedies.

`doctor` tries every feature instead of guessing from versions, measures speeds, and leaves nothing on the machine.
`env` prints versions and the settings in force, for bug reports.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

import zeroaccel
from zeroaccel.config.launch.launch_file import find_launch_file, read_launch_file
from zeroaccel.config.launch.launch_sources import check_variables
from zeroaccel.errors import ConfigError

from .machine import TRIED, Machine, folder_trouble, is_known_host, look, measure_disk, untried_versions, version
from .verify import run_job

if TYPE_CHECKING:
    import torch

Verdict = Literal["works", "falls back", "missing", "BROKEN"]

_COPY_NBYTES = 1 << 28
_LOCKED_NBYTES = 1 << 26
_JOB_SECONDS = 120.0
_GIGA = 1e9


@dataclass(frozen=True)
class Finding:
    """The state of one feature.

    Attributes:
        verdict: BROKEN if it fails although the user asked for it or training needs it.
        detail: the measurement, or the replacement in use.
        fix: one line with a remedy; empty if there is nothing to do.
    """

    feature: str
    verdict: Verdict
    detail: str = ""
    fix: str = ""


def findings(environ: Mapping[str, str], folder: Path, *, measure: bool) -> Iterator[Finding]:
    """Checks one feature after the other.

    Args:
        folder: working folder, for the launch file.
        measure: also measure copies, disks and communication between processes, which takes seconds.
    """
    machine = look(environ)
    yield from _accelerators(machine)
    if machine.devices:
        yield from _device_settings(environ)
    yield _versions()
    yield _kernels()
    yield from _libraries()
    yield _names()
    yield _variables(environ)
    yield _launch_file(environ, folder)
    if measure:
        yield from _copies()
        yield _collectives(environ, len(machine.devices))
    yield from _disks(machine, measure=measure)


def _accelerators(machine: Machine) -> Iterator[Finding]:
    import torch

    from zeroaccel.comm.rank_device import old_driver
    from zeroaccel.ops.cupy_kernels import installed_cupy

    if not machine.devices:
        built = "" if torch.version.cuda else ", and this torch is built without CUDA"
        missing = "install a torch with CUDA to use the GPU of this machine" if Path("/dev/nvidiactl").exists() else ""
        yield Finding(
            "accelerators", "falls back", f"none is visible{built}; processes run on the CPU", old_driver() or missing
        )
        yield Finding("bf16", "works", "on the CPU, in software if it has no bf16 instructions")
        if cupy := installed_cupy():
            detail = f"{', '.join(cupy)} is installed, but there is no device to use it on; the CPU has other kernels"
            yield Finding("device kernels", "falls back", detail)
        return
    yield Finding("accelerators", "works", f"{len(machine.devices)} x {machine.devices[0].name}")
    if all(device.has_bf16 for device in machine.devices):
        yield Finding("bf16", "works")
    else:
        yield Finding("bf16", "falls back", "the devices have no native bf16", "train with --mixed_precision fp16")
    import torch.distributed as dist

    from zeroaccel.offload.page_locked import lock_limit, lock_trouble

    if dist.is_nccl_available():
        yield Finding("NCCL", "works", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield Finding("NCCL", "BROKEN", "this torch has no NCCL", "install a torch with CUDA from pytorch.org")
    limit = f"`ulimit -l` is {lock_limit()}"
    if trouble := lock_trouble(_LOCKED_NBYTES):
        fix = "raise `ulimit -l` or the container's memory; otherwise the copies of offload block the host"
        yield Finding("page-locked memory", "falls back", f"{trouble}; {limit}", fix)
    else:
        yield Finding("page-locked memory", "works", limit)
    yield _device_kernels()


def _device_kernels() -> Finding:
    import torch

    from zeroaccel.ops.cupy_kernels import KernelError, installed_cupy, open_cupy
    from zeroaccel.ops.device_kernels import compile_kernels

    begun, device = time.perf_counter(), torch.device("cuda", 0)
    try:
        compile_kernels(device)
        found = _adam_on(device)
    except KernelError as error:
        detail = f"torch operations replace them, with several times the memory traffic: {error.reason}"
        return Finding("device kernels", "falls back", detail, error.fix)
    detail = (
        f"by CuPy {open_cupy().__version__}, in {time.perf_counter() - begun:.1f} s; an AdamW step has the host's bits"
    )
    if not torch.equal(found, _adam_on(torch.device("cpu"))):
        detail, fix = "an AdamW step has other bits than on the host", f"pip uninstall {' '.join(installed_cupy())}"
        return Finding("device kernels", "BROKEN", detail, f"{fix}; torch operations then replace the kernels")
    return Finding("device kernels", "works", detail)


def _adam_on(device: torch.device) -> torch.Tensor:
    """Returns 4,096 parameters, in host memory, after two steps of AdamW on a device."""
    import torch

    from zeroaccel.ops.elementwise import Adam

    param = torch.linspace(-1, 1, 4096).to(device)
    optimizer = Adam([param], lr=0.1, weight_decay=0.1)
    for scale in (1.0, -3.0):
        param.grad = torch.linspace(2, -1, 4096).to(device) * scale
        optimizer.step()
    return param.cpu()


def _device_settings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks variables that change the use of a device's memory and streams."""
    settings = ",".join(environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if "expandable_segments:true" in settings.lower().replace(" ", ""):
        yield Finding("device memory", "works", "the allocator uses expandable segments")
    else:
        detail = "the allocator uses segments of fixed size, in which units of different sizes leave gaps"
        fix = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or add this to the existing value"
        yield Finding("device memory", "falls back", detail, fix)
    if environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        detail = "with CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one queue, so gathers wait for computation"
        yield Finding("streams", "falls back", detail, "unset CUDA_DEVICE_MAX_CONNECTIONS")


def _kernels() -> Finding:
    import torch

    from zeroaccel.ops.elementwise import Adam

    param = torch.nn.Parameter(torch.ones(1 << 20))
    optimizer = Adam([param], lr=0.1)
    try:
        for _ in range(2):  # the first run may have to load the compiled kernel
            start = time.perf_counter()
            param.grad = torch.ones_like(param)
            optimizer.step()
            seconds = time.perf_counter() - start
    except Exception as error:
        fix = "pip install --force-reinstall numba"
        return Finding("native optimizer", "BROKEN", f"{type(error).__name__}: {error}", fix)
    return Finding("native optimizer", "works", f"AdamW updates {param.numel() / seconds / 1e6:,.0f} M weights/s here")


def _libraries() -> Iterator[Finding]:
    if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"):
        yield Finding("torch.compile", "works", "there is a C++ compiler")
    else:
        detail = "there is no C++ compiler, so models run uncompiled; nothing else needs one"
        yield Finding("torch.compile", "falls back", detail, "install g++")
    for feature, package, extra in (
        ("Hugging Face models", "transformers", "hf"),
        ("accelerate's scripts", "accelerate", "hf"),
        ("TensorBoard", "tensorboard", "track"),
        ("charts as .png", "matplotlib", "plot"),
    ):
        if find_spec(package) is None:
            yield Finding(feature, "missing", f"{package} is not installed", f"pip install 'zeroaccel[{extra}]'")
        else:
            yield Finding(feature, "works")
    if shutil.which("ssh"):
        yield Finding("hostfiles", "works", "by ssh")
    else:
        fix = "install an ssh client, or run `zeroaccel launch` on each machine"
        yield Finding("hostfiles", "missing", "ssh is not installed", fix)


def _versions() -> Finding:
    untried = [*untried_versions()]
    lines = "; ".join(line for line, _ in untried)
    if any(is_too_old for _, is_too_old in untried):
        return Finding("versions", "BROKEN", lines, "install them in a new environment")
    if untried:
        return Finding("versions", "works", lines)
    return Finding("versions", "works", ", ".join(f"{name} {version(name)}" for name in TRIED if version(name)))


def _names() -> Finding:
    name = socket.gethostname()
    if is_known_host(name):
        return Finding("own host name", "works", name)
    fix = f"add '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME to the network interface"
    return Finding("own host name", "falls back", f"{name} does not resolve, so gloo uses the loopback interface", fix)


def _variables(environ: Mapping[str, str]) -> Finding:
    try:
        check_variables(environ)
    except ConfigError as error:
        return Finding("environment", "BROKEN", str(error).replace("\n", " "), "unset it, or correct its name")
    return Finding("environment", "works", "every variable that begins with ZEROACCEL_ is a setting")


def _launch_file(environ: Mapping[str, str], folder: Path) -> Finding:
    source = find_launch_file(None, environ, folder)
    if source is None:
        return Finding("launch file", "missing", "launches use flags and defaults", "zeroaccel config")
    try:
        read_launch_file(*source).effective().settings()
    except ConfigError as error:
        fix = f"zeroaccel config validate {source[0]}"
        return Finding("launch file", "BROKEN", str(error).replace("\n", " "), fix)
    return Finding("launch file", "works", f"{source[0]} ({source[1]})")


def _copies() -> Iterator[Finding]:
    import torch

    source = torch.ones(_COPY_NBYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    yield Finding("copies in memory", "works", f"{_best(lambda: target.copy_(source)):.1f} GB/s")
    if not torch.cuda.is_available():
        return
    pinned, device = source.pin_memory(), source.to("cuda")

    def synchronous(copy: object) -> None:
        torch.cuda.synchronize()

    up = _best(lambda: synchronous(device.copy_(pinned, non_blocking=True)))
    down = _best(lambda: synchronous(pinned.copy_(device, non_blocking=True)))
    yield Finding("copies to the device", "works", f"{up:.1f} GB/s to it, {down:.1f} GB/s from it, pinned")


def _best(copy: object, rounds: int = 4) -> float:
    assert callable(copy), "a copy is something to call"
    best = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        copy()
        best = max(best, _COPY_NBYTES / (time.perf_counter() - start))
    return best / _GIGA


def _collectives(environ: Mapping[str, str], devices: int) -> Finding:
    flags = ["--num_processes", str(devices if devices > 1 else 2), *([] if devices > 1 else ["--cpu"])]
    lines, trouble = run_job([*flags, "--module", "zeroaccel.cli.smoke", "speeds"], environ, _JOB_SECONDS)
    feature = f"{devices if devices > 1 else 2} ranks that communicate"
    if trouble or not lines:
        detail = trouble.splitlines()[-1] if trouble else "they printed no result"
        return Finding(feature, "BROKEN", detail, "run `zeroaccel test` to see the full message")
    gather, reduce = lines[0]["all_gather"] / _GIGA, lines[0]["reduce_scatter"] / _GIGA
    by = "NCCL" if devices > 1 else "gloo"
    return Finding(
        feature, "works", f"by {by}, all-gather {gather:.1f} GB/s, reduce-scatter {reduce:.1f} GB/s per rank"
    )


def _disks(machine: Machine, *, measure: bool) -> Iterator[Finding]:
    for disk in machine.disks:
        seen = measure_disk(disk) if measure else disk
        detail = f"{disk.file_system}, {disk.free_nbytes / _GIGA:.0f} GB free"
        if seen.write is not None and seen.read is not None:
            detail += f", {seen.write / _GIGA:.1f} GB/s write, {seen.read / _GIGA:.1f} GB/s read"
        yield Finding(f"offload to {disk.folder}", "works", detail)
    if not machine.disks:
        detail = "there is no writable local disk with enough space"
        yield Finding("offload to disk", "missing", detail, "name a folder on a local disk as nvme_path")
    for folder in ("/dev/shm", "/tmp"):
        if Path(folder).is_dir() and (trouble := folder_trouble(folder)):
            seen_there, _, fix = trouble.partition("; ")
            yield Finding(f"offload to {folder}", "missing", seen_there, fix)


_COLOURS = {"works": "green", "falls back": "yellow", "missing": "yellow", "BROKEN": "red"}


@click.command()
@click.option("--quick", is_flag=True, help="Skip the measurements of copies, disks and communication.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(quick: bool, as_json: bool) -> int:
    """Try each feature that zeroaccel uses on this machine, measure it, and print remedies.

    Exits with 1 if a feature is BROKEN, that is, needed but not working. Missing features and fallbacks are no failure.

    \b
    Examples:
      zeroaccel doctor
      zeroaccel doctor --quick --json
    """
    seen = []
    for finding in findings(os.environ, Path.cwd(), measure=not quick):
        seen.append(finding)
        if not as_json:
            _show(finding)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in seen], indent=2))
    return int(any(finding.verdict == "BROKEN" for finding in seen))


def _show(finding: Finding) -> None:
    # click removes colours if the output cannot show them, but does not read NO_COLOR
    verdict = f"{finding.verdict:<10}"
    if not os.environ.get("NO_COLOR"):
        verdict = click.style(verdict, fg=_COLOURS[finding.verdict])
    click.echo(f"{finding.feature:<24} {verdict} {finding.detail}".rstrip())
    if finding.fix:
        click.echo(f"{'':<24} {'':<10} -> {finding.fix}")


_PACKAGES = (
    *("torch", "numba", "numpy", "cupy-cuda12x", "cupy-cuda13x", "pydantic", "safetensors"),
    *("transformers", "accelerate", "peft", "trl"),
)
_SETTINGS = ("ZEROACCEL_", "ACCELERATE_", "NCCL_", "GLOO_", "OMP_", "CUDA_", "TORCH_", "PYTORCH_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env(as_json: bool) -> None:
    """Print versions of dependencies, the machine's hardware and the settings in force.

    \b
    Examples:
      zeroaccel env
      zeroaccel env --json
    """
    facts = {
        "zeroaccel": zeroaccel.__version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        **{name: found for name in _PACKAGES if (found := version(name))},
    }
    for heading, content in look(os.environ).lines():
        if heading != "torch":
            facts[heading] = f"{facts[heading]}; {content}" if heading in facts else content
    source = find_launch_file(None, os.environ, Path.cwd())
    facts["launch file"] = "none" if source is None else f"{source[0]} ({source[1]})"
    if source is not None and not source[0].is_file():
        facts["launch file"] += ", which is not a file"
    facts |= {
        name: "(set)" if any(word in name for word in _SECRET) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(_SETTINGS)
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name:<{width}}  {value}")
