"""The house rules that a machine can check: who imports whom, one door to each outside thing, names.

A rule that must be broken is broken here, by name and with its reason, not silently in the code.
The levels and rooms are those of ``docs/design/0001-rooms-and-contracts.md``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import stratagem as sg

SOURCE = Path(__file__).parents[1] / "src" / "stratagem"
FILES = sorted(SOURCE.rglob("*.py"))
NAMES = [path.relative_to(SOURCE).as_posix() for path in FILES]

# Lowest first. A module imports from lower levels and from its own room only.
LEVELS: list[set[str]] = [
    {"errors", "_owner"},
    {"config", "metrics"},
    {"_core", "_wire"},
    {"_data", "_ps"},
    {"_strategies"},
    {"_checkpoint"},
    {"_cluster"},
    {"data", "cluster_resolver", "partitioners", "nn"},
    {"compat", "launch", "testing"},
    {"_demo"},
    {"_commands"},
    {"cli"},
    {"__main__"},
]
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

# file -> room it may see although it lies above or beside, and why.
UPWARD: dict[tuple[str, str], str] = {
    ("_core/context.py", "_strategies"): "the default strategy is a strategy, made when asked for",
    (
        "_strategies/parameter_server.py",
        "_cluster",
    ): "entering the scope makes the coordinator (PSS-5)",
}

# file -> why it imports modules whose names are not written in it.
IMPORTS_BY_NAME: dict[str, str] = {
    "_core/torch_patches/private_api.py": "names of torch are looked for where they may be missing",
    "_ps/server/shard_optimizer.py": "optimizer classes arrive as dotted names and are checked against a list",
    "_strategies/base.py": "`extended` and old spellings answer on the object but live in compat",
}

# An outside thing -> the files or rooms that may touch it. Dotted names are matched as imports and
# as attribute paths, so `os.environ` is found however `os` was imported.
DOORS: dict[str, set[str]] = {
    "socket": {"_wire/"},
    "socketserver": set(),
    "ssl": {"_wire/"},
    "asyncio": set(),
    "http": set(),
    "urllib.request": set(),
    "msgspec": {"_wire/messages.py", "_wire/codec.py"},
    "cloudpickle": {"_wire/codec.py"},
    # Checkpoints write pickles (torch's format); they read one only as torch.load does.
    "pickle": {
        "_wire/codec.py",
        "_checkpoint/torch_archive.py",
        "_checkpoint/dcp_metadata.py",
        "_checkpoint/encoding.py",
    },
    "marshal": set(),
    "mmap": {"_wire/shm.py"},
    "os.memfd_create": {"_wire/shm.py"},
    "multiprocessing": {"_cluster/launch/fork_server.py"},
    "torch.multiprocessing": {"_cluster/launch/fork_server.py"},
    "subprocess": {"_cluster/launch/fork_server.py"},
    "signal": {"_cluster/launch/fork_server.py", "_checkpoint/sigterm.py"},
    "os.fork": {"_cluster/launch/fork_server.py"},
    "os.kill": {"_cluster/launch/fork_server.py"},
    "os.killpg": {"_cluster/launch/fork_server.py"},
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

# Lines of code: docstrings, comments and blank lines are not held against a file.
MOST_LINES = 410
# file -> why it is one room although it is longer.
LONG: dict[str, str] = {
    "_ps/client/ps_client.py": "the one face of all servers; links, batches and mappings have their own files",
    "_cluster/worker/worker.py": "two threads and the session they meet in; apart they could not be read",
}


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((SOURCE / name).read_text(encoding="utf-8"), filename=name)


def room_of(name: str) -> str:
    """``_core/values.py`` -> ``_core``; ``metrics.py`` -> ``metrics``."""
    return name.split("/")[0].removesuffix(".py")


@functools.cache
def imports_of(name: str) -> list[tuple[int, str]]:
    """Every absolute dotted name a file imports, with its line; imports in functions included."""
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
            # Imports by name count too; a name that is not written out could be the front door.
            text = node.args[0]
            if isinstance(text, ast.Constant):
                yield node.lineno, str(text.value)
            elif name not in IMPORTS_BY_NAME:
                yield node.lineno, "stratagem"


def test_every_module_has_a_level() -> None:
    """A new room is given its place in the house before it is used."""
    rooms = {room_of(name) for name in NAMES} - {"__init__"}
    assert rooms - LEVEL_OF.keys() == set(), "give these a level in LEVELS, and in docs/design/0001"


def test_imports_go_down_only() -> None:
    """No room sees one above it, or beside it, or the front door."""
    wrong = []
    for name in NAMES:
        if name == "__init__.py":
            continue
        here = room_of(name)
        for line, imported in imports_of(name):
            parts = imported.split(".")
            if parts[0] != "stratagem":
                continue
            if len(parts) == 1 or parts[1] not in LEVEL_OF:
                # `import stratagem`, `from stratagem import OneDeviceStrategy`: the front door sees
                # all, so only what stands above every room may come in through it.
                if LEVEL_OF[here] <= LEVEL_OF["_cluster"]:
                    wrong.append(f"{name}:{line} imports the front door ({imported})")
                continue
            there = parts[1]
            if there == here or LEVEL_OF[there] < LEVEL_OF[here] or (name, there) in UPWARD:
                continue
            wrong.append(f"{name}:{line} imports {imported}: {there} is not below {here}")
    assert wrong == []


@functools.cache
def attribute_paths(name: str) -> list[tuple[int, str]]:
    """Dotted paths used in expressions, such as ``os.environ``, with the module's true name."""
    return list(_attribute_paths(name))


