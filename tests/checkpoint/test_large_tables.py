"""Tables that only servers hold: saved and restored by the servers, refused by torch.save with what to do."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import ConnectionLost


def refused(save: Callable[[], object]) -> str:
    with pytest.raises(TypeError) as error:
        save()
    return str(error.value)


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_torch_save_says_what_to_use_before_and_after_close(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_dynamic: bool
) -> None:
    monkeypatch.setenv("STRATAGEM_REMOTE_TABLE_BYTES", "1024")
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        with sg.ParameterServerStrategy(cluster.resolver) as strategy:
            with strategy.scope():
                model = sg.nn.DynamicEmbedding(4) if is_dynamic else nn.Embedding(1000, 4)
            model(torch.tensor([5]))
            text = refused(lambda: torch.save(model.state_dict(), io.BytesIO()))
            assert "sg.Checkpoint(model=model).save(path) while the strategy is open" in text
            assert ("export()" in text) == is_dynamic
        text = refused(lambda: torch.save(model.state_dict(), io.BytesIO()))
        assert "freed them when the strategy was closed" in text
        assert "sg.Checkpoint(model=model).save(path)" in text
        with pytest.raises(sg.errors.CheckpointError, match="Save the model before that") as late:
            sg.Checkpoint(model=model).save(tmp_path / "late")
        assert "pickle=True" not in str(late.value)


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, sg.optim.LazyAdam, sg.optim.RowWiseAdagrad])
def test_state_dicts_of_optimizers_that_do_not_fit_say_what_to_use(
    kind: type[torch.optim.Optimizer],
) -> None:
    """Instead of a process that the kernel ends for its memory. Servers reserve addresses only."""
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        with sg.ParameterServerStrategy(cluster.resolver) as strategy:
            with strategy.scope():
                model = sg.nn.DynamicEmbedding(4, max_rows=1 << 36)
                optimizer = kind([model.weight], lr=0.1)

            def step(ids: torch.Tensor) -> None:
                optimizer.zero_grad()
                model(ids).sum().backward()
                optimizer.step()

            list(strategy.run_steps(step, [torch.tensor([3, 10**15])]))
            text = "sg.Checkpoint(model=model, optimizer=optimizer).save(path)"
            with pytest.raises(MemoryError, match=re.escape(text)):
                optimizer.state_dict()


def test_the_state_of_a_table_that_fits_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_REMOTE_TABLE_BYTES", "1024")
    with sg.LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        with sg.ParameterServerStrategy(cluster.resolver) as strategy:
            with strategy.scope():
                model = nn.Embedding(1000, 4, sparse=True)
                optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

            def step(ids: torch.Tensor) -> None:
                optimizer.zero_grad()
                model(ids).sum().backward()
                optimizer.step()

            list(strategy.run_steps(step, [torch.tensor([3])]))
            saved = io.BytesIO()
            torch.save(optimizer.state_dict(), saved)
            saved.seek(0)
            sums = torch.load(saved)["state"][0]["sum"]
            assert sums.sum(1).nonzero().flatten().tolist() == [3]
        with pytest.raises(
            ConnectionLost, match=r"sg\.Checkpoint\(model=model, optimizer=optimizer\)"
        ):
            optimizer.state_dict()


SCRIPT = """
import resource, sys
import torch, torch._dynamo
from torch import nn
import stratagem as sg

def run(path, is_saved):
    with sg.LocalCluster(workers=1, ps=2) as cluster:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (240 << 20), limits[1]))
        halves = sg.partitioners.FixedShardsPartitioner(2)
        with sg.ParameterServerStrategy(cluster.resolver, halves) as strategy:
            with strategy.scope():
                model = nn.Embedding(8_000_000, 16)  # two shards of 256 MB: more than the limit
                nn.init.constant_(model.weight, 0.0 if is_saved else 0.5)
                optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

            def step(ids):
                optimizer.zero_grad()
                model(ids).sum().backward()
                optimizer.step()

            checkpoint = sg.Checkpoint(model=model, optimizer=optimizer)
            if is_saved:
                checkpoint.restore(path)
            else:
                list(strategy.run_steps(step, [torch.tensor([5, 7_999_999])]))
                checkpoint.save(path)
            print(model(torch.tensor([5, 6, 7_999_999])).detach()[:, 0].tolist())
        resource.setrlimit(resource.RLIMIT_AS, limits)

if __name__ == "__main__":
    run(sys.argv[1], False)
    run(sys.argv[1], True)
"""


@pytest.mark.soak
def test_a_table_larger_than_the_coordinators_memory_limit(tmp_path: Path) -> None:
    """Neither saving nor restoring brings the table to the coordinator."""
    script = tmp_path / "big.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "saved")],
        env={**os.environ, "STRATAGEM_REMOTE_TABLE_BYTES": str(32 << 20), "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [
        [float(one) for one in line.strip("[]").split(", ")] for line in done.stdout.split("\n")[:2]
    ]
    assert rows[0] == rows[1] == pytest.approx([0.4, 0.5, 0.4])
