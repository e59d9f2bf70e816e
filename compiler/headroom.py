"""How much more memory this process may take before something kills it."""

from __future__ import annotations

from pathlib import Path

import torch

_SHARE = 0.8  # of the headroom: what is planned above it is not tried
_CGROUPS = Path("/sys/fs/cgroup")


def fits(more_bytes: int, device: str) -> bool:
    """Whether `more_bytes` above what is held now can be taken on the device with room to spare."""
    return more_bytes <= _SHARE * headroom_bytes(device)


def headroom_bytes(device: str) -> int:
    """Bytes the device could still hand out; for the CPU the least of what the system has available and what the
    process's control groups and address-space limit leave. A lot where none of it can be told."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min([2**62, *_system(), *_control_groups(), *_address_space()])


def _system() -> list[int]:
    line = next((line for line in _lines(Path("/proc/meminfo")) if line.startswith("MemAvailable:")), None)
    return [] if line is None else [1024 * int(line.split()[1])]


def _control_groups() -> list[int]:
    """What every control group above this process leaves; files kept in memory count as free."""
    left = []
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = _CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = root / path.lstrip("/")
        for folder in (here, *here.parents):
            limit, used = (next(iter(_lines(folder / name)), "") for name in names[:2])
            if limit.isdigit() and used.isdigit():
                stat = dict(line.split()[:2] for line in _lines(folder / "memory.stat"))
                left.append(max(0, int(limit) - int(used) + int(stat.get(names[2], 0))))
            if folder == root:
                break
    return left


def _address_space() -> list[int]:
    try:
        import resource
    except ImportError:
        return []
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    line = next((line for line in _lines(Path("/proc/self/status")) if line.startswith("VmSize:")), "VmSize: 0")
    return [max(0, limit - 1024 * int(line.split()[1]))]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