def _attribute_paths(name: str) -> Iterator[tuple[int, str]]:
    tree = tree_of(name)
    true_name = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                true_name[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                path.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in true_name:
                yield node.lineno, ".".join([true_name[inner.id], *reversed(path)])


def may_pass(name: str, keepers: set[str]) -> bool:
    return any(
        name == keeper or (keeper[-1] == "/" and name.startswith(keeper)) for keeper in keepers
    )


@pytest.mark.parametrize("thing", sorted(DOORS))
def test_one_door_to_each_outside_thing(thing: str) -> None:
    """Whoever wants to know how we touch the outside reads one file."""
    wrong = []
    for name in NAMES:
        if may_pass(name, DOORS[thing]):
            continue
        for line, path in [*imports_of(name), *attribute_paths(name)]:
            if path == thing or path.startswith(f"{thing}."):
                wrong.append(
                    f"{name}:{line} touches {path}; its door is {DOORS[thing] or 'closed'}"
                )
    assert wrong == []


def test_no_hasattr_and_no_work_in_del() -> None:
    """Ask by type or by a declared property; whoever creates closes."""
    wrong = []
    for name in NAMES:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.FunctionDef) and node.name == "__del__":
                wrong.append(f"{name}:{node.lineno} defines __del__")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr":
                wrong.append(f"{name}:{node.lineno} calls hasattr")
    assert wrong == []


def test_every_module_says_what_lives_in_it() -> None:
    """The first lines of a file are its room's sign."""
    assert [name for name in NAMES if not ast.get_docstring(tree_of(name))] == []


def code_lines(name: str) -> int:
    """Lines of a file that hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    found: set[int] = set()
    text = (SOURCE / name).read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in empty and token.type != tokenize.ENDMARKER:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstrings)


def test_no_module_is_too_long_without_a_reason() -> None:
    """Beyond the limit a file is two rooms, or says here why it is one."""
    lengths = {name: code_lines(name) for name in NAMES}
    too_long = {name: n for name, n in lengths.items() if n > MOST_LINES and name not in LONG}
    assert too_long == {}, "make two rooms of these, or give the reason in LONG"
    excused = {name for name in LONG if lengths[name] < MOST_LINES * 3 / 4}
    assert excused == set(), "these need no reason any more"


# Names.


def test_all_is_exact() -> None:
    """Every name of the front door is there, is listed once, and nothing else is listed."""
    assert sorted(set(sg.__all__)) == sorted(sg.__all__)
    assert set(sg.__all__) == {*sg._MODULE_OF, "__version__"}
    for name in sg.__all__:
        assert getattr(sg, name) is not None
    assert dir(sg) == sg.__all__


def test_type_checkers_see_the_same_front_door() -> None:
    """The block for type checkers and the table for the interpreter name the same homes."""
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
            managed = node.module.removeprefix("stratagem").removeprefix(".")
            assert alias.asname == alias.name
            seen[alias.name] = managed
    assert seen == sg._MODULE_OF


def public_modules() -> list[ModuleType]:
    names = [name for name, managed in sg._MODULE_OF.items() if managed == ""]
    return [importlib.import_module(f"stratagem.{name}") for name in sorted(names)]


def listed_by(module: ModuleType) -> list[str]:
    """Names a public module offers; `errors` and `config` offer every class they define."""
    if module.__name__ in ("stratagem.errors", "stratagem.config"):
        return sorted(
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_"
        )
    return list(module.__all__)


def public_objects() -> Iterator[tuple[str, object]]:
    """Everything a user can name: the front door's names and those of the public modules."""
    for name, managed in sg._MODULE_OF.items():
        if managed:
            yield f"sg.{name}", getattr(sg, name)
    for module in public_modules():
        for name in listed_by(module):
            yield f"sg.{module.__name__.removeprefix('stratagem.')}.{name}", getattr(module, name)


def test_public_modules_list_exactly_what_they_offer() -> None:
    """A public module's ``__all__`` lists nothing twice and holds every public name it defines."""
    for module in public_modules():
        listed = listed_by(module)
        assert len(set(listed)) == len(listed), module.__name__
        if module.__name__ == "stratagem.config":
            continue  # its functions are for the other rooms
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
    """Examples are doctests, so this also means: every public name is run."""
    lacking = []
    for name, value in public_objects():
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        text = value.__doc__ or ""
        is_error = inspect.isclass(value) and issubclass(value, BaseException)
        # One example stands for the family of exceptions; each still says when it is raised.
        if not text or (not is_error and ">>>" not in text):
            lacking.append(name)
    assert lacking == []


def test_every_public_name_is_in_the_reference() -> None:
    """The reference in the documents names each public name once, and no other."""
    page = (SOURCE.parents[1] / "docs" / "reference.md").read_text(encoding="utf-8")
    documented = [
        line.removeprefix("::: ").strip() for line in page.splitlines() if line.startswith("::: ")
    ]
    expected = {f"stratagem.{name}" for name in sg._MODULE_OF}
    assert sorted(documented) == sorted(expected)


def test_every_public_name_is_in_the_changelog() -> None:
    """Whoever adds a name tells the people who upgrade."""
    page = (SOURCE.parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [name for name in sg._MODULE_OF if f"`{name}`" not in page] == []


# Loading.


def loaded_by(program: str) -> set[str]:
    """Modules a fresh interpreter has loaded after a program, beyond those torch loads."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        f"{program}\n"
        "print('\\n'.join(sorted(set(sys.modules) - before)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_else() -> None:
    """`import stratagem` costs nothing beyond torch: not one more module of ours or others'."""
    assert loaded_by("import stratagem") == {"stratagem"}


def test_one_device_never_loads_the_cluster_parts() -> None:
    """A program that trains on one device loads neither processes nor sockets nor codecs."""
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
