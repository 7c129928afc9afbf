"""The wheel is complete, works outside the repository, and is typed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("build"))


def build(place: Path, **environment: str) -> Path:
    """Build a wheel from a copy, so that the build leaves nothing in the repository."""
    copy = place / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    shutil.copytree(
        ROOT / "src",
        copy / "src",
        ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "*.so"),
    )
    # The environment of the tests has setuptools; an isolated build would download it again.
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", str(place), str(copy), cwd=place, **environment)
    (built,) = place.glob("stratagem-*.whl")
    return built


def test_the_wheel_holds_every_module_and_the_type_marker(wheel: Path) -> None:
    """The wheel contains every module of ``src`` and the marker for type checkers."""
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/stratagem").rglob("*.py")
    }
    assert expected <= names
    assert "stratagem/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    has_kernels = any(name.startswith("stratagem/_ps/_row_kernels.") for name in names)
    assert has_kernels == (shutil.which("cc") is not None or shutil.which("gcc") is not None)


def test_the_wheel_is_complete_without_a_compiler(tmp_path: Path) -> None:
    """The kernels in C are optional."""
    names = zipfile.ZipFile(build(tmp_path, CC="no-such-compiler")).namelist()
    assert "stratagem/_ps/row_kernels.py" in names
    assert not any("_row_kernels." in name for name in names)


@pytest.mark.slow
def test_the_installed_package_works_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    """``pip install`` gives a library and a command that do not need the clone."""
    target = tmp_path / "installed"
    run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)),
        str(wheel),
        cwd=tmp_path,
    )
    program = (
        "import stratagem as sg\n"
        "strategy = sg.OneDeviceStrategy('cpu:0')\n"
        "print(sg.__file__, strategy.run(lambda x: 2 * x, args=(21,)))\n"
    )
    out = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(target))
    assert out.split() == [str(target / "stratagem" / "__init__.py"), "42"]
    assert (target / "bin" / "stratagem").exists()
    version = run(
        sys.executable, "-m", "stratagem", "version", cwd=tmp_path, PYTHONPATH=str(target)
    )
    assert "0.1.0" in version


def test_the_extras_are_named() -> None:
    """Every optional dependency is imported by some code, and development has all of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras.keys() == {
        *("dashboard", "data", "demo", "dev", "docs"),
        *("keras", "parquet", "ray", "tensorboard", "tls"),
    }
    everything = ",".join(sorted(extras.keys() - {"dev"}))
    assert f"stratagem[{everything}]" in extras["dev"]
    needed = {"torch", "numpy", "msgspec", "cloudpickle", "rich"}
    assert needed <= {name.split(">")[0] for name in project["dependencies"]}
    assert project["scripts"] == {"stratagem": "stratagem.cli:main"}


def test_continuous_integration_runs_the_readmes_own_command() -> None:
    """``.ci/run`` and README name the same command, and it is executable."""
    script = ROOT / ".ci" / "run"
    assert "make check test" in script.read_text()
    assert "`make check test`" in (ROOT / "README.md").read_text()
    assert os.access(script, os.X_OK)
