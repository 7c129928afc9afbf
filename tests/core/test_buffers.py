"""Buffers under several replicas: each writes its own copy; the run's end merges them (docs/same-numbers.md)."""

import pytest
import torch
from torch import nn

import stratagem as sg


@pytest.fixture
def two():
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def cut(*sizes, columns=3):
    generator = torch.Generator().manual_seed(sum(sizes))
    return [torch.randn(n, columns, generator=generator) for n in sizes]


def test_batchnorm_buffers_are_the_row_weighted_mean_of_the_replicas(two):
    """Running statistics: what each replica would have, weighted by its rows; counters: the first's."""
    with two.scope():
        norm = nn.BatchNorm1d(3)
    parts = cut(4, 2)
    wanted = []
    for part in parts:
        alone = nn.BatchNorm1d(3)
        alone(part)
        wanted.append(alone)
    two.run(norm, args=(sg.PerReplica(parts),))
    for name in ("running_mean", "running_var"):
        mean = getattr(wanted[0], name) * (4 / 6) + getattr(wanted[1], name) * (2 / 6)
        torch.testing.assert_close(getattr(norm, name), mean)
    assert norm.num_batches_tracked == 1


def test_after_a_run_all_replicas_see_the_merged_buffer(two):
    with two.scope():
        norm = nn.BatchNorm1d(3)
    two.run(norm, args=(sg.PerReplica(cut(4, 2)),))
    central = norm.running_mean.clone()
    seen = two.local_results(two.run(lambda: norm.running_mean.clone()))
    assert all(torch.equal(each, central) for each in seen)
    assert torch.equal(norm.running_mean, central)


def test_one_device_keeps_pytorchs_buffers_exactly():
    strategy = sg.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        norm = nn.BatchNorm1d(3)
    assert type(norm._buffers) is dict
    plain = nn.BatchNorm1d(3)
    (x,) = cut(5)
    strategy.run(norm, args=(x,))
    plain(x)
    for name, value in plain.state_dict().items():
        assert torch.equal(norm.state_dict()[name], value)


def test_a_replica_without_rows_has_no_say(two):
    """Its BatchNorm statistics are NaN; they must not reach anybody."""
    with two.scope():
        norm = nn.BatchNorm1d(3)
    (part,) = cut(4)
    two.run(norm, args=(sg.PerReplica([part, part[:0]]),))
    alone = nn.BatchNorm1d(3)
    alone(part)
    torch.testing.assert_close(norm.running_var, alone.running_var)
    assert not norm.running_mean.isnan().any()


def test_a_failed_run_changes_no_buffer(two):
    with two.scope():
        norm = nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in norm.state_dict().items()}

    def fail(x):
        norm(x)
        if sg.get_replica_context().replica_id_in_sync_group == 1:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        two.run(fail, args=(sg.PerReplica(cut(4, 2)),))
    for name, value in before.items():
        assert torch.equal(norm.state_dict()[name], value)
    seen = two.local_results(two.run(lambda: norm.running_mean.clone()))
    assert all(torch.equal(each, before["running_mean"]) for each in seen)
    two.run(norm, args=(sg.PerReplica(cut(4, 2)),))
    assert norm.num_batches_tracked == 1


