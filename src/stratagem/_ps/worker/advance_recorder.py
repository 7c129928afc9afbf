"""Record a closure's changes of schedulers, gradient scalers and optimizer settings.

The worker's own object changes at once, as in plain PyTorch. The report of the closure tells the coordinator, which makes
the same change once (`training_state.py`). A closure that fails changes nothing: its objects get their earlier state.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from stratagem._core.context import current_replica
from stratagem._core.counters import CounterSlot, StepCounter, is_counter
from stratagem._core.torch_patches.private_api import refresh_scaler_state, set_stages
from stratagem._ps.definitions import COUNTER, Token
from stratagem._ps.training_state import (
    Advance,
    CounterMoved,
    ScalerUpdate,
    SchedulerStep,
    SettingWritten,
    Stateful,
    StateSnapshot,
    as_number,
    load_state,
    make_advance,
    state_of,
)


class WatchedGroup(dict[str, Any]):
    """A parameter group that notes which settings a function reads."""

    __slots__ = ("read",)

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.read: set[str] = set()

    @override
    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return dict.__getitem__(self, name)

    @override
    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return dict.get(self, name, default)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class AdvanceRecorder:
    """Recorder of one worker session; used by one thread at a time."""

    def __init__(self) -> None:
        self._objects: dict[Token, Stateful] = {}
        self._tokens: dict[int, Token] = {}
        self._optimizers: dict[Token, Optimizer] = {}
        self._counters: dict[Token, StepCounter] = {}
        self._settings: dict[Token, Any] = {}  # of optimizers, when they were last looked at
        self._before: dict[Token, Any] = {}  # states to return to if the closure fails
        self._made: list[Advance] = []
        self._is_recording = True  # not while an advance runs
        self._reports = 0
        self._unsent: deque[tuple[int, list[Advance]]] = deque()  # not yet in a snapshot
        self._last: tuple[int, list[Advance]] | None = None

    # -------------------------------------------------------------- objects

    def add(self, token: Token, obj: Stateful, *, watch_reads: bool = False) -> None:
        """Record the advances of an object from now on."""
        self._objects[token] = obj
        self._tokens[id(obj)] = token
        if isinstance(obj, Optimizer):
            self._optimizers[token] = obj
            if watch_reads:
                obj.param_groups[:] = map(WatchedGroup, obj.param_groups)
        else:
            obj.__class__ = recorded_class(type(obj), self)

    def add_wrapper(self, wrapper: Optimizer, inner: Optimizer) -> None:
        """Record what schedulers of a wrapper do as changes of the optimizer inside, which has the same groups."""
        self._tokens[id(wrapper)] = self._tokens[id(inner)]

    def forget(self, token: Token, gone: object) -> None:
        """Release an object."""
        self._objects.pop(token, None)
        self._tokens.pop(id(gone), None)
        self._optimizers.pop(token, None)

    def load(self, snapshot: StateSnapshot) -> None:
        """Take the coordinator's state over, and make those of the own advances that it lacks."""
        while self._unsent and self._unsent[0][0] <= snapshot.reported:
            self._unsent.popleft()
        self._is_recording = False
        try:
            for token, state in snapshot.states.items():
                if token[0] == COUNTER:
                    self._counters.setdefault(token, StepCounter()).set(state)
                elif token in self._objects:
                    load_state(self._objects[token], state)
            for _, made in self._unsent:
                for one in made:
                    if one.token in self._objects or one.token in self._counters:
                        if isinstance(one, SettingWritten):
                            one = one._replace(was_read=False)
                        make_advance(self._find(one.token), one)
        finally:
            self._is_recording = True

    def _find(self, token: Token) -> Stateful:
        return self._counters[token] if token[0] == COUNTER else self._objects[token]

    # -------------------------------------------------------------- closures

    def begin(self) -> None:
        """Begin a closure."""
        self._last = None
        for token, optimizer in self._optimizers.items():
            self._settings[token] = state_of(optimizer)
            _forget_reads(optimizer)

    def end(self, *, succeeded: bool) -> None:
        """End the closure: keep its advances for the report, or undo them."""
        for token in self._optimizers:
            self._note_settings(token)
        made, self._made = self._made, []
        before, self._before = self._before, {}
        if succeeded and made:
            self._reports += 1
            self._last = self._reports, made
            self._unsent.append(self._last)
        elif not succeeded:
            for token, state in before.items():
                load_state(self._find(token), state)
            for obj in self._objects.values():
                if isinstance(obj, GradScaler):
                    set_stages(obj, defaultdict(refresh_scaler_state))

    def last(self) -> tuple[int, list[Advance]] | None:
        """Return number and advances of the closure that ended last, None if it made none."""
        return self._last

    def step_scheduler(
        self, scheduler: LRScheduler, step: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Step a scheduler and record it."""
        if not self._is_recording:
            return step(*args, **kwargs)
        optimizer = self._tokens.get(id(getattr(scheduler, "optimizer", None)))
        if optimizer is not None:
            self._note_settings(optimizer)  # what the function set before
            self._save(optimizer)
        token = self._tokens[id(scheduler)]
        self._save(token)
        self._is_recording = False
        try:
            result = step(*args, **kwargs)
        finally:
            self._is_recording = True
        plain = tuple(map(as_number, args)), {name: as_number(one) for name, one in kwargs.items()}
        self._made.append(SchedulerStep(token, *plain))
        if optimizer is not None:
            self._settings[optimizer] = state_of(self._optimizers[optimizer])
            _forget_reads(self._optimizers[optimizer])
        return result

    def update_scaler(self, scaler: GradScaler, update: Callable[..., None], new: Any) -> None:
        """Update a scaler and record it, once for all replicas of this worker."""
        replica = current_replica()
        if not self._is_recording or (replica is not None and replica.id != 0):
            update(new)
            return
        token = self._tokens[id(scaler)]
        self._save(token)
        before = scaler.state_dict()
        update(new)
        after = scaler.state_dict()
        steps, interval = after["_growth_tracker"], before["growth_interval"]
        overflowed = after["scale"] < before["scale"] or (
            steps == 0 and before["_growth_tracker"] + 1 != interval
        )
        number = None if new is None else float(new)
        self._made.append(ScalerUpdate(token, bool(overflowed), number))

    def run_counted(
        self, function: Callable[..., Any], slots: Sequence[tuple[int, CounterSlot]], call: Any
    ) -> Any:
        """Call a function with the present values of its counters, and record how far they move."""
        for number, slot in slots:
            slot.set(self._counters[COUNTER, number].get())
        args, kwargs = call
        try:
            return function(*args, **kwargs)
        finally:
            for number, slot in slots:
                token, now = (COUNTER, number), slot.get()
                counter = self._counters[token]
                if is_counter(now) and now != counter.get():
                    self._save(token)
                    self._made.append(CounterMoved(token, now - counter.get()))
                    counter.set(now)

    def _save(self, token: Token) -> None:
        if token not in self._before:
            self._before[token] = state_of(self._find(token))

    def _note_settings(self, token: Token) -> None:
        """Record the settings of an optimizer that differ from those that it had."""
        optimizer, known = self._optimizers[token], self._settings[token]
        now = state_of(optimizer)
        if now == known:
            return
        self._before.setdefault(token, known)
        for number, (old, new) in enumerate(zip(known, now, strict=False)):
            read = getattr(optimizer.param_groups[number], "read", ())
            self._made += [
                SettingWritten(token, number, name, old.get(name), value, name in read)
                for name, value in new.items()
                if name not in old or old[name] != value
            ]
        self._settings[token] = now

    @override
    def __repr__(self) -> str:
        return f"<AdvanceRecorder of {len(self._objects)} objects, {self._reports} reports>"


def _forget_reads(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if isinstance(group, WatchedGroup):
            group.read.clear()


def recorded_class(kind: type[Any], recorder: AdvanceRecorder) -> type[Any]:
    """Return a subclass of a scheduler's or scaler's class whose ``step`` or ``update`` is recorded."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return recorder.step_scheduler(self, super(made, self).step, args, kwargs)

    def update(self: Any, new_scale: float | Tensor | None = None) -> None:
        recorder.update_scaler(self, super(made, self).update, new_scale)

    method = {"step": step} if issubclass(kind, LRScheduler) else {"update": update}
    made: Any = type(kind.__name__, (kind,), {**method, "__module__": kind.__module__})
    return made  # type: ignore[no-any-return]
