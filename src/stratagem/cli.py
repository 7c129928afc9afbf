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
from stratagem._commands.command_parser import make_parser

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
    try:
        return _COMMANDS[options.command](options)
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
    parser = make_parser()
    options, left_over = parser.parse_known_args(ours)
    if options.command == "train":
        options.arguments = left_over + rest
    elif left_over or separator:
        parser.error(f"unrecognized arguments: {' '.join(left_over + separator + rest)}")
    return options


def _set_up_logging(*, debug: bool) -> None:
    level = "debug" if debug else (config.environment("STRATAGEM_LOG") or "warning")
    config.set_up_logging(level)


def _train(options: argparse.Namespace) -> int:
    from stratagem._commands.train import ClusterSize, run_script, run_script_again

    strategy = options.strategy or ("one" if options.on == "local" else "ps")
    if options.on != "local" and (strategy != "ps" or options.cluster is not None):
        raise ValueError(f"--on {options.on} is for --strategy ps, and not with --cluster")
    if strategy != "ps" and (options.workers or options.ps):
        sys.stderr.write(
            f"stratagem: --workers and --ps have no effect with --strategy {strategy}; "
            "use --strategy ps for workers and parameter servers\n"
        )
    size = ClusterSize(
        workers=options.workers or 2,
        ps=options.ps or 2,
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


def _cluster(options: argparse.Namespace) -> int:
    from stratagem._cluster.launch import detached_cluster as clusters

    if options.action == "stop":
        ended = clusters.stop(options.name)
        print(f"{options.name}: {'stopped' if ended else 'not running'}")
        return 0 if ended else _EXIT_FAILED
    if options.action == "run":
        clusters.own_cluster(options.name, options.workers, options.ps)
        return 0
    if options.action == "ls":
        names = clusters.names()
    else:
        clusters.DetachedCluster(options.name, options.workers, options.ps)
        names = [options.name]
    print("\n".join(map(clusters.describe, names)) or "no cluster runs")
    return 0


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


def _doctor(_options: argparse.Namespace) -> int:
    from rich.console import Console

    from stratagem._commands.doctor import report

    return report(Console())


def _top(options: argparse.Namespace) -> int:
    from stratagem._commands.top import serve_page, watch

    if options.web:
        return serve_page(cluster=options.cluster, address=options.address)
    return watch(cluster=options.cluster, once=options.once, interval_s=options.interval)


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


def _certificates(options: argparse.Namespace) -> int:
    from stratagem._commands.certificates import make_certificates

    names = options.name or ["task"]
    print("\n".join(make_certificates(Path(options.directory), names, days=options.days)))
    return 0


def _version(_options: argparse.Namespace) -> int:
    import torch

    import stratagem

    python = ".".join(map(str, sys.version_info[:3]))
    print(f"stratagem {stratagem.__version__} (torch {torch.__version__}, Python {python})")
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": _train,
    "cluster": _cluster,
    "server": _server,
    "demo": _demo,
    "doctor": _doctor,
    "top": _top,
    "checkpoint": _checkpoint,
    "certificates": _certificates,
    "version": _version,
}
