"""Rules about the source code that a program can check: layers, access to the outside, sizes, names.

The layers are explained in ``docs/design/0001-layers-and-contracts.md``. An exception to a rule is listed
here, with its reason.
"""

from __future__ import annotations

import ast
import collections
import functools
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import stratagem as sg

SOURCE = Path(__file__).parents[1] / "src" / "stratagem"
FILES = sorted(SOURCE.rglob("*.py"))
NAMES = [path.relative_to(SOURCE).as_posix() for path in FILES]

# Packages and top-level modules by layer, the lowest first. A file imports only from lower layers and
# from its own package.
LAYERS: list[set[str]] = [
    {"errors", "_owner", "_private_files", "_snapshots", "_streaming_metrics", "_usage"},
    {"_recorders"},
    {"config", "metrics"},
    {"_faults"},
    {"_core", "_wire"},
    {"_data", "_ps"},
    {"_strategies"},
    {"_checkpoint"},
    {"_cluster"},
    {"_keras"},
    {"_monitor"},
    {"data", "cluster_resolver", "partitioners", "nn", "optim"},
    {"compat", "launch", "testing"},
    {"integrations"},
    {"_demo"},
    {"_commands"},
    {"cli"},
    {"__main__"},
]
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}

# Sub-packages and the siblings that they may import. A sub-package is named after the process that runs
# its code, so that a server contains no client code and a worker no coordinator code.
SIBLINGS: dict[str, set[str]] = {
    "_ps": set(),
    "_ps/blocks": {"_ps"},
    "_ps/server": {"_ps", "_ps/blocks"},
    "_ps/client": {"_ps"},
    "_ps/tables": {"_ps"},
    "_ps/worker": {"_ps", "_ps/client", "_ps/tables"},
    "_ps/coordinator": {"_ps", "_ps/client", "_ps/tables"},
    "_cluster": set(),
    "_cluster/discovery": {"_cluster"},
    "_cluster/worker": {"_cluster"},
    "_cluster/launch": {"_cluster", "_cluster/discovery", "_cluster/worker"},
    "_cluster/coordinator": {"_cluster", "_cluster/discovery", "_cluster/launch"},
    "_core": {"_core/torch_patches"},
    "_core/torch_patches": {"_core"},
}

# (file, package) pairs that break a rule above, and why.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("_core/keras_import.py", "_keras"): "adapts Keras when a program imports it",
    ("_core/context.py", "_strategies"): "creates the default strategy on first use",
    ("_strategies/parameter_server.py", "_cluster"): "entering the scope creates the coordinator",
}

# Files that import modules whose names are not written in them, and why.
IMPORTS_BY_NAME: dict[str, str] = {
    "_keras/keras_names.py": "looks for names of Keras that may be missing",
    "_keras/keras_patches.py": "imports its own modules by name",
    "_core/torch_patches/private_api.py": "looks for names of torch that may be missing",
    "_ps/server/shard_optimizer.py": "optimizer classes arrive as dotted names and are checked",
    "_strategies/base.py": "`extended` and old spellings are implemented in compat",
}

