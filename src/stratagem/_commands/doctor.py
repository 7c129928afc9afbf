"""``stratagem doctor``: check this machine and suggest remedies."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

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


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check, with a remedy if there is a problem."""

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


# A coordinator holds a few descriptors per worker; this is enough for some hundred workers.
_OPEN_FILES_WANTED = 1024
# With less, even a small model with two servers competes with the page cache.
_MEMORY_WANTED_BYTES = 2 << 30


def examine() -> list[Finding]:
    """Run every check; a check that raises is reported as a problem.

    Example:
        >>> findings = examine()
        >>> [finding.subject for finding in findings][:2]
        ['python', 'torch']
    """
    findings: list[Finding] = []
    for check in _CHECKS:
        try:
            findings += check()
        except Exception as error:  # noqa: BLE001 - reported as a problem
            findings.append(
                Finding(
                    subject=check.__name__.lstrip("_"),
                    verdict=Verdict.BAD,
                    found=f"the check itself failed: {type(error).__name__}: {error}",
                    remedy="Report this with the output of `stratagem doctor --debug`.",
                )
            )
    return findings


def report(console: Console) -> int:
    """Print the findings as a table; return 3 if there is a problem, else 0."""
    findings = examine()
    table = Table(title="stratagem doctor")
    for column in ("check", "result", "found", "remedy"):
        table.add_column(column, overflow="fold")
    colours = {Verdict.GOOD: "green", Verdict.WARNING: "yellow", Verdict.BAD: "bold red"}
    for finding in findings:
        table.add_row(
            finding.subject,
            f"[{colours[finding.verdict]}]{finding.verdict.value}[/]",
            finding.found,
            finding.remedy,
        )
    console.print(table)
    return 3 if any(finding.verdict is Verdict.BAD for finding in findings) else 0


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding(
        subject="python",
        verdict=Verdict.GOOD if good else Verdict.BAD,
        found=version,
        remedy="" if good else "Install Python 3.11 or newer.",
    )


def _torch() -> Iterator[Finding]:
    import torch

    yield Finding(
        subject="torch",
        verdict=Verdict.GOOD,
        found=f"{torch.__version__}, {torch.get_num_threads()} threads",
    )
    yield _inside_torch()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(gpus))
    yield Finding(
        subject="devices",
        verdict=Verdict.GOOD,
        found=f"{os.cpu_count()} CPU cores, {gpus} GPUs{': ' + names if names else ''}",
    )


def _inside_torch() -> Finding:
    from stratagem._core.torch_patches import private_api

    lacking = list(private_api.missing())
    good = not lacking
    replaced = all(instead for _, _, instead in lacking)
    return Finding(
        subject="torch internals",
        verdict=Verdict.GOOD if good else Verdict.WARNING if replaced else Verdict.BAD,
        found="all required names exist"
        if good
        else "missing: " + ", ".join(f"{path} ({purpose})" for path, purpose, _ in lacking),
        remedy=""
        if good
        else "Everything works, but parts are slower."
        if replaced
        else f"Use a tested release of torch ({private_api.TRIED}), or a newer Stratagem.",
    )


def _shared_memory() -> Iterator[Finding]:
    # Parameters are stored in memfd segments, which do not count against the size of /dev/shm.
    from stratagem._wire import shm

    try:
        shm.Segment(1, 4096, writable_by_peers=False).close()
    except (AttributeError, OSError) as error:
        yield Finding(
            subject="shared memory",
            verdict=Verdict.WARNING,
            found=f"memfd is not available ({error})",
            remedy="Parameters are sent over sockets; use Linux 3.17 or newer to avoid copies.",
        )
        return
    free = _available_memory_bytes()
    good = free >= _MEMORY_WANTED_BYTES
    yield Finding(
        subject="shared memory",
        verdict=Verdict.GOOD if good else Verdict.WARNING,
        found=f"memfd works, {free / 1e9:.1f} GB of memory available",
        remedy=""
        if good
        else "Parameters and optimizer state must fit in memory: free some, or add servers.",
    )


