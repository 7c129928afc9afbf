"""Initial values of tables that a checkpoint is restored into: servers compute them only if the restore fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem._checkpoint.directory import load
from stratagem._ps.blocks.block_reader import BlockReader, RowsWanted
from stratagem._ps.coordinator.kept_tensor import Kept
from stratagem._ps.init_ops import AT_FIRST_USE, initialise
from stratagem._ps.server import checkpoint_parts, stored_variable
from stratagem._ps.server.checkpoint_parts import CheckpointAccess, SessionCheckpoints
from stratagem._ps.server.store import VariableStore
from stratagem._ps.server.store_state import exported
from stratagem._ps.types import InitOp
from stratagem._wire import messages
from stratagem.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch

ROWS = 1000


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[InitOp]:
    """The initialisations that servers in this process have run."""
    monkeypatch.setenv("STRATAGEM_REMOTE_TABLE_BYTES", "1024")
    found: list[InitOp] = []

    def noted(tensor: Tensor, operation: InitOp) -> None:
        found.append(operation)
        initialise(tensor, operation)

    monkeypatch.setattr(stored_variable, "initialise", noted)
    return found


@contextmanager
def run(backups: int = 0, optimizer: str = "Adagrad") -> Iterator[tuple[nn.Module, sg.Checkpoint]]:
    """A table with an optimizer on two servers; its initial values are the same each time."""
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        with sg.ParameterServerStrategy(
            cluster.resolver,
            variable_partitioner=sg.partitioners.FixedShardsPartitioner(2),
            backups=backups,
        ) as strategy:
            torch.manual_seed(4)
            with strategy.scope():
                model = nn.Embedding(ROWS, 4, sparse=optimizer == "Adagrad")
                trainer = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)

            def step(ids: Tensor) -> None:
                trainer.zero_grad()
                model(ids).sum().backward()
                trainer.step()

            checkpoint = sg.Checkpoint(model=model, optimizer=trainer)
            vars(model)["train"] = lambda: list(strategy.run_steps(step, [torch.arange(ROWS)]))
            yield model, checkpoint


def rows_of(model: nn.Module) -> Tensor:
    found: Tensor = model(torch.arange(ROWS)).detach()
    return found


@pytest.mark.parametrize("backups", [0, 1])
def test_a_restore_computes_no_initial_values(
    tmp_path: Path, computed: list[InitOp], backups: int
) -> None:
    with run(backups) as (model, checkpoint):
        initial = rows_of(model)
        assert len(computed) == 2 * (1 + backups)
        vars(model)["train"]()
        expected = rows_of(model)
        assert not torch.equal(initial, expected)
        checkpoint.save(tmp_path / "one")
    computed.clear()
    with run(backups) as (model, checkpoint):
        checkpoint.restore(tmp_path / "one")
        assert torch.equal(rows_of(model), expected)
        assert not computed
        vars(model)["train"]()
        assert not computed


@pytest.mark.parametrize("why", ["mismatch", "damaged later"])
def test_a_restore_that_fails_leaves_initial_values(
    tmp_path: Path, computed: list[InitOp], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    with run() as (model, checkpoint):
        initial = rows_of(model)
        vars(model)["train"]()
        (checkpoint if why == "damaged later" else sg.Checkpoint(model=model)).save(tmp_path / "a")
    computed.clear()
    read = BlockReader.read

    def damaged(self: BlockReader, wanted: Sequence[RowsWanted]) -> None:
        read(self, wanted)
        if wanted:  # the second time: values have been overwritten
            raise CheckpointCorrupt("a block does not match its checksum.", path=str(tmp_path))

    monkeypatch.setattr(BlockReader, "read", damaged)
    error = CheckpointCorrupt if why == "damaged later" else CheckpointMismatch
    with run() as (model, checkpoint):
        with pytest.raises(error):
            checkpoint.restore(tmp_path / "a")
        assert torch.equal(rows_of(model), initial)
        assert len(computed) == 2


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the variables whose local values were sent."""
    found: list[str] = []
    send = Kept.send

    def noted(self: Kept) -> None:
        found.append(self.name)
        send(self)

    monkeypatch.setattr(Kept, "send", noted)
    return found


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that were read twice: once to be verified."""
    found: list[str] = []
    verify = BlockReader.verify_rows

    def noted(self: BlockReader, tensor: str, start: int, rows: int) -> None:
        found.append(tensor)
        verify(self, tensor, start, rows)

    monkeypatch.setattr(BlockReader, "verify_rows", noted)
    return found


def test_a_restore_sends_no_local_values_and_reads_once(
    tmp_path: Path, sent: list[str], verified: list[str]
) -> None:
    with run() as (model, checkpoint):
        vars(model)["train"]()
        expected = rows_of(model)
        checkpoint.save(tmp_path / "one")
    sent.clear()
    with run() as (model, checkpoint):
        checkpoint.restore(tmp_path / "one")
        assert torch.equal(rows_of(model), expected)
        assert not sent
        assert not verified
        checkpoint.restore(tmp_path / "one")  # what has values is verified before it is changed
        assert verified
        assert torch.equal(rows_of(model), expected)


@pytest.mark.parametrize("table", ["small", "large"])
@pytest.mark.parametrize("name", ["Adagrad", "Adam"])
def test_a_damaged_checkpoint_leaves_new_variables_and_state_as_they_were(
    tmp_path: Path, name: str, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are verified while they are read; nothing of what was read may remain."""
    if table == "large":  # servers compute the initial values
        monkeypatch.setenv("STRATAGEM_REMOTE_TABLE_BYTES", "1024")
    with run(optimizer=name) as (model, checkpoint):
        initial = rows_of(model)
        vars(model)["train"]()
        expected = rows_of(model)
        vars(model)["train"]()
        checkpoint.save(tmp_path / "one")
    manifest = load(tmp_path / "one").manifest
    last = max(manifest.blocks, key=lambda block: (block.file, block.offset))
    with (tmp_path / "one" / last.file).open("r+b") as file:
        file.seek(last.offset)
        byte = file.read(1)
        file.seek(last.offset)
        file.write(bytes([byte[0] ^ 1]))
    with run(optimizer=name) as (model, checkpoint):
        with pytest.raises(CheckpointCorrupt, match="The objects are unchanged"):
            checkpoint.restore(tmp_path / "one")
        assert torch.equal(rows_of(model), initial)
        vars(model)["train"]()
        assert torch.equal(rows_of(model), expected)


