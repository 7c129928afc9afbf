"""`stratagem doctor` looks at the real machine and never hides a failed check."""

import os

from rich.console import Console

from stratagem._commands import doctor
from stratagem._commands.doctor import Verdict, examine


def _finding(subject):
    return next(finding for finding in examine() if finding.subject == subject)


def test_this_machine_is_fit():
    """Nothing is broken where the tests run."""
    assert [f for f in examine() if f.verdict is Verdict.BAD] == []


def test_a_missing_key_file_is_a_problem_with_a_remedy(monkeypatch, tmp_path):
    """The file is named and the command that creates it is given."""
    monkeypatch.delenv("STRATAGEM_CLUSTER_KEY", raising=False)
    monkeypatch.setenv("STRATAGEM_CLUSTER_KEY_FILE", str(tmp_path / "absent"))
    finding = _finding("cluster key")
    assert finding.verdict is Verdict.BAD
    assert "absent" in finding.found
    assert "chmod 600" in finding.remedy


def test_a_key_file_others_can_read_is_a_problem(monkeypatch, tmp_path):
    """A secret that everybody can read is not one."""
    key = tmp_path / "key"
    key.write_text("secret")
    os.chmod(key, 0o644)
    monkeypatch.delenv("STRATAGEM_CLUSTER_KEY", raising=False)
    monkeypatch.setenv("STRATAGEM_CLUSTER_KEY_FILE", str(key))
    assert _finding("cluster key").verdict is Verdict.BAD  # tasks refuse it
    os.chmod(key, 0o600)
    assert _finding("cluster key").verdict is Verdict.GOOD


def test_a_check_that_breaks_is_reported_not_hidden(monkeypatch):
    """An exception inside a check becomes a problem with its text, and exit code 3."""

    def _weather() -> doctor.Finding:
        raise OSError("no sky")

    monkeypatch.setattr(doctor, "_CHECKS", (_weather,))
    (finding,) = examine()
    assert finding.verdict is Verdict.BAD
    assert "OSError: no sky" in finding.found
    with open(os.devnull, "w") as sink:
        assert doctor.report(Console(file=sink)) == 3
