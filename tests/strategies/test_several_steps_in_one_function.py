"""Several training steps in one scheduled function: the numbers of plain PyTorch, and each write once."""

import pytest
import torch

import stratagem as sg

STEPS, CLOSURES = 4, 3


def build():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)
    )


def optimizer_and_scheduler(model):
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared memory", "sockets"])
def test_steps_in_a_loop_give_the_numbers_of_plain_pytorch(monkeypatch, shared):
    """Parameters, buffers, optimizer state and scheduler, step after step within the function."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", shared)
    data = torch.randn(STEPS * CLOSURES, 8, 6)
    plain = build()
    plain_optimizer, plain_scheduler = optimizer_and_scheduler(plain)
    plain_losses = []
    for x in data:
        plain_optimizer.zero_grad()
        loss = plain(x).square().mean()
        loss.backward()
        plain_optimizer.step()
        plain_scheduler.step()
        plain_losses.append(float(loss.detach()))
    with sg.LocalCluster(workers=1, ps=2, in_process=True) as cluster:
        with sg.ParameterServerStrategy(cluster.resolver) as strategy:
            with strategy.scope():
                model = build()
                optimizer, scheduler = optimizer_and_scheduler(model)
            coordinator = sg.ClusterCoordinator(strategy)

            def steps(batches):
                losses = []
                for x in batches:
                    optimizer.zero_grad()
                    loss = model(x).square().mean()
                    loss.backward()
                    optimizer.step()
                    scheduler.step()
                    losses.append(float(loss.detach()))
                return losses

            found = [coordinator.schedule(steps, args=(part,)) for part in data.split(STEPS)]
            coordinator.join(timeout_s=60)
            losses = [loss for value in found for loss in value.fetch()]
            assert scheduler.last_epoch == STEPS * CLOSURES
            assert optimizer.param_groups[0]["lr"] == plain_optimizer.param_groups[0]["lr"]
            trained = {key: value.clone() for key, value in model.state_dict().items()}
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    torch.testing.assert_close(trained, dict(plain.state_dict()))
