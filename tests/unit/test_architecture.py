"""The architecture and the style as tests: what the design says of every module must hold of every module.

Each check reads a tree of files and lists what is wrong with it. Beside each stands a control: a small tree with one
fault, which the check must find. A newcomer who breaks a rule learns it here, by name, before anyone reads the change.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.limits import DRAIN_S

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "common": {"common"},
    "ring": {"common", "ring"},
    "broker": {"common", "broker"},
    "worker": {"common", "ring", "worker"},
}
HEAVY = {"torch", "transformers", "numpy", "safetensors", "gguf", "accelerate", "llguidance", "cuda"}
"""What the broker's image does not hold."""
LIGHT_PACKAGES = {"common", "broker"}
IMPURE = {
    "zmq",
    "sqlite3",
    "sqlite_utils",
    "torch",
    "time",
    "threading",
    "random",
    "os",
    "socket",
    "subprocess",
    "secrets",
}
KINDS = ("values:", "rules:", "shell:")
FUNCTION_MAX_LINES = 70
FILE_MAX_LINES = 400
LONGER_FILES = {
    "common.messages": 600,  # one file lists what crosses the wire, in order of flow: two would hide the order
}
FOR_PROGRAMS = {"broker.api"}
"""What other people's programs import: documented and tested by an example, used by nothing of ours."""
FLAGS_OF_ONE_CALL = ("--version", "--if-absent")
"""They set nothing up."""
MAP_MARK = "<!-- map -->"
ONE_MACHINE = re.compile(r"/(?:home|root|work|Users)/\w|https?://[^\s'\"]*(?:/simple\b|/whl\b)|pythonhosted")
"""Paths and package indexes of one machine: they mean nothing to whoever reads this elsewhere."""
TEXT_FILES = {".py", ".md", ".toml", ".yaml", ".yml", ".sql", ".jsonl", ""}


@dataclass(frozen=True)
class Module:
    """One file of the four packages."""

    name: str
    path: Path
    source: str
    syntax: ast.Module

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @property
    def kind(self) -> str:
        words = (ast.get_docstring(self.syntax) or "").split()
        return words[0] if words else ""


@dataclass(frozen=True)
class Tree:
    """A checkout, read once."""

    root: Path
    modules: dict[str, Module]

    @staticmethod
    def read(root: Path) -> Tree:
        modules = {}
        for package in MAY_IMPORT:
            for path in sorted((root / package).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                source = path.read_text(encoding="utf-8")
                modules[name] = Module(name, path, source, ast.parse(source))
        return Tree(root, modules)

    def imports(self, module: Module) -> set[str]:
        """Full names of what a module imports, anywhere in it: modules of ours, and top-level names of others."""
        names: set[str] = set()
        here = module.name.split(".") if module.path.name == "__init__.py" else module.name.split(".")[:-1]
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
                base = ".".join(part for part in (base, node.module) if part)
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    names.add(inner if inner in self.modules else base)
        return {name if name.partition(".")[0] in MAY_IMPORT else name.partition(".")[0] for name in names}

    def reached(self, module: Module) -> dict[str, list[str]]:
        """Everything a module imports, directly or through others of ours, each with the way that leads there."""
        ways: dict[str, list[str]] = {}
        waiting = [(module, [module.name])]
        while waiting:
            current, way = waiting.pop()
            for name in sorted(self.imports(current)):
                if name in ways:
                    continue
                ways[name] = [*way, name]
                if name in self.modules:
                    waiting.append((self.modules[name], ways[name]))
        return ways


def layers(tree: Tree) -> list[str]:
    """common < ring < worker, common < broker; neither broker nor worker reaches the other, by any way."""
    problems = []
    for module in tree.modules.values():
        for name, way in tree.reached(module).items():
            top = name.partition(".")[0]
            if top in MAY_IMPORT and top not in MAY_IMPORT[module.package]:
                problems.append(f"{module.name} reaches {name}: {' > '.join(way)}")
    return problems


def lightness(tree: Tree) -> list[str]:
    """common and broker import nothing of the worker extra, not even inside a function."""
    return [
        f"{module.name} reaches {name}: {' > '.join(way)}"
        for module in tree.modules.values()
        if module.package in LIGHT_PACKAGES
        for name, way in tree.reached(module).items()
        if name in HEAVY
    ]


def purity(tree: Tree) -> list[str]:
    """Rules decide from their arguments: no clock, chance, socket, disk or thread, and no module of a shell."""
    problems = []
    for module in tree.modules.values():
        if module.kind != "rules:":
            continue
        problems += [f"{module.name} imports {name}" for name in sorted(tree.imports(module) & IMPURE)]
        problems += [
            f"{module.name} reaches the shell {name}: {' > '.join(way)}"
            for name, way in tree.reached(module).items()
            if name in tree.modules and tree.modules[name].kind == "shell:"
        ]
    return problems


def kinds(tree: Tree) -> list[str]:
    """Each module says in its first word what kind it is."""
    return [f"{m.name} opens with {m.kind or 'nothing'!r}" for m in tree.modules.values() if m.kind not in KINDS]


def function_length(tree: Tree) -> list[str]:
    """A function's body fits on a screen. Its head is left out: a command's declares its flags, which are data."""
    return [
        f"{module.name}.{node.name} has {length} lines"
        for module in tree.modules.values()
        for node in ast.walk(module.syntax)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.body[0].lineno + 1) > FUNCTION_MAX_LINES
    ]