class Counting(nn.Module):
    """Assigns its buffers instead of writing them in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("last", torch.zeros(0, 3))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.total = self.total + x.sum()
        self.last = x.detach().clone()
        return self.total


@pytest.mark.filterwarnings("ignore:Replicas wrote different values to the buffer")
def test_assigned_buffers_are_merged_like_written_ones(two):
    """Same shapes: the row-weighted mean; different shapes: that of the first replica with rows."""
    with two.scope():
        module = Counting()
    parts = cut(4, 2)
    inside = two.local_results(two.run(module, args=(sg.PerReplica(parts),)))
    torch.testing.assert_close(inside[1], parts[1].sum())
    wanted = parts[0].sum() * (4 / 6) + parts[1].sum() * (2 / 6)
    torch.testing.assert_close(module.total, wanted)
    assert torch.equal(module.last, parts[0])
    assert module.nothing is None


def test_buffers_set_outside_reach_the_replicas(two):
    """In place, by assignment, by load_state_dict and by .to()."""
    with two.scope():
        module = Counting()

    def seen():
        return [float(each) for each in two.local_results(two.run(lambda: module.total * 1))]

    assert seen() == [0.0, 0.0]
    module.total.fill_(3.0)
    assert seen() == [3.0, 3.0]
    module.total = torch.tensor(4.0)
    assert seen() == [4.0, 4.0]
    module.load_state_dict({**module.state_dict(), "total": torch.tensor(5.0)})
    assert seen() == [5.0, 5.0]
    module.double()
    found = two.run(lambda: module.total.dtype)
    assert found is torch.float64


def test_untouched_buffers_cost_nothing_at_the_end_of_a_run(two):
    """No per-step cost that grows with the number of modules when nothing changed."""
    from stratagem._core import managed

    with two.scope():
        modules = [nn.BatchNorm1d(3) for _ in range(20)]
    touched = []

    def use(x):
        modules[7](x)
        record = managed.run_record(sg._core.context.current_replica())
        touched.append((len(record.leaves), len(record.copies)))

    two.run(use, args=(sg.PerReplica(cut(4, 2)),))
    assert touched == [(2, 3), (2, 3)]


class Late(nn.Module):
    """Registers a buffer at the first call and writes it in place."""

    def forward(self, x):
        if "seen" not in self._buffers:
            self.register_buffer("seen", torch.zeros(()))
        self.seen.add_(len(x))
        return self.seen.clone()


@pytest.mark.filterwarnings("ignore:Replicas wrote different values to the buffer")
def test_a_buffer_registered_inside_run_is_each_replicas_own_at_once(two):
    """RUN-9: created once, yet the writes of this very run stay apart until its end."""
    with two.scope():
        module = Late()
    parts = sg.PerReplica(cut(4, 2))
    inside = two.local_results(two.run(module, args=(parts,)))
    assert [float(each) for each in inside] == [4.0, 2.0]
    assert float(module.seen) == pytest.approx(4 * 4 / 6 + 2 * 2 / 6)
    inside = two.local_results(two.run(module, args=(parts,)))
    assert float(inside[0] - inside[1]) == pytest.approx(2.0)


class Codebook(nn.Module):
    """Counts of codes as in vector quantisation, running statistics and a flag."""

    def __init__(self, *, combine=False, kind=torch.float32):
        super().__init__()
        self.combine = combine
        self.register_buffer("cluster_size", torch.zeros(3, dtype=kind))
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x):
        n = torch.bincount(x.argmax(1), minlength=3)
        if self.combine:
            n = sg.get_replica_context().all_reduce("sum", n)
        self.cluster_size.copy_(self.cluster_size // 2 + n)
        self.running_mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.ready.fill_(True)


@pytest.mark.parametrize(
    ("kind", "becomes"), [(torch.float32, "mean of these"), (torch.int64, "value of the first")]
)
def test_a_buffer_that_replicas_write_differently_is_named_once(two, kind, becomes):
    """A sum over rows cannot be told from a mean, so the user is told; ``running_mean`` is known to be a mean."""
    with two.scope():
        module = Codebook(kind=kind)
    parts = sg.PerReplica(cut(4, 2))
    with pytest.warns(
        UserWarning, match=rf"buffer cluster_size of shape \(3,\).*{becomes}"
    ) as seen:
        two.run(module, args=(parts,))
    assert len(seen) == 1
    for _ in range(4):
        two.run(module, args=(parts,))  # a second warning would be an error
    with two.scope():
        other = Codebook(kind=kind)
    with pytest.warns(UserWarning, match="cluster_size"):
        two.run(other, args=(parts,))


def test_a_sum_that_is_combined_first_equals_that_of_one_device(two):
    """The remedy of the warning, which is an error here."""
    with two.scope():
        module = Codebook(combine=True)
    plain, parts = Codebook(), cut(4, 2)
    for _ in range(3):
        two.run(module, args=(sg.PerReplica(parts),))
        plain(torch.cat(parts))
    assert module.cluster_size.tolist() == plain.cluster_size.tolist()
    torch.testing.assert_close(module.running_mean, plain.running_mean)
    assert module.ready
