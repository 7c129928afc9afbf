"""Kill workers while they run functions: no update is lost, and none is applied twice.

The program schedules additions to one variable, kills a worker from time to time, and prints the sum,
which equals the number of additions.

    python examples/surviving_worker_loss.py
    python examples/surviving_worker_loss.py --additions 20000
"""

import argparse
import itertools
import threading

import torch

import stratagem as sg

# Settings.
ADDITIONS = 5_000
SECONDS_BETWEEN_KILLS = 0.4


def main(additions: int = ADDITIONS) -> tuple[float, int]:
    with sg.LocalCluster(workers=2, ps=1) as cluster:
        strategy = sg.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            total = sg.Variable(torch.zeros((), dtype=torch.float64))

        def add_one():
            total.assign_add(torch.ones((), dtype=torch.float64))

        # Kills are frequent here, and a closure may lose more than three workers.
        options = sg.config.ClusterOptions(poison_limit=100)
        with sg.ClusterCoordinator(strategy, options=options) as coordinator:
            finished = threading.Event()
            kills = 0

            def kill_from_time_to_time():
                nonlocal kills
                for victim in itertools.cycle([0, 1]):
                    if finished.wait(SECONDS_BETWEEN_KILLS):
                        return
                    cluster.kill_worker(victim)
                    kills += 1

            killer = threading.Thread(target=kill_from_time_to_time, name="killer")
            killer.start()
            try:
                for _ in range(additions):
                    coordinator.schedule(add_one)
                coordinator.join()
            finally:
                finished.set()
                killer.join()
            print(f"{additions} additions, {kills} workers killed, sum {float(total):.0f}")
            return float(total), kills


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--additions", type=int, default=ADDITIONS)
    main(parser.parse_args().additions)
