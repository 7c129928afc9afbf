"""Train on the nodes of a Slurm job: the first task is the chief, the others serve it."""

import os
from pathlib import Path

import torch

import stratagem as sg

resolver = sg.cluster_resolver.SlurmClusterResolver({"chief": 1, "ps": 1, "worker": 2})

if resolver.task_type != "chief":
    sg.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()

with sg.ParameterServerStrategy(resolver) as strategy:
    with strategy.scope():
        model = torch.nn.Linear(20, 1)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = list(strategy.run_steps(step, (torch.randn(64, 20) for _ in range(300))))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)

Path(os.environ["DONE"]).touch()
