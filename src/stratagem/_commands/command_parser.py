"""Arguments of the ``stratagem`` commands, with their help; `cli.py` runs the commands."""

from __future__ import annotations

import argparse


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; `command` of its result is the name of the command."""
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
    parser.set_defaults(command=name)
    return parser


def _add_train(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "train",
        summary="run a script; its sg.auto_strategy() returns the strategy that you choose here",
        examples=(
            "  stratagem train my_script.py --strategy mirrored --replicas 2\n"
            "  stratagem train my_script.py --strategy ps --workers 2 --ps 2 --epochs 3\n"
            "  stratagem train my_script.py --strategy ps --restarts 3 --job ctr-v3\n"
            "  stratagem train my_script.py --on ray --workers 2:8 --resources-per-worker CPU=2\n"
            "options that are not listed here, and everything after --, are passed to the script"
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
        metavar="N",
        help="workers for ps (default: 2); MIN:MAX with --on ray",
    )
    parser.add_argument("--ps", type=positive, help="parameter servers for ps (default: 2)")
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
        help="resources that Ray reserves for each worker (default: CPU=1)",
    )
    parser.add_argument(
        "--resources-per-ps",
        type=resources,
        metavar="NAME=AMOUNT,...",
        help="resources that Ray reserves for each parameter server (default: CPU=1)",
    )
    parser.add_argument(
        "--report", metavar="FILE", help="write an HTML report of the run when it ends"
    )
    parser.add_argument(
        "--tensorboard", metavar="DIRECTORY", help="write logged values for TensorBoard"
    )
    parser.add_argument(
        "--restarts",
        type=positive,
        default=0,
        metavar="N",
        help="run the script again after a crash, at most N times, on the same cluster",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="for ps: use a cluster of `stratagem cluster start`, which does not end with the script",
    )
    parser.add_argument(
        "--job",
        metavar="NAME",
        help="for ps: name of the job, which a restarted script continues (default with --restarts: the "
        "script's name)",
    )
    parser.add_argument("--owner", type=int, default=0, help=argparse.SUPPRESS)


def _add_cluster(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "cluster",
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
        help="start: in the background; run: in the foreground; ls: list; stop: end the cluster",
    )
    parser.add_argument("--name", default="default", help="name of the cluster (default: default)")
    parser.add_argument("--workers", type=positive, default=2, help="workers (default: 2)")
    parser.add_argument("--ps", type=positive, default=2, help="parameter servers (default: 2)")


def _add_server(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "server",
        summary="run one task of a cluster until it is stopped",
        examples=(
            "  TF_CONFIG='{...}' stratagem server\n"
            "  stratagem server --job ps --index 0 \\\n"
            '    --cluster \'{"ps": ["localhost:2222"], "worker": ["localhost:2223"]}\'\n'
            "  stratagem server --job evaluator --evaluator my_evaluation.py:make_evaluator"
        ),
    )
    parser.add_argument(
        "--job",
        choices=("worker", "ps", "evaluator"),
        help="job of the task (default: TF_CONFIG's)",
    )
    parser.add_argument("--index", type=int, help="index of the task (default: TF_CONFIG's)")
    parser.add_argument(
        "--cluster", help="JSON object of jobs and addresses (default: TF_CONFIG's cluster)"
    )
    parser.add_argument(
        "--checkpoint-dir",
        action="append",
        default=[],
        metavar="DIRECTORY",
        help="directory below which a parameter server may write and read checkpoints; repeatable",
    )
    parser.add_argument(
        "--threads",
        type=positive,
        help="torch threads (default: the cores divided by the cluster's tasks on this host)",
    )
    parser.add_argument(
        "--evaluator",
        metavar="FILE.py:NAME",
        help="an sg.Evaluator, or a function that returns one",
    )


def _add_demo(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "demo",
        summary="train a click-through model on a local cluster, with a live view",
        examples="  stratagem demo\n  stratagem demo --seconds 20 --plain",
    )
    parser.add_argument("--seconds", type=positive, default=60, help="training time (default: 60)")
    parser.add_argument("--workers", type=positive, default=2, help="workers (default: 2)")
    parser.add_argument("--ps", type=positive, default=2, help="parameter servers (default: 2)")
    parser.add_argument(
        "--output",
        default="demo-output",
        help="folder for model, curves and report (default: demo-output)",
    )
    parser.add_argument("--plain", action="store_true", help="print lines instead of a live view")


def _add_doctor(commands: _Commands[argparse.ArgumentParser]) -> None:
    _command(
        commands,
        "doctor",
        summary="check this machine and suggest remedies",
        examples="  stratagem doctor",
    )


def _add_top(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "top",
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
        help="serve a live page until Ctrl-C, and print its link",
    )
    parser.add_argument(
        "--address",
        default="127.0.0.1:0",
        help="host:port on which --web listens (default: a free port, for this machine only)",
    )


def _add_checkpoint(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "checkpoint",
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
        help="to-torch: accept values that only pickle can read (reading a pickle can run code)",
    )
    parser.set_defaults(parser=parser)


def _add_certificates(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _command(
        commands,
        "certificates",
        summary="create the certificates for encrypted connections of a cluster",
        examples=(
            "  stratagem certificates tls/\n  stratagem certificates tls/ --name ps-0 --name worker-0"
        ),
    )
    parser.add_argument("directory", help="directory for ca.pem and the files of each task")
    parser.add_argument(
        "--name", action="append", help="name of a task; repeatable (default: task)"
    )
    parser.add_argument(
        "--days", type=positive, default=365, help="validity in days (default: 365)"
    )


def _add_version(commands: _Commands[argparse.ArgumentParser]) -> None:
    _command(
        commands,
        "version",
        summary="print the versions of Stratagem, torch and Python",
        examples="  stratagem version",
    )


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def positive_or_range(text: str) -> int | tuple[int, int]:
    """Return a whole number of at least 1, or two of them for "2:8".

    Example:
        >>> positive_or_range("4"), positive_or_range("2:8")
        (4, (2, 8))
    """
    least, colon, most = text.partition(":")
    return (positive(least), positive(most)) if colon else positive(text)


def resources(text: str) -> dict[str, float]:
    """Return the amounts of resources by name.

    Example:
        >>> resources("CPU=2,memory=8e9")
        {'CPU': 2.0, 'memory': 8000000000.0}
    """
    found = {}
    for part in text.split(","):
        name, equals, amount = part.partition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError:
            equals = ""
        if not equals or not name.strip():
            raise argparse.ArgumentTypeError(
                f"{text!r}: expected resources such as CPU=2,memory=8e9"
            )
    return found