def _row_kernels() -> Iterator[Finding]:
    from stratagem._ps.row_kernels import kernels

    yield Finding(
        subject="table kernels",
        verdict=Verdict.GOOD if kernels is not None else Verdict.WARNING,
        found="built" if kernels is not None else "not built; tables use NumPy and torch",
        remedy=""
        if kernels is not None
        else "Install a C compiler and then Stratagem again: steps on tables take about a quarter less time.",
    )


def _available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_AVPHYS_PAGES"))


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    good = soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES_WANTED
    yield Finding(
        subject="open files",
        verdict=Verdict.GOOD if good else Verdict.WARNING,
        found=f"limit {soft} (hard limit {hard})",
        remedy="" if good else f"Run `ulimit -n {_OPEN_FILES_WANTED}` before starting.",
    )


def _ports() -> Iterator[Finding]:
    from stratagem._wire.connecting import connect
    from stratagem._wire.listener import Listener
    from stratagem._wire.round_trip import answer_limit_s

    problem = ""
    try:
        with Listener("127.0.0.1:0") as listener, ThreadPoolExecutor(1) as pool:
            limit_s = answer_limit_s()  # some sandboxes drop the packets
            reached = pool.submit(connect, listener.address)
            accepted = listener.accept(timeout_s=limit_s)
            reached.result(limit_s).close()
            if accepted is not None:
                accepted.close()
    except (WireError, OSError) as error:
        problem = str(error)
    yield Finding(
        subject="ports",
        verdict=Verdict.BAD if problem else Verdict.GOOD,
        found=problem or "a loopback port can be opened and reached",
        remedy="Allow connections to 127.0.0.1 in this sandbox." if problem else "",
    )


def _clock() -> Iterator[Finding]:
    info = time.get_clock_info("monotonic")
    year = time.gmtime().tm_year
    good = info.monotonic and info.resolution <= 1e-3 and year >= 2024
    yield Finding(
        subject="clock",
        verdict=Verdict.GOOD if good else Verdict.WARNING,
        found=f"resolution {info.resolution:g} s, year {year}",
        remedy="" if good else "Set the machine's clock; deadlines and logs depend on it.",
    )


def _cluster_key() -> Iterator[Finding]:
    if config.environment("STRATAGEM_CLUSTER_KEY"):
        yield Finding(subject="cluster key", verdict=Verdict.GOOD, found="STRATAGEM_CLUSTER_KEY")
        return
    name = config.environment("STRATAGEM_CLUSTER_KEY_FILE")
    path = Path(name) if name else user_key_path()
    if not name and not path.exists():
        yield Finding(
            subject="cluster key",
            verdict=Verdict.GOOD,
            found=f"none yet: created as {path} at first use, for clusters on this machine",
            remedy="For several machines, set STRATAGEM_CLUSTER_KEY_FILE to a copy of one key on each.",
        )
        return
    if not path.is_file():
        yield Finding(
            subject="cluster key",
            verdict=Verdict.BAD,
            found=f"STRATAGEM_CLUSTER_KEY_FILE={name!r} does not exist",
            remedy="Create it: `head -c 32 /dev/urandom | base64 > FILE && chmod 600 FILE`.",
        )
        return
    try:
        config.read_key_file(path)
    except (PermissionError, ValueError) as error:
        yield Finding(
            subject="cluster key",
            verdict=Verdict.BAD,
            found=str(error),
            remedy=f"chmod 600 {path}; tasks refuse to start until then.",
        )
        return
    yield Finding(subject="cluster key", verdict=Verdict.GOOD, found=str(path))


def _compiler() -> Iterator[Finding]:
    found = shutil.which("c++") or shutil.which("g++")
    yield Finding(
        subject="compiler",
        verdict=Verdict.GOOD,
        found=found or "none: torch.compile's default backend will not work",
        remedy="" if found else "Install g++ if you use torch.compile.",
    )


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _torch,
    _shared_memory,
    _row_kernels,
    _open_files,
    _ports,
    _clock,
    _cluster_key,
    _compiler,
)