# Modules and attributes of the outside world, and the only files or packages that may use them. Dotted
# names are matched as imports and as attribute paths, so `os.environ` is found however `os` is imported.
GATES: dict[str, set[str]] = {
    "socket": {"_wire/", "_monitor/web_server.py"},
    "socketserver": set(),
    "ssl": {"_wire/"},
    "asyncio": {"_monitor/web_server.py"},
    "tornado": {"_monitor/web_server.py"},
    "bokeh": {
        "_monitor/page.py",
        "_monitor/web_server.py",
        "_monitor/dashboard.py",
    },
    "ray": {"_cluster/launch/", "_data/ray_source.py", "integrations/ray.py"},
    "prometheus_client": {"_monitor/prometheus.py"},
    "http": set(),
    "urllib.request": set(),
    "msgspec": {
        "_wire/message_base.py",
        "_wire/messages.py",
        "_wire/server_messages.py",
        "_wire/checkpoint_messages.py",
        "_wire/codec.py",
    },
    "cloudpickle": {
        "_wire/codec.py",
        "_wire/data_values.py",  # asks for sent classes
        "_wire/object_bytes.py",
    },
    # Checkpoints write pickles (torch's format); they read one only as torch.load does.
    "pickle": {
        "_wire/codec.py",
        "_wire/data_values.py",  # PickleBuffer
        "_wire/object_bytes.py",
        "_ps/blocks/torch_archive.py",
        "_checkpoint/dcp_metadata.py",
        "_checkpoint/encoding.py",
    },
    "marshal": set(),
    "mmap": {"_wire/shm.py"},
    "os.memfd_create": {"_wire/shm.py", "_wire/task_notices.py"},
    "multiprocessing": set(),
    "torch.multiprocessing": set(),
    "subprocess": {"_cluster/launch/", "_demo/run.py"},
    "signal": {"_cluster/launch/", "_checkpoint/sigterm.py", "_faults.py"},
    "os.fork": {"_cluster/launch/"},
    "os.kill": {"_cluster/launch/", "_faults.py"},
    "os.killpg": {"_cluster/launch/"},
    "os.environ": {"config.py"},
    "os.getenv": {"config.py"},
    "os.putenv": set(),
    "contextvars": {"_core/context.py"},
    "threading.local": {"_core/context.py"},
    # Names that torch may move without notice.
    "torch._C": {"_core/torch_patches/private_api.py"},
    "torch._GLOBAL_DEVICE_CONTEXT": {"_core/torch_patches/private_api.py"},
    "torch._compile": {"_core/torch_patches/private_api.py"},
    "torch._dynamo": {"_core/torch_patches/private_api.py"},
    "torch.utils._pytree": {"_core/torch_patches/private_api.py"},
    "torch._foreach_add_": {"_core/torch_patches/private_api.py"},
    "torch._foreach_copy_": {"_core/torch_patches/private_api.py"},
    "torch.autograd._engine_run_backward": {"_core/torch_patches/private_api.py"},
    "torch._functorch": {"_core/torch_patches/private_api.py"},
    "torch._inductor": set(),
}

MOST_LINES = 500


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((SOURCE / name).read_text(encoding="utf-8"), filename=name)


def top_package(name: str) -> str:
    """Return the top-level package or module of a file: ``_core/values.py`` -> ``_core``."""
    return name.split("/")[0].removesuffix(".py")


def package_of(name: str) -> str:
    """Return the innermost package: ``_ps/client/outbox.py`` -> ``_ps/client``."""
    return name.rpartition("/")[0] or name.removesuffix(".py")


@functools.cache
def imports_of(name: str) -> list[tuple[int, str]]:
    """Return every absolute dotted name that a file imports, also inside functions, with its line."""
    return list(_imports_of(name))


def _imports_of(name: str) -> Iterator[tuple[int, str]]:
    package = ["stratagem", *name.split("/")[:-1]]
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                kept = package[: len(package) - node.level + 1]
                base = ".".join([*kept, base]).rstrip(".")
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            # A name that is not written out could be any module, the package itself included.
            text = node.args[0]
            if isinstance(text, ast.Constant):
                yield node.lineno, str(text.value)
            elif name not in IMPORTS_BY_NAME:
                yield node.lineno, "stratagem"


def test_every_package_has_a_layer() -> None:
    """A new package gets its place before it is used."""
    packages = {top_package(name) for name in NAMES} - {"__init__"}
    assert packages - LAYER_OF.keys() == set(), "add these to LAYERS, and to docs/design/0001"


def test_imports_go_to_lower_layers_only() -> None:
    """No package imports from a higher layer, from its own layer, or from `stratagem` itself."""
    wrong = []
    for name in NAMES:
        if name == "__init__.py":
            continue
        here = top_package(name)
        for line, imported in imports_of(name):
            parts = imported.split(".")
            if parts[0] != "stratagem":
                continue
            if len(parts) == 1 or parts[1] not in LAYER_OF:
                # `import stratagem` can load everything, so only the layers above all others may do it.
                if LAYER_OF[here] <= LAYER_OF["_cluster"]:
                    wrong.append(f"{name}:{line} imports the package itself ({imported})")
                continue
            there = parts[1]
            if there == here or LAYER_OF[there] < LAYER_OF[here] or (name, there) in EXCEPTIONS:
                continue
            wrong.append(f"{name}:{line} imports {imported}: {there} is not in a lower layer")
    assert wrong == []


