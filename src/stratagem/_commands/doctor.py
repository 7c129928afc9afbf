"""``stratagem doctor``: check this machine and suggest remedies."""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from stratagem import config
from stratagem._wire.cluster_key import user_key_path
from stratagem.errors import WireError


class Verdict(Enum):
    """Result of a check."""

    GOOD = "ok"
    WARNING = "warning"
    BAD = "problem"


class Finding(NamedTuple):
    """Result of one check, with a remedy if there is a problem."""

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


# A coordinator holds a few descriptors per worker; this is enough for some hundred workers.
_OPEN_FILES_WANTED = 1024
# With less, even a small model with two servers competes with the page cache.
_MEMORY_WANTED_BYTES = 2 << 30


def run(_options: argparse.Namespace) -> int:
    """Print the findings as a table; return 3 if there is a problem, else 0."""
    return report(Console())


def examine() -> list[Finding]:
    """Run every check; a check that raises is reported as a problem.

    Example:
        >>> findings = examine()
        >>> [finding.subject for finding in findings][:2]
        ['torch', 'torch internals']
    """
    findings: list[Finding] = []
    for check in _CHECKS:
        try:
            findings.append(check())
        except Exception as error:  # noqa: BLE001 - reported as a problem
            subject = check.__name__.lstrip("_").replace("_", " ")
            found = f"the check itself failed: {type(error).__name__}: {error}"
            remedy = "Report this with the output of `stratagem doctor --debug`."
            findings.append(Finding(subject, Verdict.BAD, found, remedy))
    return findings


def report(console: Console) -> int:
    """Print the findings; return the exit code."""
    findings = examine()
    table = Table(title="stratagem doctor")
    for column in ("check", "result", "found", "remedy"):
        table.add_column(column, overflow="fold")
    colours = {Verdict.GOOD: "green", Verdict.WARNING: "yellow", Verdict.BAD: "bold red"}
    for subject, verdict, found, remedy in findings:
        table.add_row(subject, f"[{colours[verdict]}]{verdict.value}[/]", found, remedy)
    console.print(table)
    return 3 if any(finding.verdict is Verdict.BAD for finding in findings) else 0


def _torch() -> Finding:
    import torch

    found = f"{torch.__version__}, {torch.get_num_threads()} threads"
    return Finding("torch", Verdict.GOOD, found)


def _torch_internals() -> Finding:
    from stratagem._core.torch_patches import private_api

    lacking = list(private_api.missing())
    if not lacking:
        return Finding("torch internals", Verdict.GOOD, "all required names exist")
    found = "missing: " + ", ".join(f"{path} ({purpose})" for path, purpose, _ in lacking)
    if all(instead for _, _, instead in lacking):
        remedy = "Everything works, but parts are slower."
        return Finding("torch internals", Verdict.WARNING, found, remedy)
    remedy = f"Use a tested release of torch ({private_api.TRIED}), or a newer Stratagem."
    return Finding("torch internals", Verdict.BAD, found, remedy)


def _devices() -> Finding:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(gpus))
    found = f"{os.cpu_count()} CPU cores, {gpus} GPUs{': ' + names if names else ''}"
    return Finding("devices", Verdict.GOOD, found)


def _shared_memory() -> Finding:
    # Parameters are stored in memfd segments, which do not count against the size of /dev/shm.
    from stratagem._wire import shm

    try:
        shm.Segment(1, 4096, writable_by_peers=False).close()
    except (AttributeError, OSError) as error:
        remedy = "Parameters are sent over sockets; use Linux 3.17 or newer to avoid copies."
        found = f"memfd is not available ({error})"
        return Finding("shared memory", Verdict.WARNING, found, remedy)
    free = _available_memory_bytes()
    found = f"memfd works, {free / 1e9:.1f} GB of memory available"
    if free >= _MEMORY_WANTED_BYTES:
        return Finding("shared memory", Verdict.GOOD, found)
    remedy = "Parameters and optimizer state must fit in memory: free some, or add servers."
    return Finding("shared memory", Verdict.WARNING, found, remedy)


def _available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_AVPHYS_PAGES"))


def _table_kernels() -> Finding:
    from stratagem._ps.row_kernels import kernels

    if kernels is not None:
        return Finding("table kernels", Verdict.GOOD, "built")
    return Finding(
        "table kernels",
        Verdict.WARNING,
        "not built; tables use torch",
        "Install a C compiler and then Stratagem again: steps on tables take about a quarter less time.",
    )


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"limit {soft} (hard limit {hard})"
    if soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES_WANTED:
        return Finding("open files", Verdict.GOOD, found)
    remedy = f"Run `ulimit -n {_OPEN_FILES_WANTED}` before starting."
    return Finding("open files", Verdict.WARNING, found, remedy)


def _ports() -> Finding:
    from stratagem._wire.connecting import connect
    from stratagem._wire.listener import Listener
    from stratagem._wire.round_trip import answer_limit_s

    try:
        with Listener("127.0.0.1:0") as listener, ThreadPoolExecutor(1) as pool:
            limit_s = answer_limit_s()  # some sandboxes drop the packets
            reached = pool.submit(connect, listener.address)
            accepted = listener.accept(timeout_s=limit_s)
            reached.result(limit_s).close()
            if accepted is not None:
                accepted.close()
    except (WireError, OSError) as error:
        remedy = "Allow connections to 127.0.0.1 in this sandbox."
        return Finding("ports", Verdict.BAD, str(error), remedy)
    return Finding("ports", Verdict.GOOD, "a loopback port can be opened and reached")


def _clock() -> Finding:
    info, year = time.get_clock_info("monotonic"), time.gmtime().tm_year
    found = f"resolution {info.resolution:g} s, year {year}"
    if info.monotonic and info.resolution <= 1e-3 and year >= 2024:
        return Finding("clock", Verdict.GOOD, found)
    remedy = "Set the machine's clock; deadlines and logs depend on it."
    return Finding("clock", Verdict.WARNING, found, remedy)


def _cluster_key() -> Finding:
    subject = "cluster key"
    if config.environment("STRATAGEM_CLUSTER_KEY"):
        return Finding(subject, Verdict.GOOD, "STRATAGEM_CLUSTER_KEY")
    name = config.environment("STRATAGEM_CLUSTER_KEY_FILE")
    path = Path(name) if name else user_key_path()
    if not name and not path.exists():
        found = f"none yet: created as {path} at first use, for clusters on this machine"
        remedy = (
            "For several machines, set STRATAGEM_CLUSTER_KEY_FILE to a copy of one key on each."
        )
        return Finding(subject, Verdict.GOOD, found, remedy)
    if not path.is_file():
        found = f"STRATAGEM_CLUSTER_KEY_FILE={name!r} does not exist"
        remedy = "Create it: `head -c 32 /dev/urandom | base64 > FILE && chmod 600 FILE`."
        return Finding(subject, Verdict.BAD, found, remedy)
    try:
        config.read_key_file(path)
    except (PermissionError, ValueError) as error:
        remedy = f"chmod 600 {path}; tasks refuse to start until then."
        return Finding(subject, Verdict.BAD, str(error), remedy)
    return Finding(subject, Verdict.GOOD, str(path))


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _torch,
    _torch_internals,
    _devices,
    _shared_memory,
    _table_kernels,
    _open_files,
    _ports,
    _clock,
    _cluster_key,
)
