"""The layout of the code: import contracts, package faces, and sizes of folders."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "runtime_di"
MAX_FILES = 12
"""Most Python files that a folder may have."""
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


@cache
def modules() -> dict[str, Path]:
    """Dotted name to file of every module of the package, including those behind its symbolic links."""
    files = [
        *PACKAGE.rglob("*.py"),
        *(path for link in PACKAGE.iterdir() if link.is_symlink() for path in link.rglob("*.py")),
    ]
    parts = {file: file.relative_to(ROOT).with_suffix("").parts for file in files}
    return {".".join(names[:-1] if names[-1] == "__init__" else names): file for file, names in parts.items()}


def imported(file: Path) -> Iterator[str]:
    """Every module that a file imports: at its top, in functions, under TYPE_CHECKING, and with import_module()."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules() else node.module for name in submodules)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


@pytest.mark.processes
def test_import_contracts_are_kept() -> None:
    """import-linter finds every contract kept."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_no_file_is_in_an_import_cycle() -> None:
    """Imports have no cycle, including imports in functions and under TYPE_CHECKING."""
    graph = {name: {other for other in imported(file) if other in modules()} for name, file in modules().items()}

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("name", [name for name, file in modules().items() if file.name == "__init__.py"])
def test_init_file_of_a_package_has_no_logic(name: str) -> None:
    """An ``__init__.py`` is a docstring, imports and a sorted ``__all__`` of the imported names, constants first."""
    docstring, *rest = ast.parse(modules()[name].read_text()).body
    imports = [node for node in rest if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    exports = [ast.literal_eval(node.value) for node in rest if isinstance(node, ast.Assign)]
    others = [node for node in rest if not isinstance(node, ast.ImportFrom | ast.Assign)]

    assert isinstance(docstring, ast.Expr)
    assert others == []
    names = sorted(
        (alias.name for node in imports for alias in node.names), key=lambda name: (not name.isupper(), name)
    )
    assert exports == ([names] if imports else [])


def folders() -> list[Path]:
    """Every folder of code, those of tests, examples and benchmarks included."""
    places = ("runtime_di", "containers", "providers", "tests", "examples", "benchmarks")
    return sorted({file.parent for place in places for file in (ROOT / place).rglob("*.py")})


@pytest.mark.parametrize("folder", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in folders()])
def test_folder_is_small_and_its_files_do_not_repeat_its_name(folder: Path) -> None:
    """A folder has at most a dozen Python files, and none of them repeats the folder's name."""
    names = [file.stem for file in folder.glob("*.py")]

    assert len(names) <= MAX_FILES
    assert [name for name in names if re.search(rf"(^|_){re.escape(folder.name)}(_|$)", name)] == []


def picture_edges(number: int) -> set[tuple[str, str]]:
    """Importer and imported package of every arrow in a picture of docs/architecture.md."""
    pictures = re.findall(r"```mermaid\nflowchart(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)
    return set(re.findall(r"^  (\w+) --> (\w+)$", pictures[number], re.MULTILINE))


def contract_edges(number: int, prefix: str = "") -> set[tuple[str, str]]:
    """Every pair of a layer and the layer below it in a contract; siblings share a layer."""
    layers = [re.split(r" *[|:] *", layer.replace(prefix, "")) for layer in CONTRACTS[number]["layers"]]
    return {(high, low) for above, below in pairwise(layers) for high in above for low in below}


def test_picture_of_the_packages_is_the_import_contract() -> None:
    """docs/architecture.md draws the layers of the first contract, and no other arrow."""
    merged = {
        tuple("errors" if package == "phases" else package for package in edge)
        for edge in contract_edges(0, "runtime_di.")
    }

    assert picture_edges(0) == merged


def test_picture_of_the_providers_is_the_import_contract() -> None:
    """docs/architecture.md draws the layers of the providers; those that import no other provider are one box."""
    leaves = {"device", "kv_cache", "microbatches", "timers", "tokenizer", "writer"}
    merged = {tuple("leaves" if package in leaves else package for package in edge) for edge in contract_edges(1)}

    assert picture_edges(1) == merged
