"""The command line: exit codes, help with examples, errors in one line."""

import io
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from warm_start import run_program

from stratagem import cli, config


def _run(*words: str, cwd=None, **options) -> subprocess.CompletedProcess[str]:
    return run_program(
        [sys.executable, "-m", "stratagem", *words],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=cwd,
        **options,
    )


def test_version_names_what_matters(capsys):
    """`stratagem version` prints Stratagem, torch and Python."""
    assert cli.main(["version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("stratagem ")
    assert "torch" in out
    assert "Python" in out


@pytest.mark.parametrize("command", ["train", "server", "demo", "doctor", "top", "version"])
def test_every_command_has_help_with_examples(command, capsys):
    """--help ends in examples and exits with 0."""
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"stratagem {command}" in capsys.readouterr().out.split("examples:")[1]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly"],
        ["train"],
        ["demo", "--workers", "0"],
        ["train", "x.py", "--strategy", "z"],
        ["version", "twice"],
    ],
)
def test_a_wrong_command_line_exits_with_2(words, capsys):
    """Usage errors are argparse's own."""
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert "usage: stratagem" in capsys.readouterr().err


def test_a_missing_script_is_one_readable_line(capsys):
    """The error names the file and where it was looked for; no traceback."""
    assert cli.main(["train", "no_such_script.py"]) == 1
    err = capsys.readouterr().err
    assert "no_such_script.py" in err
    assert "Traceback" not in err


def test_workers_without_parameter_servers_are_reported(tmp_path, capsys):
    """A forgotten `--strategy ps` is visible: the script trains on one device."""
    script = tmp_path / "script.py"
    script.write_text("")
    assert cli.main(["train", str(script), "--workers", "3"]) == 0
    assert "--workers and --ps have no effect with --strategy one" in capsys.readouterr().err
    assert cli.main(["train", str(script)]) == 0
    assert not capsys.readouterr().err


def test_debug_shows_the_traceback():
    """--debug lets the exception through, before or after the command's name."""
    for words in (["--debug", "train", "nope.py"], ["train", "--debug", "nope.py"]):
        with pytest.raises(FileNotFoundError):
            cli.main(words)


@pytest.mark.parametrize("strategy", ["one", "central", "mirrored"])
def test_train_gives_the_script_its_strategy_and_arguments(strategy, tmp_path, capsys):
    """sg.auto_strategy() in the script is the strategy asked for; argv is the script's own."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import stratagem as sg
            print(type(sg.auto_strategy()).__name__, sys.argv[1:], __name__)
            """
        )
    )
    words = ["train", str(script), "--epochs", "3", "--strategy", strategy, "--replicas", "2"]
    assert cli.main(words) == 0
    name = {"one": "OneDevice", "central": "CentralStorage", "mirrored": "Mirrored"}[strategy]
    assert capsys.readouterr().out.strip() == f"{name}Strategy ['--epochs', '3'] __main__"


@pytest.mark.parametrize("strategy", ["one", "central", "mirrored"])
def test_one_script_trains_under_every_strategy_of_one_machine(strategy, capsys):
    """The example for any strategy; with parameter servers see test_cluster_commands.py."""
    script = Path(__file__).parents[2] / "examples" / "any_strategy.py"
    assert cli.main(["train", str(script), "--strategy", strategy, "--epochs", "3"]) == 0
    assert float(capsys.readouterr().out.split()[-1]) > 0.8


def test_words_after_two_dashes_are_the_scripts_even_if_they_look_like_ours(tmp_path, capsys):
    """A script may have its own --workers."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    assert cli.main(["train", str(script), "data.csv", "--", "--workers", "9"]) == 0
    assert capsys.readouterr().out.strip() == "['data.csv', '--workers', '9']"


@pytest.mark.process
def test_a_failing_script_exits_with_1_and_says_why(tmp_path):
    """Run the command in a process; check its exit code and the line on stderr."""
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('the learning rate is a banana')")
    done = _run("train", str(script))
    assert done.returncode == 1
    assert "ValueError: the learning rate is a banana" in done.stderr
    assert "Traceback" not in done.stderr


def test_server_without_a_cluster_says_what_is_missing(monkeypatch, capsys):
    """No --cluster, no TF_CONFIG: the remedy is in the message."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert cli.main(["server"]) == 1
    assert "Give --cluster JSON or set TF_CONFIG" in capsys.readouterr().err


def test_server_with_a_broken_cluster_quotes_it(capsys):
    """Not JSON, and JSON that is no cluster, are both quoted back."""
    assert cli.main(["server", "--cluster", "{ps"]) == 1
    assert "'{ps'" in capsys.readouterr().err
    assert cli.main(["server", "--cluster", "[]"]) == 1
    assert "describes no cluster" in capsys.readouterr().err


def test_unknown_log_level_is_refused(monkeypatch, capsys):
    """STRATAGEM_LOG=loud is not silently ignored."""
    monkeypatch.setenv("STRATAGEM_LOG", "loud")
    with pytest.raises(ValueError, match="loud"):
        cli.main(["version"])


def test_log_lines_go_to_the_current_standard_error(monkeypatch):
    """Notebooks and test runners replace sys.stderr and close the old one."""
    logger = logging.getLogger("stratagem")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)
    with io.StringIO() as closed_by_then:
        monkeypatch.setattr(sys, "stderr", closed_by_then)
        config.set_up_logging("warning")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    logger.warning("a worker is lost")
    assert sys.stderr.getvalue() == "W stratagem: a worker is lost\n"


@pytest.mark.process
def test_the_environment_turns_on_logging_in_a_program_of_your_own():
    """STRATAGEM_LOG=debug python my_program.py shows what we log; unset, nothing is printed."""
    program = (
        "import logging, stratagem as sg\n"
        "sg.OneDeviceStrategy('cpu:0')\n"
        "logging.getLogger('stratagem.anything').debug('a detail')\n"
    )
    for level, wanted in (("debug", "D stratagem.anything: a detail\n"), ("", "")):
        done = run_program(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=250,
            env={**os.environ, "STRATAGEM_LOG": level},
        )
        assert done.stderr == wanted


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--strategy", "ps", "--workers", "2:4"], "a range of workers, and resources, are for"),
        (["--strategy", "ps", "--resources-per-ps", "CPU=1"], "are for --on ray"),
        (["--on", "ray", "--strategy", "central"], "--on ray is for --strategy ps"),
        (["--on", "ray", "--cluster", "dev"], "and not with --cluster"),
    ],
)
def test_options_of_clusters_that_do_not_fit_are_refused(
    options: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('not run')")
    assert cli.main(["train", str(script), *options]) == 1
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("text", ["CPU", "CPU=many", "=2", "CPU=1,,"])
def test_resources_that_cannot_be_read_are_wrong_arguments(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "script.py", "--on", "ray", "--resources-per-worker", text])
    assert ended.value.code == 2
    assert "expected resources such as CPU=2,memory=8e9" in capsys.readouterr().err