def file_length(tree: Tree) -> list[str]:
    """A file is one room."""
    return [
        f"{module.name} has {length} lines"
        for module in tree.modules.values()
        if (length := len(module.source.splitlines())) > LONGER_FILES.get(module.name, FILE_MAX_LINES)
    ]


def dead_files(tree: Tree) -> list[str]:
    """Each module is imported by another, started as a process or named by an entry point. Tests keep nothing alive."""
    alive: set[str] = set(FOR_PROGRAMS)
    for module in tree.modules.values():
        alive |= tree.imports(module) - {module.name}
        constants = (node.value for node in ast.walk(module.syntax) if isinstance(node, ast.Constant))
        alive.update(text for text in constants if isinstance(text, str) and text in tree.modules)  # python -m NAME
    project = tomllib.loads((tree.root / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    groups = [project.get("scripts", {}), *project.get("entry-points", {}).values()]
    alive.update(value.partition(":")[0] for group in groups for value in group.values())
    return [
        f"{name} is used by nothing"
        for name, module in tree.modules.items()
        if name not in alive and module.path.name not in ("__init__.py", "__main__.py")
    ]


def guards(tree: Tree) -> list[str]:
    """Nothing hides a failure: no bare except, and no assert, which -O drops."""
    problems = []
    for module in tree.modules.values():
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                problems.append(f"{module.name}:{node.lineno} has a bare except")
            if isinstance(node, ast.Assert):
                problems.append(f"{module.name}:{node.lineno} guards with assert")
    return problems


def shadows(tree: Tree) -> list[str]:
    """No file has the name of a standard module: a traceback and a search should mean one thing."""
    return [
        f"{name} shadows the standard library's {module.path.stem}"
        for name, module in tree.modules.items()
        if module.path.stem in sys.stdlib_module_names and module.path.stem not in ("__init__", "__main__")
    ]


def dependency_reasons(tree: Tree) -> list[str]:
    """Each dependency says beside it why it is there."""
    text = (tree.root / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    wanted = [*project.get("dependencies", [])]
    for extra in project.get("optional-dependencies", {}).values():
        wanted += extra
    return [
        f"{requirement} has no reason"
        for requirement in wanted
        if not re.search(re.escape(f'"{requirement}"') + r",?\s*#\s*\w+", text)
    ]


def readme_map(tree: Tree) -> list[str]:
    """README's map, between two ``<!-- map -->``, names every module and nothing else.

    A module is named by its path (``broker/server.py``) or, in a fenced block, by its folder at the start of a line
    with the modules after it (``broker/  jobs sessions``; more of them on indented lines). This file, run as a
    program, prints such a block.
    """
    parts = (tree.root / "README.md").read_text(encoding="utf-8").split(MAP_MARK)
    if len(parts) < 3:
        return []
    named = set(re.findall(r"\b((?:common|ring|broker|worker)/[a-z0-9_/]+\.py)\b", parts[1]))
    for block in re.findall(r"^```\w*\n(.*?)^```", parts[1], re.DOTALL | re.MULTILINE):
        folder = ""
        for word in block.split():
            if word.endswith("/"):
                folder = word if word.partition("/")[0] in MAY_IMPORT else ""
            elif folder and re.fullmatch(r"[a-z0-9_]+", word):
                named.add(f"{folder}{word}.py")
    there = {
        module.path.relative_to(tree.root).as_posix()
        for module in tree.modules.values()
        if module.path.name not in ("__init__.py", "__main__.py")
    }
    return [f"the map names {name}, which is not there" for name in sorted(named - there)] + [
        f"the map leaves out {name}" for name in sorted(there - named)
    ]


def one_machine(tree: Tree) -> list[str]:
    """Nothing in the repository is about the machine it was written on."""
    problems = []
    folders = [tree.root / name for name in (*MAY_IMPORT, "tests", "docs", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix in TEXT_FILES]
    files += [path for path in tree.root.iterdir() if path.is_file() and path.suffix in TEXT_FILES]
    for path in files:
        if path.name in (".git", Path(__file__).name) or "__pycache__" in path.parts:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if match := ONE_MACHINE.search(line):
                problems.append(f"{path.relative_to(tree.root)}:{number} says {match[0]!r}")
    return problems


def flags(tree: Tree) -> list[str]:
    """Each flag is an environment variable too: a container is set up by either."""
    problems = []
    for module in tree.modules.values():
        if "bench" in module.name or module.package == "ring":  # flags of one measurement, not of a process
            continue
        for node in ast.walk(module.syntax):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "typer.Option"):
                continue
            variables = [ast.unparse(word.value).strip("'\"") for word in node.keywords if word.arg == "envvar"]
            declared = ast.unparse(node)
            if not any(flag in declared for flag in FLAGS_OF_ONE_CALL) and not any(
                name.startswith("HAULIER_") for name in variables
            ):
                problems.append(f"{module.name}:{node.lineno} has no HAULIER_ variable: {declared[:60]}")
    return problems


def stop_grace(tree: Tree) -> list[str]:
    """A container is given longer to stop than a worker takes to drain."""
    compose = (tree.root / "compose.yaml").read_text(encoding="utf-8")
    graces = [float(seconds) for seconds in re.findall(r"stop_grace_period:\s*(\d+)s", compose)]
    if not graces:
        return ["compose.yaml states no stop_grace_period"]
    return [f"stop_grace_period {grace:g}s, a drain takes {DRAIN_S:g} s" for grace in graces if grace <= DRAIN_S]


Check = Callable[[Tree], list[str]]
SAID = '"""values: words."""\n'
"""The docstring of a module that has nothing to do with the fault under test."""
CONTROLS: list[tuple[Check, dict[str, str], str]] = [
    (layers, {"broker/a.py": SAID + "import worker.b\n", "worker/b.py": SAID}, "broker.a reaches worker.b"),
    (
        layers,
        {"common/a.py": SAID + "def f():\n    from ring import b\n", "ring/b.py": SAID},
        "common.a reaches ring.b",
    ),
    (
        layers,
        {
            "ring/__init__.py": SAID,
            "ring/a.py": SAID + "from . import b\n",
            "ring/b.py": SAID + "import worker\n",
            "worker/__init__.py": SAID,
        },
        "ring.a reaches worker: ring.a > ring.b > worker",
    ),
    (lightness, {"broker/a.py": SAID + "from torch import nn\n"}, "broker.a reaches torch"),
    (
        lightness,
        {"broker/a.py": SAID + "import common.b\n", "common/b.py": SAID + "def f():\n    import numpy as np\n"},
        "broker.a reaches numpy: broker.a > common.b > numpy",
    ),
    (purity, {"broker/a.py": '"""rules: x."""\nimport time\n'}, "broker.a imports time"),
    (
        purity,
        {"broker/a.py": '"""rules: x."""\nfrom common import b\n', "common/b.py": '"""shell: x."""\n'},
        "broker.a reaches the shell common.b",
    ),
    (kinds, {"common/a.py": '"""Useful things."""\n'}, "common.a opens with 'Useful'"),
    (kinds, {"common/a.py": "x = 1\n"}, "common.a opens with 'nothing'"),
    (function_length, {"common/a.py": SAID + "def f():\n" + "    x = 1\n" * 71}, "common.a.f has 71 lines"),
    (file_length, {"common/a.py": SAID + "x = 1\n" * 400}, "common.a has 401 lines"),
    (dead_files, {"common/a.py": SAID, "tests/test_a.py": "import common.a\n"}, "common.a is used by nothing"),
    (guards, {"common/a.py": SAID + "try:\n    x = 1\nexcept:\n    pass\n"}, "common.a:4 has a bare except"),
    (guards, {"common/a.py": SAID + "assert True\n"}, "common.a:2 guards with assert"),
    (shadows, {"worker/queue.py": SAID}, "worker.queue shadows"),
    (
        dependency_reasons,
        {"pyproject.toml": '[project]\ndependencies = [\n  "a>=1", # why\n  "b>=2",\n]\n'},
        "b>=2 has no",
    ),
    (readme_map, {"README.md": f"{MAP_MARK} `ring/no.py` {MAP_MARK}"}, "the map names ring/no.py"),
    (
        readme_map,
        {"README.md": f"{MAP_MARK}\n```\nring/ a\n```\n{MAP_MARK}", "ring/b.py": SAID},
        "leaves out ring/b.py",
    ),
    (one_machine, {"docs/a.md": "look into /home" + "/me/notes\n"}, "docs/a.md:1 says"),
    (flags, {"broker/a.py": SAID + "x = typer.Option('--wait', help='w')\n"}, "broker.a:2 has no HAULIER_ variable"),
    (stop_grace, {"compose.yaml": "stop_grace_period: 10s\n"}, "stop_grace_period 10s"),
]
CHECKS = list(dict.fromkeys(check for check, _, _ in CONTROLS))


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree.read(ROOT)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_tree_keeps_its_own_rules(tree: Tree, check: Check) -> None:
    """Whoever adds a module meets the rule it breaks, with the place and the way that leads there."""
    problems = check(tree)
    assert not problems, f"{check.__doc__}\n" + "\n".join(problems)


@pytest.mark.parametrize(("check", "files", "expected"), CONTROLS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_check_finds_its_fault(tmp_path: Path, check: Check, files: dict[str, str], expected: str) -> None:
    """Control: a check that finds nothing in a faulty tree would prove nothing about ours."""
    for name, text in {"pyproject.toml": "[project]\n", "README.md": "", **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert any(expected in problem for problem in check(Tree.read(tmp_path)))


def test_the_tree_is_read_at_all(tree: Tree) -> None:
    """An empty tree keeps every rule; ours is not empty."""
    assert {"common.cli", "common.limits", "worker.model_store"} <= set(tree.modules)


def drawn_map(tree: Tree) -> str:
    """The fenced block of README's map, one folder after another."""
    rooms: dict[str, list[str]] = {}
    for module in tree.modules.values():
        if module.path.name not in ("__init__.py", "__main__.py"):
            rooms.setdefault(f"{module.path.parent.relative_to(tree.root).as_posix()}/", []).append(module.path.stem)
    blocks = [
        textwrap.fill(" ".join(names), 110, initial_indent=f"{room:<16}", subsequent_indent=" " * 16)
        for room, names in rooms.items()
    ]
    return "```\n" + "\n".join(blocks) + "\n```"


def test_the_map_that_is_drawn_is_the_map_that_is_asked_for(tree: Tree, tmp_path: Path) -> None:
    """Whoever adds a module prints the map anew and pastes it."""
    (tmp_path / "README.md").write_text(f"{MAP_MARK}\n{drawn_map(tree)}\n{MAP_MARK}\n", encoding="utf-8")
    modules = {
        name: dataclasses.replace(m, path=tmp_path / m.path.relative_to(ROOT)) for name, m in tree.modules.items()
    }
    assert readme_map(Tree(tmp_path, modules)) == []


if __name__ == "__main__":
    print(drawn_map(Tree.read(ROOT)))
