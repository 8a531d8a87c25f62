"""The house has floors: a module imports only from the floors below its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "speedtronic"

# Top to bottom. Rooms on one floor do not know each other.
FLOORS = (
    {"cli"},
    {"bench"},
    {"runtime"},
    {"evaluation", "tuning", "report"},
    {"generation"},
    {"trainer", "distributed"},
    {"checkpoint", "optimizers", "data", "model", "metrics", "runs"},
    {"shapes", "scheduling"},
    {"parallel"},
    {"precision", "ranks", "registry"},
    {"config"},
    {"durable"},
    {"errors"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem in FLOOR_OF)


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


def imported_rooms(path: Path) -> set[str]:
    own = {name.split(".")[1] for name in imported_modules(path) if name.startswith("speedtronic.")}
    return own - {room_of(path)}


def test_every_room_of_the_house_has_a_floor() -> None:
    rooms = {p.stem for p in SOURCE.iterdir() if p.suffix == ".py" or (p.is_dir() and list(p.glob("*.py")))}
    assert rooms - {"__init__", "__main__", "__pycache__"} == set(FLOOR_OF)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_from_the_floors_below(path: Path) -> None:
    floor = FLOOR_OF[room_of(path)]
    upward = {room for room in imported_rooms(path) if FLOOR_OF[room] <= floor}
    assert not upward, f"{path.relative_to(SOURCE)} imports {upward}"


def test_no_two_modules_of_one_room_import_each_other() -> None:
    imports = {
        ".".join(("speedtronic", *path.relative_to(SOURCE).with_suffix("").parts)): imported_modules(path)
        for path in MODULES
    }
    circles = {(a, b) for a in imports for b in imports[a] & imports.keys() if a < b and a in imports[b]}
    assert not circles


@pytest.mark.slow
def test_the_registry_keeps_its_name_whatever_is_imported_first() -> None:
    code = (
        "import speedtronic.registry\nimport speedtronic\nfrom speedtronic import registry\n"
        "from speedtronic.registry import ModelRegistry, build_model\n"
        "assert isinstance(registry, ModelRegistry) and speedtronic.registry is registry"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_exported_name_exists() -> None:
    code = (
        "import speedtronic\nfrom speedtronic import *\n"
        "assert all(getattr(speedtronic, name) is not None for name in speedtronic.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "statement",
    [
        "import speedtronic",
        "import speedtronic.config",
        "import speedtronic.cli",
        "import speedtronic.errors",
    ],
)
def test_importing_the_light_rooms_loads_no_torch(statement: str) -> None:
    code = f"{statement}\nimport sys\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
