"""Convert samples of a cluster to views: rates from cumulative counts, shares, curves, events.

Pure: no clock, no I/O. A rate compares the latest sample with one that is some seconds older, and divides
by the time that the task itself counted between its two reports, so that late heartbeats do not distort it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, final

from stratagem._monitor.cluster_view import (
    PHASES,
    ClusterView,
    ProgramView,
    ScalarView,
    Series,
    ServerView,
    TableView,
    WorkerView,
)
from stratagem._monitor.samples import ClusterSample, TaskSample
from stratagem._snapshots import DistributionSnapshot, Event, ScalarSnapshot, Snapshot

WINDOW_S: Final = 5.0  # of rates: several heartbeats, and short enough to follow
POINTS: Final = 1200  # of a curve, 20 minutes of one a second; then neighbours are averaged
EVENTS: Final = 2000
STRAGGLER_RATE: Final = 0.6  # of the median of the other workers
STRAGGLER_STEPS: Final = 3  # of the others within the window, so that chance does not decide

_NOTHING = DistributionSnapshot()


class _Moment(NamedTuple):
    """What a sample says, by task."""

    time_s: float
    tasks: Mapping[str, TaskSample]
    program: Snapshot | None


@final
class ClusterHistory:
    """Samples of one cluster, the latest last.

    Example:
        >>> from stratagem._monitor.samples import ClusterSample, TaskSample
        >>> history = ClusterHistory()
        >>> for time_s, steps in ((0.0, 0), (2.0, 50)):
        ...     numbers = {"worker.steps": steps, "worker.session_s": time_s}
        ...     worker = TaskSample(name="worker 0", state="running", numbers=numbers)
        ...     view = history.add(ClusterSample(time_s=time_s, workers=(worker,)))
        >>> view.steps, view.steps_per_s
        (50, 25.0)
    """

    def __init__(self) -> None:
        self._window: deque[_Moment] = deque()
        self._began_s: float | None = None
        self._tasks: dict[str, TaskSample] = {}  # the latest sample of each task
        self._earlier_steps: dict[str, int] = {}  # of earlier incarnations
        self._events: dict[tuple[float, str, str], Event] = {}
        self._scalars: dict[str, _Curve] = {}
        self._tables: dict[str, tuple[int, int]] = {}  # of tasks that started again
        self._curves = _Curves()

    def add(self, sample: ClusterSample) -> ClusterView:
        """Add a sample, later than those before, and return the view of the cluster."""
        if self._began_s is None:
            self._began_s = sample.time_s
        while len(self._window) > 1 and sample.time_s - self._window[0].time_s > WINDOW_S:
            self._window.popleft()
        self._note_events(sample)
        self._note_scalars(sample)
        self._note_restarts(sample)
        tasks = {task.name: task for task in (*sample.workers, *sample.servers)}
        self._window.append(_Moment(sample.time_s, tasks, sample.program))
        for name, task in tasks.items():
            if task.answers or name not in self._tasks:
                self._tasks[name] = task
        view = self._view(sample)
        self._curves.add(sample.time_s, _points(view))
        return replace(view, series=self._curves.series())

    # -- what the samples add up to -----------------------------------------------------------

    def _view(self, sample: ClusterSample) -> ClusterView:
        workers = _mark_stragglers(
            [self._worker(task) for task in sample.workers],
            [self._steps_in_window(task) for task in sample.workers],
        )
        rates = [one.steps_per_s for one in workers if one.steps_per_s is not None]
        staleness = self._recent(sample, lambda seen: seen.distributions.get("ps.staleness"))
        running = [one.phases for one in workers if one.state == "running" and one.phases]
        assert self._began_s is not None
        return ClusterView(
            time_s=sample.time_s,
            elapsed_s=sample.time_s - self._began_s,
            steps=sum(one.steps for one in workers),
            steps_per_s=sum(rates) if rates else None,
            staleness_mean=staleness.mean if staleness.count else None,
            staleness_p99=staleness.quantile(0.99) if staleness.count else None,
            phases={phase: sum(one[phase] for one in running) / len(running) for phase in PHASES}
            if running
            else {},
            workers=workers,
            servers=tuple(self._server(task) for task in sample.servers),
            tables=self._table_views(sample),
            scalars=tuple(self._scalars[name].view() for name in sorted(self._scalars)),
            events=tuple(sorted(self._events.values(), key=lambda event: event.time_s)),
            program=self._program(sample),
        )

    def _worker(self, task: TaskSample) -> WorkerView:
        latest = task if task.answers else self._tasks.get(task.name, task)
        seconds, change = self._change(task, "worker.session_s")
        memory = task.metrics.gauges.get("process.memory_bytes")
        return WorkerView(
            name=task.name,
            state=task.state,
            steps=latest.steps + self._earlier_steps.get(task.name, 0),
            restarts=task.restarts,
            steps_per_s=_rate(change("worker.steps"), seconds),
            phases=self._phases(task, seconds, change),
            cpu_share=_rate(change("process.cpu_s"), seconds),
            starved_share=_rate(change("process.starved_s"), seconds),
            memory_bytes=None if memory is None else int(memory),
            timers=task.metrics.timers,
            staleness=task.metrics.distributions.get("ps.staleness", _NOTHING),
        )

    def _phases(
        self, task: TaskSample, seconds: float, change: Callable[[str], float | None]
    ) -> dict[str, float]:
        """Return the shares of a worker's time."""
        before = self._before(task)
        if before is None or not seconds > 0:
            return {}

        def spent(timer: str) -> float:
            seen = task.metrics.timers.get(timer, _NOTHING)
            return seen.since(before.metrics.timers.get(timer)).total

        run_s, idle_s = change("worker.run_s") or 0.0, change("worker.idle_s") or 0.0
        flush_s = change("worker.ack_s") or 0.0
        acknowledge_s = spent("ps.acknowledge")
        inside = {
            "waiting for input": spent("input.next"),
            "reading": spent("ps.read") + spent("ps.refresh"),
            "pushing": max(0.0, spent("ps.push") - acknowledge_s),
        }
        waiting_s = acknowledge_s + spent("ps.wait")
        parts = {
            **inside,
            "waiting for work": idle_s,
            "computing": max(0.0, run_s - sum(inside.values()) - waiting_s),
            "waiting for acknowledgement": waiting_s + flush_s,
            "other": max(0.0, seconds - run_s - idle_s - flush_s),
        }
        total = sum(parts.values()) or 1.0
        return {phase: parts[phase] / total for phase in PHASES}

    def _server(self, task: TaskSample) -> ServerView:
        latest = task if task.answers else self._tasks.get(task.name, task)
        seconds, change = self._change(task, "up_s")
        numbers = latest.numbers
        memory = task.numbers.get("process.memory_bytes")
        return ServerView(
            name=task.name,
            state=task.state,
            restarts=task.restarts,
            variable_bytes=int(numbers.get("bytes", 0)),
            held_bytes=int(numbers.get("held_bytes", 0)),
            limit_bytes=int(numbers.get("limit_bytes", 0)),
            updates=int(numbers.get("applied", 0)),
            updates_per_s=_rate(change("applied"), seconds),
            duplicates=int(numbers.get("duplicates", 0)),
            fenced=int(numbers.get("fenced", 0)),
            is_checkpointing=bool(task.numbers.get("checkpointing", 0)),
            busy_share=_rate(change("busy_s"), seconds),
            cpu_share=_rate(change("process.cpu_s"), seconds),
            starved_share=_rate(change("process.starved_s"), seconds),
            memory_bytes=None if memory is None else int(memory),
        )

    def _program(self, sample: ClusterSample) -> ProgramView | None:
        if sample.program is None:
            return None
        first = self._window[0]
        seconds = sample.time_s - first.time_s
        counters, before = sample.program.counters, first.program
        earlier = {} if before is None else before.counters

        def share(name: str) -> float | None:
            if name not in counters or name not in earlier:
                return None
            return _rate(max(0.0, counters[name] - earlier[name]), seconds)

        memory = sample.program.gauges.get("process.memory_bytes")
        return ProgramView(
            queued=sample.queued or 0,
            in_flight=sample.in_flight or 0,
            cpu_share=share("process.cpu_s"),
            starved_share=share("process.starved_s"),
            memory_bytes=None if memory is None else int(memory),
            counters=counters,
            timers=sample.program.timers,
            staleness=sample.program.distributions.get("ps.staleness", _NOTHING),
        )

    def _table_views(self, sample: ClusterSample) -> tuple[TableView, ...]:
        totals = {name: list(counts) for name, counts in self._tables.items()}
        recent: Counter[str] = Counter()  # rows
        for now, before in self._snapshots(sample):
            earlier = {} if before is None else _lookups(before)
            for name, (ids, rows) in _lookups(now).items():
                total = totals.setdefault(name, [0, 0])
                total[0] += ids
                total[1] += rows
                recent[name] += max(0, rows - earlier.get(name, (0, 0))[1])
        seconds = max(1.0, sample.time_s - self._window[0].time_s)
        found = [
            TableView(
                name=name,
                ids=ids,
                rows=rows,
                rows_per_s=recent[name] / seconds,
                distinct_share=rows / ids if ids else None,
            )
            for name, (ids, rows) in totals.items()
        ]
        return tuple(sorted(found, key=lambda table: (-table.rows_per_s, table.name)))

    # -- comparing samples --------------------------------------------------------------------

    def _before(self, task: TaskSample) -> TaskSample | None:
        """Return the oldest report in the window of the same incarnation of a task."""
        for moment in self._window:
            one = moment.tasks.get(task.name)
            if one is not None and one.identity == task.identity and one.numbers:
                return None if one is task else one
        return None

    def _change(self, task: TaskSample, clock: str) -> tuple[float, Callable[[str], float | None]]:
        """Return the seconds that a task counted within the window, and a function for other counts."""
        before = self._before(task) if task.answers else None

        def change(name: str) -> float | None:
            if before is None or name not in task.numbers or name not in before.numbers:
                return None
            return max(0.0, task.numbers[name] - before.numbers[name])

        return change(clock) or 0.0, change

    def _steps_in_window(self, task: TaskSample) -> float:
        return self._change(task, "worker.session_s")[1]("worker.steps") or 0.0

    def _snapshots(self, sample: ClusterSample) -> Iterable[tuple[Snapshot, Snapshot | None]]:
        """Yield the metrics of every task, now and at the beginning of the window."""
        for task in sample.workers:
            if task.answers:
                before = self._before(task)
                yield task.metrics, None if before is None else before.metrics
        if sample.program is not None:
            yield sample.program, self._window[0].program

    def _recent(
        self, sample: ClusterSample, pick: Callable[[Snapshot], DistributionSnapshot | None]
    ) -> DistributionSnapshot:
        """Return the values of a distribution that all tasks recorded within the window."""
        total = _NOTHING
        for now, before in self._snapshots(sample):
            seen = pick(now)
            if seen is not None and before is not None and before is not now:
                total = total.merged(seen.since(pick(before)))
        return total

    # -- what is kept -------------------------------------------------------------------------

    def _note_restarts(self, sample: ClusterSample) -> None:
        """Keep the counts of incarnations that have ended."""
        for task in sample.workers:
            last = self._tasks.get(task.name)
            if last is None or not task.answers or last.identity == task.identity:
                continue
            steps = self._earlier_steps.get(task.name, 0)
            self._earlier_steps[task.name] = steps + last.steps
            now = _lookups(task.metrics)
            for name, (ids, rows) in _lookups(last.metrics).items():
                if now.get(name, (0, 0))[0] < ids:  # a new process counts from zero
                    old = self._tables.get(name, (0, 0))
                    self._tables[name] = (old[0] + ids, old[1] + rows)

    def _note_events(self, sample: ClusterSample) -> None:
        found = [] if sample.program is None else list(sample.program.events)
        for task in sample.workers:
            found += [_of(task.name, event) for event in task.metrics.events]
        # The program records its lost workers itself.
        watched = sample.servers if sample.program else (*sample.workers, *sample.servers)
        before = self._window[-1].tasks if self._window else {}
        for task in watched:
            last, known = before.get(task.name), self._tasks.get(task.name)
            names = []
            if last is not None and last.answers != task.answers:
                names.append("answers again" if task.answers else "does not answer")
            both_answer = known is not None and known.answers and task.answers
            if known and both_answer and "" not in {known.identity, task.identity}:
                names += ["restarted"] if known.identity != task.identity else []
            found += [Event(time_s=sample.time_s, source=task.name, name=name) for name in names]
        for event in found:
            self._events.setdefault((event.time_s, event.source, event.name), event)
        while len(self._events) > EVENTS:
            del self._events[next(iter(self._events))]

    def _note_scalars(self, sample: ClusterSample) -> None:
        new: dict[str, ScalarSnapshot] = {}
        pairs = [(task.metrics, task.name) for task in sample.workers if task.answers]
        if sample.program is not None:
            pairs.append((sample.program, ""))
        for now, name in pairs:
            last: Snapshot | None
            if name:
                known = self._tasks.get(name)  # its last report, which may be older than a sample
                last = None if known is None else known.metrics
            else:
                last = self._window[-1].program if self._window else None
            for scalar, seen in now.scalars.items():
                change = seen.since(None if last is None else last.scalars.get(scalar))
                if change.count or change.not_finite:
                    new[scalar] = new[scalar].merged(change) if scalar in new else change
        for scalar, change in new.items():
            self._scalars.setdefault(scalar, _Curve(scalar)).add(sample.time_s, change)


