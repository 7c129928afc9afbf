"""The ``stratagem`` command: parse the arguments, run one command, return an exit code.

Exit codes: 0 success; 1 the command failed; 2 wrong arguments; 3 `doctor` found a problem; 130 stopped by
Ctrl-C. An error is one line of text; ``--debug`` shows the traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from stratagem import config
from stratagem._commands.arguments import positive, positive_or_range, resources

__all__ = ["main"]

_EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Example:
        >>> main(["version"])  # doctest: +ELLIPSIS
        stratagem ... (torch ...)
        0
    """
    options = _parse(sys.argv[1:] if arguments is None else list(arguments))
    _set_up_logging(debug=options.debug)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except KeyboardInterrupt:
        print("stratagem: stopped", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except SystemExit:
        raise
    except Exception as error:  # any error is one readable line
        if options.debug:
            raise
        note = "".join(f"\n  {line}" for line in getattr(error, "__notes__", ()))
        print(
            f"stratagem: {type(error).__name__}: {error}{note}\n  (--debug shows the traceback)",
            file=sys.stderr,
        )
        return _EXIT_FAILED


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Parse our own arguments; unknown ones are for the script of `train`, else an error."""
    # Everything after "--" is for the script, even if it looks like an option of ours.
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    ours, separator, rest = arguments[:cut], arguments[cut : cut + 1], arguments[cut + 1 :]
    parser = _parser()
    options, left_over = parser.parse_known_args(ours)
    if options.command is _train:
        options.arguments = left_over + rest
    elif left_over or separator:
        parser.error(f"unrecognized arguments: {' '.join(left_over + separator + rest)}")
    return options


def _set_up_logging(*, debug: bool) -> None:
    level = "debug" if debug else (config.environment("STRATAGEM_LOG") or "warning")
    config.set_up_logging(level)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stratagem",
        description="Train one ordinary PyTorch step on one device, many devices, or a cluster.",
        epilog=(
            "exit codes: 0 success, 1 failure, 2 wrong arguments, 3 doctor found a problem, "
            "130 stopped by Ctrl-C"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug logs")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_cluster(commands)
    _add_server(commands)
    _add_demo(commands)
    _add_doctor(commands)
    _add_top(commands)
    _add_checkpoint(commands)
    _add_certificates(commands)
    _add_version(commands)
    return parser


_Commands = argparse._SubParsersAction  # argparse has no public name for it


def _command(
    commands: _Commands[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    examples: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # SUPPRESS: otherwise the sub-parser's default would overwrite a --debug given before the command.
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    parser.set_defaults(command=run)
    return parser


def _add_train(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "train",
        _train,
        summary="run a script under a strategy; sg.auto_strategy() returns it in the script",
        examples=(
            "  stratagem train my_script.py --strategy mirrored --replicas 2\n"
            "  stratagem train my_script.py --strategy ps --workers 2 --ps 2 --epochs 3\n"
            "  stratagem train my_script.py --strategy ps --restarts 3 --job ctr-v3\n"
            "  stratagem train my_script.py --on ray --workers 2:8 --resources-per-worker CPU=2\n"
            "unknown options, and everything after --, are passed to the script"
        ),
    )
    parser.add_argument("script", help="Python file to run as __main__")
    parser.add_argument(
        "--strategy",
        choices=("one", "central", "mirrored", "ps"),
        help="one device, central storage, mirrored, or parameter servers (default: one; with --on ray: ps)",
    )
    parser.add_argument(
        "--replicas",
        type=positive,
        default=0,
        help="number of replicas for central and mirrored (default: all GPUs, else 2)",
    )
    parser.add_argument(
        "--workers",
        type=positive_or_range,
        default=2,
        metavar="N",
        help="workers for ps (default: 2); MIN:MAX with --on ray",
    )
    parser.add_argument(
        "--ps", type=positive, default=2, help="parameter servers for ps (default: 2)"
    )
    parser.add_argument(
        "--on",
        choices=("local", "ray"),
        default="local",
        help="for ps: run the tasks on this machine, or on the nodes of a Ray cluster (default: local)",
    )
    parser.add_argument(
        "--resources-per-worker",
        type=resources,
        metavar="NAME=AMOUNT,...",
        help="that Ray reserves for a worker (default: CPU=1)",
    )
    parser.add_argument(
        "--resources-per-ps",
        type=resources,
        metavar="NAME=AMOUNT,...",
        help="that Ray reserves for a parameter server (default: CPU=1)",
    )
    parser.add_argument(
        "--report", metavar="FILE", help="write a report of the run, one HTML file, at its end"
    )
    parser.add_argument(
        "--tensorboard", metavar="DIRECTORY", help="write logged values for TensorBoard"
    )
    parser.add_argument(
        "--restarts",
        type=positive,
        default=0,
        metavar="N",
        help="run the script again after a crash, at most N times; the cluster stays",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="for ps: use a cluster of `stratagem cluster start` instead of one that ends with the script",
    )
    parser.add_argument(
        "--job",
        metavar="NAME",
        help="for ps: name of the job, by which a restarted script finds it (default with --restarts: the "
        "script's name)",
    )
    parser.add_argument("--owner", type=int, default=0, help=argparse.SUPPRESS)


def _train(options: argparse.Namespace) -> int:
    from stratagem._commands.train import ClusterSize, run_script, run_script_again

    strategy = options.strategy or ("one" if options.on == "local" else "ps")
    if options.on != "local" and (strategy != "ps" or options.cluster is not None):
        raise ValueError(f"--on {options.on} is for --strategy ps, and not with --cluster")
    size = ClusterSize(
        workers=options.workers,
        ps=options.ps,
        on=options.on,
        resources_per_worker=options.resources_per_worker,
        resources_per_ps=options.resources_per_ps,
    )
    if options.restarts and options.cluster is None:
        return run_script_again(
            options.script,
            options.arguments,
            restarts=options.restarts,
            strategy=strategy,
            replicas=options.replicas,
            size=size,
            job=options.job,
            report=options.report,
            tensorboard=options.tensorboard,
        )
    run_script(
        options.script,
        options.arguments,
        strategy=strategy,
        replicas=options.replicas,
        size=size,
        report=options.report,
        tensorboard=options.tensorboard,
        cluster=options.cluster,
        job=options.job,
        owner=options.owner,
    )
    return 0


def _add_cluster(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "cluster",
        _cluster,
        summary="start, list and stop local clusters that outlive the scripts that use them",
        examples=(
            "  stratagem cluster start --name dev --workers 2 --ps 2\n"
            "  stratagem train my_script.py --strategy ps --cluster dev --job ctr-v3\n"
            "  stratagem cluster ls\n"
            "  stratagem cluster stop --name dev"
        ),
    )
    parser.add_argument(
        "action",
        choices=("start", "run", "ls", "stop"),
        help="run: start, and stay in the foreground",
    )
    parser.add_argument("--name", default="default", help="name of the cluster (default: default)")
    parser.add_argument("--workers", type=positive, default=2, help="default: 2")
    parser.add_argument("--ps", type=positive, default=2, help="parameter servers (default: 2)")


def _cluster(options: argparse.Namespace) -> int:
    from stratagem._commands import cluster_tool

    if options.action == "stop":
        ended = cluster_tool.stop(options.name)
        print(f"{options.name}: {'stopped' if ended else 'not running'}")
        return 0 if ended else _EXIT_FAILED
    if options.action == "run":
        cluster_tool.run(options.name, workers=options.workers, ps=options.ps)
        return 0
    if options.action == "ls":
        lines = cluster_tool.list_clusters()
    else:
        lines = cluster_tool.start(options.name, workers=options.workers, ps=options.ps)
    print("\n".join(lines) or "no cluster runs")
    return 0


def _add_server(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "server",
        _server,
        summary="run one task of a cluster until it is stopped",
        examples=(
            "  TF_CONFIG='{...}' stratagem server\n"
            "  stratagem server --job ps --index 0 \\\n"
            '    --cluster \'{"ps": ["localhost:2222"], "worker": ["localhost:2223"]}\'\n'
            "  stratagem server --job evaluator --evaluator my_evaluation.py:make_evaluator"
        ),
    )
    parser.add_argument("--job", choices=("worker", "ps", "evaluator"), help="default: TF_CONFIG's")
    parser.add_argument("--index", type=int, help="default: TF_CONFIG's task index")
    parser.add_argument(
        "--cluster", help="JSON object of jobs and addresses; default: TF_CONFIG's cluster"
    )
    parser.add_argument(
        "--checkpoint-dir",
        action="append",
        default=[],
        metavar="DIRECTORY",
        help="let a parameter server write and read its part of checkpoints below it; repeatable",
    )
    parser.add_argument(
        "--threads",
        type=positive,
        help="threads of torch (default: the cores divided by the cluster's tasks on this host)",
    )
    parser.add_argument("--evaluator", metavar="FILE.py:NAME", help="the evaluator, or its maker")


def _server(options: argparse.Namespace) -> int:
    from stratagem._commands.serve import serve

    return serve(
        job=options.job,
        index=options.index,
        cluster=options.cluster,
        checkpoint_directories=options.checkpoint_dir,
        threads=options.threads,
        evaluator=options.evaluator,
    )


def _add_demo(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "demo",
        _demo,
        summary="train a click-through model on a local cluster, with a live view",
        examples="  stratagem demo\n  stratagem demo --seconds 20 --plain",
    )
    parser.add_argument("--seconds", type=positive, default=60, help="training time (default: 60)")
    parser.add_argument("--workers", type=positive, default=2, help="default: 2")
    parser.add_argument("--ps", type=positive, default=2, help="parameter servers (default: 2)")
    parser.add_argument(
        "--output", default="demo-output", help="folder for the files (default: demo-output)"
    )
    parser.add_argument("--plain", action="store_true", help="print lines instead of a live view")


def _demo(options: argparse.Namespace) -> int:
    from stratagem._demo.run import DemoOptions, run_demo

    return run_demo(
        DemoOptions(
            seconds=options.seconds,
            workers=options.workers,
            ps=options.ps,
            output=options.output,
            plain=options.plain,
        )
    )


def _add_doctor(commands: _Commands[argparse.ArgumentParser]) -> None:
    _command(
        commands,
        "doctor",
        _doctor,
        summary="check this machine and suggest remedies",
        examples="  stratagem doctor",
    )


def _doctor(_options: argparse.Namespace) -> int:
    from rich.console import Console

    from stratagem._commands.doctor import report

    return report(Console())


def _add_top(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "top",
        _top,
        summary="show the state of a running cluster",
        examples=(
            "  stratagem top\n"
            "  stratagem top --web\n"
            '  stratagem top --cluster \'{"ps": ["localhost:2222"], "worker": ["localhost:2223"]}\''
        ),
    )
    parser.add_argument(
        "--cluster", help="JSON of jobs and addresses, or a local cluster's process number or name"
    )
    parser.add_argument("--once", action="store_true", help="print the state once and exit")
    parser.add_argument(
        "--interval", type=float, default=1.0, help="seconds between updates (default: 1)"
    )
    parser.add_argument(
        "--web",
        action="store_true",
        help="serve a live page instead, until Ctrl-C, and print its link",
    )
    parser.add_argument(
        "--address",
        default="127.0.0.1:0",
        help="where --web listens, host:port (default: a free port, for this machine only)",
    )


def _top(options: argparse.Namespace) -> int:
    from stratagem._commands.top import serve_page, watch

    if options.web:
        return serve_page(cluster=options.cluster, address=options.address)
    return watch(cluster=options.cluster, once=options.once, interval_s=options.interval)


def _add_checkpoint(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "checkpoint",
        _checkpoint,
        summary="list, show, verify, convert and compare checkpoints",
        examples=(
            "  stratagem checkpoint ls runs/ctr-v3\n"
            "  stratagem checkpoint show runs/ctr-v3/step_00120000\n"
            "  stratagem checkpoint verify runs/ctr-v3\n"
            "  stratagem checkpoint to-torch runs/ctr-v3 model.pt\n"
            "  stratagem checkpoint diff runs/ctr-v3/step_00110000 runs/ctr-v3/step_00120000\n"
            "a directory of checkpoints stands for its newest checkpoint, except in ls and verify\n"
            "exit code 1: a checkpoint is damaged (ls, verify), the two differ (diff), or an error"
        ),
    )
    parser.add_argument("action", choices=("ls", "show", "verify", "to-torch", "diff"))
    parser.add_argument("path", help="a checkpoint, or a directory of checkpoints")
    parser.add_argument(
        "other", nargs="?", help="to-torch: the file to write; diff: the other checkpoint"
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="to-torch: accept values that can only be unpickled (unpickling can run code)",
    )
    parser.set_defaults(parser=parser)


def _checkpoint(options: argparse.Namespace) -> int:
    from stratagem._commands.checkpoint_tool import run

    takes_two = options.action in ("to-torch", "diff")
    if takes_two != (options.other is not None):
        options.parser.error(f"{options.action} takes {'two paths' if takes_two else 'one path'}")
    lines, well = run(
        options.action, options.path, options.other, allow_pickle=options.allow_pickle
    )
    print("\n".join(lines))
    return 0 if well else _EXIT_FAILED


def _add_certificates(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "certificates",
        _certificates,
        summary="make the certificates of a cluster whose connections are encrypted",
        examples=(
            "  stratagem certificates tls/\n  stratagem certificates tls/ --name ps-0 --name worker-0"
        ),
    )
    parser.add_argument("directory", help="for ca.pem and the files of each task")
    parser.add_argument("--name", action="append", help="of a task; repeatable (default: task)")
    parser.add_argument("--days", type=positive, default=365, help="validity (default: 365)")


def _certificates(options: argparse.Namespace) -> int:
    from stratagem._commands.certificates import make_certificates

    names = options.name or ["task"]
    print("\n".join(make_certificates(Path(options.directory), names, days=options.days)))
    return 0


def _add_version(commands: _Commands[argparse.ArgumentParser]) -> None:
    _command(
        commands,
        "version",
        _version,
        summary="print the versions of stratagem, torch and Python",
        examples="  stratagem version",
    )


def _version(_options: argparse.Namespace) -> int:
    import torch

    import stratagem

    python = ".".join(map(str, sys.version_info[:3]))
    print(f"stratagem {stratagem.__version__} (torch {torch.__version__}, Python {python})")
    return 0
