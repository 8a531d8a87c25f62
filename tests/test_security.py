"""No file that a user is given can make Speedtronic run code: neither does our source unpickle, nor evaluate, nor
import what a file names, nor does a name from a file reach a place outside the file's own folder."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from speedtronic.checkpoint import CheckpointManager
from speedtronic.checkpoint.initial_weights import load_initial_weights
from speedtronic.checkpoint.manifest import MANIFEST, seal
from speedtronic.data.prepare.prepare import prepare
from speedtronic.data.shards import ShardSet
from speedtronic.errors import CheckpointError, DataError

SOURCE = Path(__file__).parents[1] / "src" / "speedtronic"
MODULES = sorted(SOURCE.rglob("*.py"))

# Modules whose purpose is to turn bytes into objects by running what the bytes say, or to run text.
UNSAFE_MODULES = frozenset(
    {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle", "runpy", "imp"}
)
SAFE_NAMES = frozenset({"pickle.PicklingError"})
UNSAFE_CALLS = frozenset(
    {
        "builtins.eval",
        "builtins.exec",
        "builtins.compile",
        "os.system",
        "os.popen",
        "subprocess.getoutput",
        "subprocess.getstatusoutput",
        "torch.load",
        "torch.save",  # writes what only unpickling reads
        "torch.jit.load",
        "torch.package.PackageImporter",
        "torch.serialization.load",
        "torch.hub.load",
        "numpy.load",
        "numpy.lib.format.read_array",
        "yaml.load",
        "yaml.load_all",
        "yaml.full_load",
        "yaml.unsafe_load",
        "pandas.read_pickle",
    }
)
UNSAFE_ARGUMENTS: dict[str, object] = {
    "allow_pickle": True,
    "shell": True,
    "trust_remote_code": True,
    "weights_only": False,
    "typ": "unsafe",  # of ruamel.yaml.YAML
}
# What a module may do all the same: what Speedtronic is measured against.
COMPARED_WITH = {"bench/checkpointing.py": "torch.save"}
IMPORTING = frozenset(
    {"importlib.import_module", "importlib.util.spec_from_file_location", "builtins.__import__", "importlib.reload"}
)
# Where a module is imported by a name that is only known when the program runs, and whose name that is.
IMPORT_SITES = {
    ("__init__.py", "__getattr__"): "a table in the same file",
    ("bench/rows.py", "measure_here"): "a table in the same file",
    ("data/__init__.py", "__getattr__"): "a table in the same file",
    ("distributed/__init__.py", "__getattr__"): "a table in the same file",
    ("metrics/trackers.py", "import_tracker"): "names in the files of the trackers",
    ("registry.py", "_load"): "what a program registered a model as, which is code already",
    ("runtime.py", "import_plugins"): "plugins in the configuration, which its user wrote",
    (
        "registry.py",
        "import_factory",
    ): "data.dataset, loss, metrics and callbacks in the configuration, which its user wrote",
    ("evaluation/lm_eval_tasks.py", "_import"): "modules of lm-eval that the same file names",
}


class Scan(ast.NodeVisitor):
    """Finds what is unsafe in a module, by what its names stand for and not by how they are spelt."""

    def __init__(self) -> None:
        self.unsafe: list[str] = []
        self.import_sites: list[str] = []
        self._meaning: dict[str, str] = {}
        self._functions: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:  # noqa: N802 - the library's name
        for alias in node.names:
            self._note_import(alias.name, node)
            root = alias.name.partition(".")[0]
            self._meaning[alias.asname or root] = alias.name if alias.asname else root

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:  # noqa: N802
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            self._note_import(name, node)
            self._meaning[alias.asname or alias.name] = name

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:  # noqa: N802
        self._functions.append(node.name)
        self.generic_visit(node)
        self._functions.pop()

    def visit_Name(self, node: ast.Name) -> None:  # noqa: N802
        if isinstance(node.ctx, ast.Load):  # a field may be named `compile`
            self._note(self._name(node), node)

    def visit_Attribute(self, node: ast.Attribute) -> None:  # noqa: N802
        self._note(self._name(node), node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        if (
            self._name(node.func) == "builtins.getattr"
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            self._note(f"{self._name(node.args[0])}.{node.args[1].value}", node)
        for keyword in node.keywords:
            unsafe = UNSAFE_ARGUMENTS.get(keyword.arg or "")
            if unsafe is not None and not (isinstance(keyword.value, ast.Constant) and keyword.value.value != unsafe):
                self.unsafe.append(f"line {node.lineno}: {keyword.arg}={ast.unparse(keyword.value)}")
        self.generic_visit(node)

    def _note_import(self, name: str, node: ast.stmt) -> None:
        if name.partition(".")[0] in UNSAFE_MODULES and name not in SAFE_NAMES:
            self.unsafe.append(f"line {node.lineno}: import of {name}")
        self._note(name, node, imports=False)

    def _note(self, name: str | None, node: ast.AST, *, imports: bool = True) -> None:
        if name in UNSAFE_CALLS:
            self.unsafe.append(f"line {node.lineno}: {name}")  # type: ignore[attr-defined]
        if name in IMPORTING and imports:
            self.import_sites.append(self._functions[-1] if self._functions else "<module>")

    def _name(self, node: ast.expr) -> str | None:
        """What an expression stands for, as a dotted name; None where that is not known."""
        if isinstance(node, ast.Name):
            return self._meaning.get(node.id, f"builtins.{node.id}")
        if isinstance(node, ast.Attribute):
            owner = self._name(node.value)
            return f"{owner}.{node.attr}" if owner else None
        return None


def scan(text: str) -> Scan:
    found = Scan()
    found.visit(ast.parse(text))
    return found


# --- the source ---


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_source_calls_nothing_that_runs_what_a_file_says(path: Path) -> None:
    allowed = COMPARED_WITH.get(path.relative_to(SOURCE).as_posix())
    unsafe = scan(path.read_text(encoding="utf-8")).unsafe
    assert [call for call in unsafe if call.partition(": ")[2] != allowed] == []


def test_every_import_by_a_name_that_is_not_in_the_source_is_accounted_for() -> None:
    sites = {
        (path.relative_to(SOURCE).as_posix(), function)
        for path in MODULES
        for function in scan(path.read_text(encoding="utf-8")).import_sites
    }
    assert sites == set(IMPORT_SITES)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "def f():\n    import dill",
        "from joblib import load",
        "import torch\ntorch.load(path)",
        "import torch as t\nread = t.load",
        "from torch import load as read\nread(path)",
        "import torch\ngetattr(torch, 'load')(path)",
        "import torch.jit\ntorch.jit.load(path)",
        "import torch\ntorch.save(state, path)",
        "import numpy as np\nnp.load(path)",
        "import numpy as np\nnp.lib.format.read_array(file, allow_pickle=True)",
        "reader(path, allow_pickle=flag)",
        "reader(path, weights_only=False)",
        "import yaml\nyaml.load(text)",
        "from ruamel.yaml import YAML\nYAML(typ='unsafe')",
        "eval(text)",
        "exec(compile(text, 'x', 'exec'))",
        "run = exec",
        "import os\nos.system(command)",
        "import subprocess\nsubprocess.run(command, shell=True)",
        "load_dataset(name, trust_remote_code=True)",
        "load_dataset(name, trust_remote_code=options.trust)",
    ],
)
def test_the_scan_finds_what_is_unsafe(text: str) -> None:
    assert scan(text).unsafe


@pytest.mark.parametrize(
    "text",
    [
        "import re\nre.compile(pattern)",
        "import torch\nmodel = torch.compile(model)\nmodel.eval()",
        "import json\njson.load(file)",
        "from pickle import PicklingError",
        "from ruamel.yaml import YAML\nYAML(typ='safe').load(text)",
        "import subprocess\nsubprocess.run([program], shell=False)",
        "message = 'convert it by torch.load(path)'",
        "reader(path, weights_only=True, allow_pickle=False)",
    ],
)
def test_the_scan_lets_pass_what_is_safe(text: str) -> None:
    assert scan(text).unsafe == []


def test_the_scan_finds_imports_by_name_and_says_in_which_function() -> None:
    text = "import importlib as i\ndef f(name):\n    return i.import_module(name)\nmodule = __import__('a')"
    assert sorted(scan(text).import_sites) == ["<module>", "f"]


# --- names from files ---

# What a file may give as the name of another one.
OUTSIDE = ["../secret", "{secret}", "a/../../secret", "..\\secret", "..", "."]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file outside, with a name that nothing of ours has."""
    path = tmp_path / "secret"
    path.write_bytes(b"outside")
    return path