def sub_package_of(imported: str) -> str:
    """Return the package that defines an imported name, as a path below `stratagem`."""
    parts = imported.split(".")[1:]
    while parts and not (SOURCE / "/".join(parts) / "__init__.py").exists():
        parts.pop()
    return "/".join(parts)


def test_sub_packages_import_only_the_siblings_that_they_may() -> None:
    """For example, `_ps/client` imports nothing of `_ps/server`."""
    wrong = []
    for name in NAMES:
        here = package_of(name)
        if here not in SIBLINGS:
            continue
        for line, imported in imports_of(name):
            there = sub_package_of(imported) if imported.startswith("stratagem.") else ""
            if (
                there.split("/")[0] == here.split("/")[0]
                and there != here
                and there not in SIBLINGS[here]
                and (name, there) not in EXCEPTIONS
            ):
                wrong.append(f"{name}:{line} imports {imported}: {here} may not import {there}")
    assert wrong == []
    nested = {package_of(name) for name in NAMES if name.count("/") > 1}
    assert nested - SIBLINGS.keys() == set(), "add these to SIBLINGS"


@functools.cache
def attribute_paths(name: str) -> list[tuple[int, str]]:
    """Return dotted paths used in expressions, such as ``os.environ``, with the module's real name."""
    return list(_attribute_paths(name))


def _attribute_paths(name: str) -> Iterator[tuple[int, str]]:
    tree = tree_of(name)
    real_name = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                real_name[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                path.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in real_name:
                yield node.lineno, ".".join([real_name[inner.id], *reversed(path)])


def may_use(name: str, allowed: set[str]) -> bool:
    return any(name == one or (one[-1] == "/" and name.startswith(one)) for one in allowed)


@functools.cache
def used_names(name: str) -> list[tuple[int, str]]:
    return [*imports_of(name), *attribute_paths(name)]


@pytest.mark.parametrize("thing", sorted(GATES))
def test_outside_things_are_used_in_one_place(thing: str) -> None:
    """Sockets, processes, pickles, environment and torch's private names each have one package."""
    wrong = [
        f"{name}:{line} uses {path}; only {GATES[thing] or 'no file'} may"
        for name in NAMES
        if not may_use(name, GATES[thing])
        for line, path in used_names(name)
        if path == thing or path.startswith(f"{thing}.")
    ]
    assert wrong == []


def test_no_hasattr_and_no_work_in_del() -> None:
    """Ask by type or by a declared property; owners have `close()`."""
    wrong = []
    for name in NAMES:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.FunctionDef) and node.name == "__del__":
                wrong.append(f"{name}:{node.lineno} defines __del__")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr":
                wrong.append(f"{name}:{node.lineno} calls hasattr")
    assert wrong == []


def test_every_module_has_a_docstring() -> None:
    """A file begins with a sentence about its contents."""
    assert [name for name in NAMES if not ast.get_docstring(tree_of(name))] == []


def line_count(name: str) -> int:
    return len((SOURCE / name).read_text(encoding="utf-8").splitlines())


def test_no_file_is_too_long() -> None:
    """Comments and docstrings count: a reader reads them too."""
    too_long = {name: line_count(name) for name in NAMES if line_count(name) > MOST_LINES}
    assert too_long == {}, f"split these into files of at most {MOST_LINES} lines"


def test_one_small_mechanism_finds_changes() -> None:
    """It answers "has this changed since workers saw it", for functions, modules and optimizers."""
    files = (
        "_core/fingerprints.py",
        "_core/torch_patches/change_notes.py",
        "_ps/coordinator/change_tracking.py",
    )
    lines = [(SOURCE / name).read_text(encoding="utf-8").count("\n") for name in files]
    assert sum(lines) <= 900


def test_no_two_modules_and_no_two_classes_share_a_name() -> None:
    """A name in a traceback or a search result means one thing."""
    modules = collections.Counter(path.stem for path in FILES if path.name != "__init__.py")
    assert {name for name, count in modules.items() if count > 1} == set()
    files_of: dict[str, list[str]] = {}
    for name in NAMES:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.ClassDef):
                files_of.setdefault(node.name, []).append(name)
    assert {name: files for name, files in files_of.items() if len(files) > 1} == {}


# Names.


def test_all_is_exact() -> None:
    """`__all__` lists every public name once, and nothing else."""
    assert sorted(set(sg.__all__)) == sorted(sg.__all__)
    assert set(sg.__all__) == {*sg._MODULE_OF, "__version__"}
    for name in sg.__all__:
        assert getattr(sg, name) is not None
    assert dir(sg) == sg.__all__


