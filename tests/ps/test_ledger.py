"""No write twice, none of a fenced worker: the decisions of the server, by thousands of orders."""

from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem._ps.ledger import Admission, WriteId, WriteLedger

A, D, F = Admission.APPLY, Admission.DUPLICATE, Admission.FENCED


def write(sequence, incarnation=1, closure=None, nth=0, worker="worker:0"):
    return WriteId(
        worker=worker, incarnation=incarnation, sequence=sequence, closure=closure, nth=nth
    )


def test_a_new_life_starts_counting_again_and_ends_the_old_one():
    """Contract 6."""
    ledger = WriteLedger()
    answers = [ledger.admit(w) for w in (write(1), write(2), write(1, 2), write(3, 1), write(2, 2))]
    assert answers == [A, A, A, F, A]


def test_fence_refuses_this_life_and_older_ones_only():
    """Contract 6: the coordinator fences a lost worker before its closure runs elsewhere."""
    ledger = WriteLedger()
    ledger.fence("worker:0", 3)
    assert [ledger.admit(write(1, life)) for life in (1, 3, 4)] == [F, F, A]
    assert ledger.admit(write(1, 1, worker="worker:1")) is A


def test_exactly_once_closure_counts_once_across_workers_until_forgotten():
    """The closure's own number of a write is recognised on another worker."""
    ledger = WriteLedger()
    assert ledger.admit(write(1, closure=5)) is A
    assert ledger.admit(write(1, closure=5, worker="worker:1")) is D
    assert ledger.admit(write(2, closure=5, nth=1, worker="worker:1")) is A
    ledger.forget_closures([4])
    assert ledger.admit(write(3, closure=5, worker="worker:1")) is D
    ledger.forget_closures([4, 5])
    assert "0 closures remembered" in repr(ledger)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_order_of_retries_and_deaths_applies_a_closure_twice(data):
    """Workers run exactly-once closures, die after any write, are fenced, and old writes arrive late.

    Checked against the plain truth: a set of (closure, nth) applied, and the fences given.
    """
    ledger = WriteLedger()
    applied: set[tuple[int, int]] = set()
    fenced: dict[int, int] = {}
    life = {0: 1, 1: 1, 2: 1}
    sent = {0: 0, 1: 0, 2: 0}
    wire: list[WriteId] = []
    for _ in range(data.draw(st.integers(1, 60))):
        worker = data.draw(st.integers(0, 2))
        step = data.draw(st.sampled_from(["send", "send", "again", "die"]))
        if step == "die":
            ledger.fence(f"worker:{worker}", life[worker])
            fenced[worker] = life[worker]
            life[worker] += 1
            sent[worker] = 0
            continue
        if step == "send" or not wire:
            sent[worker] += 1
            message = write(
                sent[worker],
                life[worker],
                data.draw(st.integers(0, 5)),
                data.draw(st.integers(0, 2)),
                f"worker:{worker}",
            )
            wire.append(message)
        else:
            message = data.draw(st.sampled_from(wire))
        answer = ledger.admit(message)
        number = int(message.worker[-1])
        if message.incarnation <= fenced.get(number, 0):
            assert answer is F
        if answer is A:
            key = (message.closure, message.nth)
            assert key not in applied
            applied.add(key)
    assert ledger.applied == len(applied)