class _Curve:
    """Values logged under one name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last = math.nan
        self._not_finite = 0
        self._points: list[tuple[float, float]] = []

    def add(self, time_s: float, change: ScalarSnapshot) -> None:
        self._not_finite += change.not_finite
        if change.count:
            self._last = change.last
            self._points.append((time_s, change.mean))
            if len(self._points) > POINTS:
                self._points = list(
                    zip(*map(_halved, zip(*self._points, strict=True)), strict=True)
                )

    def view(self) -> ScalarView:
        return ScalarView(
            name=self._name,
            last=self._last,
            not_finite=self._not_finite,
            points=tuple(self._points),
        )


class _Curves:
    """Columns of equal length; neighbours are averaged when there are too many points."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._columns: dict[str, list[float]] = {}
        self._generation = 0

    def add(self, time_s: float, values: Mapping[str, float]) -> None:
        for name in values:
            if name not in self._columns:
                self._columns[name] = [math.nan] * len(self._times)
        self._times.append(time_s)
        for name, column in self._columns.items():
            column.append(values.get(name, math.nan))
        if len(self._times) > POINTS:
            self._times = _halved(self._times)
            self._columns = {name: _halved(column) for name, column in self._columns.items()}
            self._generation += 1

    def series(self) -> Series:
        return Series(
            times=tuple(self._times),
            columns={name: tuple(column) for name, column in self._columns.items()},
            generation=self._generation,
        )