def names_outside(secret: Path) -> Iterator[str]:
    return (name.format(secret=secret) for name in OUTSIDE)


def state() -> dict[str, Any]:
    return {"model": {"w": torch.ones(2)}, "step": 1}


def rewrite(path: Path, **changes: Any) -> None:
    """Change fields of a sealed file, and seal it again, as somebody who knows the format can."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    del fields["seal"]
    path.write_bytes(seal({**fields, **changes}))


def test_a_manifest_cannot_name_a_file_outside_its_checkpoint(tmp_path: Path, secret: Path) -> None:
    for number, name in enumerate(names_outside(secret)):
        folder = tmp_path / str(number)
        checkpoint = CheckpointManager(folder).save(1, state())
        files = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
        rewrite(checkpoint / MANIFEST, files={name: files.pop("state.json"), **files})
        with pytest.raises(CheckpointError, match="is not a manifest"):
            CheckpointManager(folder, warn=lambda message: None).load_latest()


def test_latest_json_cannot_lead_outside_its_folder(tmp_path: Path, secret: Path) -> None:
    """It decides which run is continued. The checkpoint itself is looked for in the folder."""
    elsewhere = CheckpointManager(tmp_path / "elsewhere").save(7, {**state(), "step": 7})
    for number, name in enumerate([str(elsewhere), f"../elsewhere/{elsewhere.name}", *names_outside(secret)]):
        folder = tmp_path / str(number)
        CheckpointManager(folder).save(1, state())
        rewrite(folder / "latest.json", checkpoint=name)
        manager = CheckpointManager(folder)
        loaded = manager.load_latest()
        assert loaded is not None
        assert loaded["step"] == 1
        assert manager.latest_path() == folder / "step_000000000001"


@pytest.mark.parametrize("file", ["model.safetensors", "state.safetensors", "state.json", MANIFEST])
def test_a_link_in_a_checkpoint_is_refused_even_to_the_right_contents(tmp_path: Path, file: str) -> None:
    checkpoint = CheckpointManager(tmp_path / "run").save(1, state())
    shutil.move(checkpoint / file, tmp_path / "contents")
    (checkpoint / file).symlink_to(tmp_path / "contents")
    with pytest.raises(CheckpointError, match="not a plain file"):
        CheckpointManager(tmp_path / "run", warn=lambda message: None).load_latest()


def test_pruning_follows_no_link(tmp_path: Path) -> None:
    """A link among the checkpoints is neither loaded, nor is what it leads to removed."""
    other = CheckpointManager(tmp_path / "other").save(1, state())
    manager = CheckpointManager(tmp_path / "run", keep_last=1)
    manager.save(5, state())
    (tmp_path / "run" / "step_000000000002").symlink_to(other)
    (tmp_path / "run" / f".tmp-step_000000000003-{2**22 + 1}").symlink_to(other)  # of a process that cannot be
    manager.save(6, state())
    assert CheckpointManager(tmp_path / "other").load_latest() is not None


def test_an_index_of_weights_cannot_name_a_file_outside_its_folder(tmp_path: Path, secret: Path) -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    for number, name in enumerate(names_outside(secret)):
        folder = tmp_path / str(number)
        folder.mkdir()
        index = {"weight_map": {"weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        with pytest.raises(CheckpointError, match="not a file of its own folder"):
            load_initial_weights(model, folder)


def test_an_index_of_shards_cannot_name_a_file_outside_its_folder(tmp_path: Path, secret: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Hello, world. " * 20, encoding="utf-8")
    prepare([text], tmp_path / "shards")
    for number, name in enumerate(names_outside(secret)):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "shards", folder)
        index = folder / "index.json"
        fields = json.loads(index.read_text(encoding="utf-8"))
        fields["shards"][0]["file"] = name
        index.write_text(json.dumps(fields), encoding="utf-8")
        with pytest.raises(DataError, match=r"index\.json: shard name .* is not a plain file name"):
            ShardSet(folder)