def test_type_checkers_see_the_same_names() -> None:
    """The block for type checkers and the table for the interpreter name the same modules."""
    tree = tree_of("__init__.py")
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    ]
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        assert node.module is not None
        for alias in node.names:
            assert alias.asname == alias.name
            seen[alias.name] = node.module.removeprefix("stratagem").removeprefix(".")
    assert seen == sg._MODULE_OF


def public_modules() -> list[ModuleType]:
    names = [name for name, module in sg._MODULE_OF.items() if module == ""]
    return [importlib.import_module(f"stratagem.{name}") for name in sorted(names)]


def listed_by(module: ModuleType) -> list[str]:
    """Return the names that a public module offers; `errors` and `config` offer all their classes."""
    if module.__name__ in ("stratagem.errors", "stratagem.config"):
        return sorted(
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_"
        )
    return list(module.__all__)


def public_objects() -> Iterator[tuple[str, object]]:
    """Yield every public object: the names of the package and of its public modules."""
    for name, module_name in sg._MODULE_OF.items():
        if module_name:
            yield f"sg.{name}", getattr(sg, name)
    for module in public_modules():
        for name in listed_by(module):
            yield f"sg.{module.__name__.removeprefix('stratagem.')}.{name}", getattr(module, name)


def test_public_modules_list_exactly_what_they_offer() -> None:
    """``__all__`` of a public module lists every public name that it defines, once."""
    for module in public_modules():
        listed = listed_by(module)
        assert len(set(listed)) == len(listed), module.__name__
        if module.__name__ == "stratagem.config":
            continue  # its functions are for the other packages
        defined = {
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and (inspect.isclass(value) or inspect.isfunction(value))
            and value.__module__ == module.__name__
        }
        assert defined - set(listed) == set(), module.__name__
        for name in listed:
            getattr(module, name)


def test_every_public_name_has_a_docstring_with_an_example() -> None:
    """Examples are doctests, so every public name is also run."""
    lacking = []
    for name, value in public_objects():
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        text = value.__doc__ or ""
        is_error = inspect.isclass(value) and issubclass(value, BaseException)
        # One example is enough for the exceptions; each still says when it is raised.
        if not text or (not is_error and ">>>" not in text):
            lacking.append(name)
    assert lacking == []


def test_every_public_name_is_in_the_reference() -> None:
    """The reference page names each public name once, and no other."""
    page = (SOURCE.parents[1] / "docs" / "reference.md").read_text(encoding="utf-8")
    documented = [
        line.removeprefix("::: ").strip() for line in page.splitlines() if line.startswith("::: ")
    ]
    expected = {f"stratagem.{name}" for name in sg._MODULE_OF}
    assert sorted(documented) == sorted(expected)


def test_every_public_name_is_in_the_changelog() -> None:
    """People who upgrade can read about every name."""
    page = (SOURCE.parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [name for name in sg._MODULE_OF if f"`{name}`" not in page] == []


# Loading.


def loaded_by(program: str) -> set[str]:
    """Return the modules that a program loads in a new interpreter, beyond those of torch."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        f"{program}\n"
        "print('\\n'.join(sorted(set(sys.modules) - before)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True
    )
    return set(done.stdout.split())


@pytest.mark.process
def test_importing_the_package_loads_nothing_else() -> None:
    """`import stratagem` loads no other module, ours or foreign."""
    assert loaded_by("import stratagem") == {"stratagem"}


@pytest.mark.process
def test_one_device_never_loads_the_cluster_parts() -> None:
    """A program that trains on one device loads no code for processes, sockets or codecs."""
    loaded = loaded_by(
        "import stratagem as sg\n"
        "strategy = sg.OneDeviceStrategy('cpu:0')\n"
        "with strategy.scope():\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "strategy.run(lambda: model(torch.ones(1, 2)))\n"
        "strategy.close()\n"
    )
    heavy = (
        "stratagem._cluster",
        "stratagem._ps",
        "stratagem._wire",
        "msgspec",
        "cloudpickle",
        "rich",
    )
    assert [name for name in loaded if name.startswith(heavy)] == []
    assert "stratagem._strategies.one_device" in loaded
