"""``stratagem server``: run one task of a cluster in the foreground."""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stratagem import config
from stratagem._cluster.discovery.cluster_spec import ClusterSpec
from stratagem._cluster.discovery.resolvers import TFConfigClusterResolver

if TYPE_CHECKING:
    from stratagem._checkpoint.evaluator import Evaluator


def run(options: argparse.Namespace) -> int:
    """Run the task until it is stopped (Ctrl-C, SIGTERM); an evaluator until its last checkpoint."""
    from stratagem import _faults
    from stratagem._cluster.launch.task_server import Server

    resolver = TFConfigClusterResolver()
    job = options.job or resolver.task_type
    index = resolver.task_id if options.index is None else options.index
    if job == "evaluator":
        return _evaluate(options)
    if options.evaluator is not None:
        raise ValueError(f"--evaluator is for --job evaluator, not for {job!r}")
    spec = cluster_from(options.cluster)
    if job not in ("worker", "ps"):
        raise ValueError(
            f"unknown task: job={job!r}. Give --job worker, ps or evaluator, or set TF_CONFIG's task."
        )
    _faults.activate_from_environment(f"/job:{job}/task:{index}")
    with Server(
        spec, job, index, checkpoint_directories=options.checkpoint_dir, threads=options.threads
    ) as server:
        # The program that started us may wait for this line: the port is open now.
        sys.stdout.write(f"serving /job:{job}/task:{index} at {server.target}\n")
        sys.stdout.flush()
        server.join()
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    """Run an evaluator; it needs no cluster and no address."""
    import torch

    from stratagem import _faults
    from stratagem._cluster.launch.task_process import name_process

    evaluator = evaluator_from(options.evaluator)
    _faults.activate_from_environment("/job:evaluator/task:0")
    name_process("sg evaluator 0")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    sys.stdout.write(f"evaluating the checkpoints in {evaluator.directory}\n")
    sys.stdout.flush()
    for result in evaluator.run():
        shown = ", ".join(f"{name}={value:g}" for name, value in result.metrics.items())
        sys.stdout.write(f"step {result.step}: {shown}\n")
    return 0


def evaluator_from(text: str | None) -> Evaluator:
    """Return the evaluator that ``--evaluator`` names: ``FILE.py:NAME`` or ``package.module:NAME``.

    NAME is an `Evaluator`, or a function without arguments that returns one.
    """
    from stratagem._checkpoint.evaluator import Evaluator

    place, _, name = (text or "").rpartition(":")
    if not place or not name:
        raise ValueError(
            f"--evaluator {text!r}: expected FILE.py:NAME or module:NAME, where NAME is an sg.Evaluator or a "
            "function that returns one"
        )
    sys.path.insert(0, str(Path(place).resolve().parent if place.endswith(".py") else Path.cwd()))
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise FileNotFoundError(f"no file {place!r} (current folder: {Path.cwd()})")
        names = runpy.run_path(place, run_name=Path(place).stem)
    else:
        names = vars(importlib.import_module(place))
    if name not in names:
        raise ValueError(f"{place} has no {name!r}")
    found = names[name]
    if not isinstance(found, Evaluator) and callable(found):
        found = found()
    if not isinstance(found, Evaluator):
        raise TypeError(
            f"{text} is {found!r}: expected an sg.Evaluator, or a function that returns one"
        )
    return found


def cluster_from(text: str | None) -> ClusterSpec:
    """Return the cluster that ``--cluster`` describes, else TF_CONFIG's.

    Example:
        >>> cluster_from('{"ps": ["localhost:2222"]}')
        ClusterSpec({'ps': ['localhost:2222']})
    """
    if text is None:
        if not config.environment("TF_CONFIG"):
            raise ValueError("no cluster is given. Give --cluster JSON or set TF_CONFIG.")
        return TFConfigClusterResolver().cluster_spec()
    try:
        return ClusterSpec(json.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--cluster {text[:80]!r} describes no cluster ({error}); expected a JSON object of jobs and lists of "
            'addresses, such as {"ps": ["localhost:2222"], "worker": ["localhost:2223"]}'
        ) from error
