"""One script for every task of a cluster; TF_CONFIG says which task. Try it in three terminals.

    export CLUSTER='{"chief": ["localhost:2222"], "ps": ["localhost:2223"], "worker": ["localhost:2224"]}'

    # terminal 1
    TF_CONFIG='{"cluster": '"$CLUSTER"', "task": {"type": "ps", "index": 0}}' \
        python examples/tf_config_cluster.py
    # terminal 2
    TF_CONFIG='{"cluster": '"$CLUSTER"', "task": {"type": "worker", "index": 0}}' \
        python examples/tf_config_cluster.py
    # terminal 3
    TF_CONFIG='{"cluster": '"$CLUSTER"', "task": {"type": "chief", "index": 0}}' \
        python examples/tf_config_cluster.py

The chief trains and ends. The other two tasks wait for the next chief until you stop them with Ctrl-C. The
tasks authenticate each other with a key in ~/.config/stratagem. On several machines, set the same secret in
STRATAGEM_CLUSTER_KEY for every task.
"""

import torch
from torch import nn

import stratagem as sg

STEPS = 200
TRUE_WEIGHT = torch.tensor([[2.0, -3.0]])


def main() -> None:
    resolver = sg.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type == "chief":
        train(resolver)
    elif resolver.task_type in ("worker", "ps"):
        server = sg.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol="grpc",
        )
        print(f"{server} waits for a chief; Ctrl-C ends it", flush=True)
        server.join()
    else:
        raise SystemExit(f"TF_CONFIG says task type {resolver.task_type!r}: {__doc__}")


def train(resolver: sg.cluster_resolver.ClusterResolver) -> None:
    strategy = sg.ParameterServerStrategy(resolver)
    with sg.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            x = torch.randn(32, 2)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x @ TRUE_WEIGHT.T)
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = [coordinator.schedule(step) for _ in range(STEPS)]
        coordinator.join()
        print(f"loss {losses[0].fetch():.3f} -> {losses[-1].fetch():.6f}")
        print(f"weight {model.weight.detach().numpy().round(3).tolist()}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("stopped")