def _halved(values: Sequence[float]) -> list[float]:
    """Return the means of neighbours, without unknown values."""
    pairs = [values[start : start + 2] for start in range(0, len(values), 2)]
    known = [[one for one in pair if not math.isnan(one)] for pair in pairs]
    return [sum(pair) / len(pair) if pair else math.nan for pair in known]


def _rate(change: float | None, seconds: float) -> float | None:
    return None if change is None or not seconds > 0 else change / seconds


def _lookups(seen: Snapshot) -> dict[str, tuple[int, int]]:
    """Return the ids and the distinct rows that a task looked up, by table."""
    found = {}
    for name, ids in seen.counters.items():
        if name.startswith("table.ids:"):
            table = name.removeprefix("table.ids:")
            found[table] = (int(ids), int(seen.counters.get(f"table.rows:{table}", 0)))
    return found


def _mark_stragglers(
    workers: Sequence[WorkerView], steps: Sequence[float]
) -> tuple[WorkerView, ...]:
    """Mark workers that are much slower than the others and do not wait for work."""
    marked = []
    for place, worker in enumerate(workers):
        others = [
            (one.steps_per_s or 0.0, made)
            for other, (one, made) in enumerate(zip(workers, steps, strict=True))
            if other != place and one.state == "running" and one.steps_per_s is not None
        ]
        is_slow = False
        if worker.steps_per_s is not None and others and worker.state == "running":
            usual = statistics.median(rate for rate, _ in others)
            enough = statistics.median(made for _, made in others) >= STRAGGLER_STEPS
            idle = worker.phases.get("waiting for work", 0.0) > 0.5
            is_slow = enough and not idle and worker.steps_per_s < STRAGGLER_RATE * usual
        marked.append(replace(worker, is_straggler=True) if is_slow else worker)
    return tuple(marked)


def _of(task: str, event: Event) -> Event:
    """Return the event with the name of its task, which a process does not know itself."""
    return event if event.source else replace(event, source=task)


def _points(view: ClusterView) -> dict[str, float]:
    """Return the values of all curves at the time of a view."""
    found: dict[str, float | None] = {
        "steps/total": view.steps_per_s,
        "staleness/mean": view.staleness_mean,
        "staleness/p99": view.staleness_p99,
    }
    for worker in view.workers:
        found[f"steps/{worker.name}"] = worker.steps_per_s
    for server in view.servers:
        found[f"updates/{server.name}"] = server.updates_per_s
        found[f"busy/{server.name}"] = server.busy_share
    return {name: math.nan if value is None else value for name, value in found.items()}
