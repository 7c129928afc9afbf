"""No write twice, none of a fenced worker: the decisions of the server, by thousands of orders."""

from orders import orders

from stratagem._ps.number_ranges import NumberRanges
from stratagem._ps.server.ledger import Admission, WriteLedger
from stratagem._ps.types import WriteId

A, D, F = Admission.APPLY, Admission.DUPLICATE, Admission.FENCED


def write(sequence, incarnation=1, closure=None, nth=0, worker="worker:0"):
    return WriteId(
        worker=worker, incarnation=incarnation, sequence=sequence, closure=closure, nth=nth
    )


def test_a_new_incarnation_counts_from_one_and_ends_the_old_one():
    """Contract 6."""
    ledger = WriteLedger()
    answers = [ledger.admit(w) for w in (write(1), write(2), write(1, 2), write(3, 1), write(2, 2))]
    assert answers == [A, A, A, F, A]


def test_a_fence_refuses_this_incarnation_and_older_ones():
    """Contract 6: the coordinator fences a lost worker before its closure runs elsewhere."""
    ledger = WriteLedger()
    ledger.fence("worker:0", 3)
    assert [ledger.admit(write(1, life)) for life in (1, 3, 4)] == [F, F, A]
    assert ledger.admit(write(1, 1, worker="worker:1")) is A


def test_a_write_of_a_closure_counts_once_across_workers():
    """Another worker that runs the closure again repeats what was applied and adds what was not."""
    ledger = WriteLedger()
    assert ledger.admit(write(1, closure=5)) is A
    assert ledger.admit(write(1, closure=5, worker="worker:1")) is D
    assert ledger.admit(write(2, closure=5, nth=1, worker="worker:1")) is A
    assert ledger.admit(write(3, closure=5, nth=5000, worker="worker:1")) is A
    assert ledger.admit(write(2, closure=5, nth=5000)) is D
    assert ledger.admit(write(3, closure=5, nth=4999)) is A


def test_late_writes_of_finished_closures_are_repetitions():
    """A worker whose connection was interrupted may deliver a write after the closure ran elsewhere."""
    ledger = WriteLedger()
    assert ledger.admit(write(1, closure=5)) is A
    ledger.finish_closures([(1, 5)])
    assert "1 unfinished closures" in repr(ledger)
    assert ledger.admit(write(2, closure=4, nth=3)) is D
    ledger.finish_closures([(1, 6)])
    assert "0 unfinished closures" in repr(ledger)
    assert ledger.admit(write(1, closure=5, worker="worker:1")) is D
    assert ledger.admit(write(2, closure=5, nth=7, worker="worker:1")) is D
    assert ledger.admit(write(3, closure=6, worker="worker:1")) is A


def test_memory_is_bounded_by_the_closures_that_run():
    """A closure that runs for hours does not make the ledger remember all that finish meanwhile."""
    ledger, finished = WriteLedger(), NumberRanges()
    ledger.admit(write(1, closure=1, worker="slow"))
    for closure in range(2, 5000):
        ledger.admit(write(closure, closure=closure))
        finished.add([closure])
        if closure % 10 == 0:
            ledger.finish_closures(finished.ranges)
            assert len(ledger._closures) == 1
            assert len(ledger._finished.ranges) == 1
    assert ledger.admit(write(2, closure=1, nth=1, worker="slow")) is A


@orders(5000, events=60)
def test_no_order_of_retries_and_deaths_applies_a_closure_twice(events):
    """Workers run exactly-once closures, die after any write, are fenced, and old writes arrive late.

    Checked against the plain truth: a set of (closure, nth) applied, and the fences given.
    """
    ledger = WriteLedger()
    applied: set[tuple[int, int]] = set()
    lives = [1, 1, 1]
    sent = [0, 0, 0]
    wire: list[WriteId] = []
    refused = repeated = 0
    while events.more:
        step = events.of(["send", "send", "again", "die"])
        worker = events.below(3)
        if step == "die":
            ledger.fence(f"worker:{worker}", lives[worker])
            lives[worker] += 1
            sent[worker] = 0
            continue
        if step == "send" or not wire:
            sent[worker] += 1
            closure, nth = events.below(6), events.below(3)
            wire.append(write(sent[worker], lives[worker], closure, nth, f"worker:{worker}"))
            message = wire[-1]
        else:
            message = events.of(wire)
        answer = ledger.admit(message)
        key = (message.closure, message.nth)
        fenced = message.incarnation < lives[int(message.worker[-1])]
        assert (answer is F) == fenced
        if answer is A:
            assert key not in applied
            applied.add(key)
        elif answer is D:
            assert key in applied, "a write is lost"
        refused += answer is F
        repeated += answer is D
    assert (ledger.applied, ledger.duplicates, ledger.fenced) == (len(applied), repeated, refused)


@orders(5000, events=60)
def test_every_write_of_a_worker_counts_once_whatever_is_repeated(events):
    """Without closures: after a broken connection what is unacknowledged comes again, in order."""
    ledger = WriteLedger()
    counted: set[tuple[str, int, int]] = set()
    lives, sent, acknowledged = [1, 1], [0, 0], [0, 0]
    while events.more:
        worker = events.below(2)
        name = f"worker:{worker}"
        step = events.of(["send", "send", "reconnect", "new life"])
        if step == "new life":
            lives[worker] += 1
            sent[worker] = acknowledged[worker] = 0
            continue
        if step == "send":
            sent[worker] += 1
            numbers = [sent[worker]]
        else:
            acknowledged[worker] += events.below(sent[worker] - acknowledged[worker] + 1)
            numbers = list(range(acknowledged[worker] + 1, sent[worker] + 1))
        for number in numbers:
            key = (name, lives[worker], number)
            assert ledger.admit(write(number, lives[worker], worker=name)) is (
                D if key in counted else A
            )
            counted.add(key)
    assert ledger.applied == len(counted)