class SlowDisk:
    """Reading waits, and then succeeds or fails."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.may_end = threading.Event()

    def read_rows(self, _: object, parts: Sequence[tuple[object, Tensor]], __: object) -> None:
        assert self.may_end.wait(60.0)
        for _, into in parts:
            into.fill_(7.0)
        if self.fails:
            raise CheckpointCorrupt("damaged", path="file")


@pytest.mark.parametrize("fails", [False, True])
def test_a_table_without_values_refuses_to_be_read(
    tmp_path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even while the rows arrive: they would be those of other variables, or zeros."""
    store, disk = VariableStore(), SlowDisk(fails=fails)
    monkeypatch.setattr(checkpoint_parts, "read_rows", disk.read_rows)
    store.create(1, "table", (8, 2), torch.float32)
    store.initialise(1, [AT_FIRST_USE, InitOp("fill", (3.0,))])
    part = messages.PartRef("table", (8, 2), 0, 8, 1)
    with SessionCheckpoints(store, CheckpointAccess((str(tmp_path),))) as checkpoints:
        checkpoints.begin_read(messages.ReadParts(chain=((str(tmp_path), ""),), parts=(part,)))
        with pytest.raises(CheckpointError, match="'table' is being restored from a checkpoint"):
            store.read(1)
        disk.may_end.set()
        while not checkpoints.progress()[0].done:
            threading.Event().wait(0.01)
    assert store.read(1).unique().tolist() == [3.0 if fails else 7.0]


def test_values_that_nothing_was_restored_into_are_computed_at_the_first_use() -> None:
    store = VariableStore()
    store.create(1, "table", (4, 2), torch.float32)
    store.initialise(1, [AT_FIRST_USE, InitOp("fill", (3.0,)), InitOp("fill_row", (0.0, 1.0))])
    assert store.version(1) == 1
    [block] = exported(store)
    assert block.rows.tolist() == [[1.0, 1.0], *[[3.0, 3.0]] * 3]
    assert store.scatter(1, "add", torch.tensor([0]), torch.ones(1, 2)) == 2
    assert store.read(1)[0].tolist() == [2.0, 2.0]
