"""The torch methods we wrap are torch's own outside replicas (docs/design/0004-torch-patches.md)."""

import gc
import os
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem._core import torch_patches


def install_everything():
    for group in (torch_patches.STRATEGY, torch_patches.REPLICAS, torch_patches.RANDOM):
        torch_patches.install(group)


def test_plain_optimizers_are_left_alone():
    """Over parameters that no strategy manages: no instance attributes, ordinary groups."""
    install_everything()
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters())
    assert "step" not in vars(optimizer)
    assert type(optimizer.param_groups) is list
    assert type(optimizer.param_groups[0]) is dict
    again = pickle.loads(pickle.dumps(optimizer))
    assert type(again.param_groups) is list


def test_one_device_leaves_modules_and_optimizers_plain():
    """Nothing stands between the user and PyTorch: that is how it is as fast."""
    strategy = sg.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for module in model:
        assert type(module._parameters) is dict
        assert type(module._buffers) is dict
    assert type(model[2]) is nn.LSTM
    assert "step" not in vars(optimizer)


@pytest.mark.process
@pytest.mark.timeout(150)
def test_one_device_leaves_torchs_methods_alone():
    """The patches for replicas are installed by the first strategy that needs them."""
    program = (
        "import torch, stratagem as sg\n"
        "from torch import nn\n"
        "plain = (torch.autograd._engine_run_backward, torch.optim.lr_scheduler.LRScheduler.step,\n"
        "         torch.amp.GradScaler.step, torch.random.default_generator)\n"
        "now = lambda: (torch.autograd._engine_run_backward, torch.optim.lr_scheduler.LRScheduler.step,\n"
        "               torch.amp.GradScaler.step, torch.random.default_generator)\n"
        "one = sg.OneDeviceStrategy('cpu:0')\n"
        "one.run(lambda: nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward())\n"
        "assert now() == plain and 'grad' not in vars(nn.Parameter), 'patched on one device'\n"
        "with sg.MirroredStrategy(['cpu:0', 'cpu:1']) as two:\n"
        "    two.run(lambda: None)\n"
        "assert all(a is not b for a, b in zip(now(), plain)), 'not patched for two'\n"
        "assert 'grad' in vars(nn.Parameter) and 'data' in vars(nn.Parameter)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_modules_made_outside_a_scope_stay_plain():
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            pass
        model = nn.Linear(2, 2)
    assert type(model._parameters) is dict


def test_schedulers_and_scalers_outside_replicas_are_torchs():
    install_everything()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
    for k in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.5 ** (k + 1)
        assert scaler.get_scale() == 2.0 ** (k + 2)
    assert "step" not in scheduler.state_dict()


def test_backward_outside_replicas_is_torchs():
    """Every way of calling it, with what torch raises, and what it returns."""
    install_everything()
    w = torch.ones(2, requires_grad=True)
    assert torch.autograd.backward((2 * w).sum(), None, True, False, None, [w]) is None
    assert torch.autograd.backward(tensors=[3 * w], grad_tensors=[torch.ones(2)]) is None
    assert w.grad.tolist() == [5.0, 5.0]
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(1).backward()
    assert torch.autograd.backward.__doc__.startswith("Compute the sum of gradients")


def test_grad_outside_replicas_is_torchs():
    """Every way of calling it, with what torch raises, also for parameters that have leaves."""
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = nn.Linear(2, 1, bias=False)
        w, other = model.weight, torch.ones(1, requires_grad=True)
        strategy.run(lambda: model(torch.ones(1, 2)))
        assert torch.autograd.grad((2 * w).sum(), w)[0].tolist() == [[2.0, 2.0]]
        assert torch.autograd.grad((2 * w).sum(), [other], None, None, False, True, True) == (None,)
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad((2 * w).sum(), [other])
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(torch.ones(1), [w])


def test_data_outside_replicas_is_torchs():
    """No version is counted, lazy parameters and ordinary tensors included, also when compiled."""
    install_everything()
    p = nn.Parameter(torch.ones(2))
    p.data.mul_(3)
    p.data = p.data + 1
    assert (p.tolist(), p._version) == ([4.0, 4.0], 0)
    assert p.data_ptr() == p.data.data_ptr()
    lazy = nn.LazyLinear(2)
    assert lazy(torch.ones(1, 3)).shape == (1, 2)
    total = torch.compile(lambda: p.data.sum() + p.sum(), backend="eager", fullgraph=True)
    assert total().item() == 16.0


def test_a_strategy_and_its_models_can_be_collected():
    """Managed parameters, leaves, hooks and optimizers keep no unused object alive."""

    def use():
        strategy = sg.CentralStorageStrategy(["cpu:0", "cpu:1"])
        with strategy.scope():
            model = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        strategy.run(step, args=(sg.PerReplica([torch.ones(1, 2), torch.ones(1, 2)]),))
        return [weakref.ref(strategy), weakref.ref(model), weakref.ref(optimizer)]

    gone = use()
    gc.collect()
    assert [each() for each in gone] == [None, None, None]


def test_a_model_outlives_its_strategy():
    """Outside run it is an ordinary model, also when the strategy is gone."""
    strategy = sg.CentralStorageStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    strategy.run(model, args=(sg.PerReplica([torch.randn(3, 2), torch.randn(3, 2)]),))
    strategy.close()
    del strategy
    gc.collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
