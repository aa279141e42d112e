"""The package as it is installed: wheel, wheel from sdist, and its one-screen API."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import runtime_di
from tests.support.paths import ROOT


def run(*command: str, cwd: Path, path: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else dict(os.environ)
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an sdist and the wheel built from it, of the files that git tracks."""
    work = tmp_path_factory.mktemp("package")
    tracked = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")[:-1]
    for name in tracked:
        source, copy = ROOT / name, work / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.symlink_to(os.readlink(source))
        elif source.exists():
            copy.write_bytes(source.read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(work / "dist"), cwd=work / "source")
    return work / "dist"


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    """The wheel from the sdist has core, providers, containers and py.typed under one name."""
    (wheel,) = built.glob("*.whl")

    names = zipfile.ZipFile(wheel).namelist()

    package = {name for name in names if ".dist-info/" not in name}
    folders = {ROOT / "runtime_di": "runtime_di"}
    folders |= {ROOT / name: f"runtime_di/{name}" for name in ("providers", "containers")}
    sources = {
        f"{name}/{path.relative_to(folder)}" for folder, name in folders.items() for path in folder.rglob("*.py")
    }
    assert package == sources | {"runtime_di/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_sdist_builds_by_itself(built: Path) -> None:
    """The sdist contains the files that its wheel is built from."""
    (sdist,) = built.glob("*.tar.gz")

    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}

    assert {"pyproject.toml", "README.md", "LICENSE", "runtime_di/runtime.py"} <= names


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_wheel_plans_from_another_folder(built: Path, tmp_path: Path) -> None:
    """An installed wheel imports and plans, away from the sources and without torch."""
    (wheel,) = built.glob("*.whl")
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    script = (
        "import runtime_di, sys, runtime_di.containers as c; c.TrainingRuntime.plan().check();"
        "assert 'torch' not in sys.modules; print(runtime_di.__file__)"
    )

    printed = run(sys.executable, "-c", script, cwd=tmp_path, path=target)

    assert Path(printed.strip()).is_relative_to(target)


def test_layout_links_are_relative() -> None:
    """containers and providers lie at the top and install under runtime_di through tracked relative links."""
    for name in ("containers", "providers"):
        assert os.readlink(ROOT / "runtime_di" / name) == f"../{name}"
        assert (ROOT / name).is_dir()
        assert not (ROOT / name).is_symlink()


def test_public_names_are_sorted_and_exported() -> None:
    """__all__ is sorted and is exactly what the package re-exports."""
    exported = {
        name
        for name, value in vars(runtime_di).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("runtime_di")
    }

    assert list(runtime_di.__all__) == sorted(runtime_di.__all__)
    assert set(runtime_di.__all__) == exported
