"""Every block of code in the README and in docs/ is done, in the order of its page, with small models and few steps."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from speedtronic.cli import build_parser, main
from speedtronic.config import load_config
from speedtronic.data.prepare.prepare import prepare
from tests.distributed.stores import servers
from tests.support.configs import tiny
from tests.support.pages import ROOT, Block, Command, blocks, commands

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

# What a page's blocks are tested by where they are not done here.
ELSEWHERE = {"docs/data.md": "tests/test_data_page.py"}

# Words that begin a command which a test cannot type, and where it is seen to work.
NOT_TYPED = {
    "git": "the reader's own clone",
    "cd": "the reader's own clone",
    "python3": "`make package` makes an environment so",
    "source": "`make package` makes an environment so",
    "pip": "checked for what it would install, and done by `make package`",
    "pytest": "this is one",
    "docker": "no daemon where the tests run: the file is read by hadolint",
    "tar": "needs the network",
    "tensorboard": "a server",
    "torchrun": "several processes: done in tests/parallel/test_training.py",
    "wandb": "needs an account",
}


def text(folder: Path, name: str = "your.txt") -> None:
    (folder / name).write_text("def double(x):\n    return 2 * x  # The end.\n" * 2000, encoding="utf-8")


def corpus(folder: Path) -> None:
    (folder / "corpus").mkdir()
    words = " ".join(f"word{number} number{number * 7}" for number in range(3000))
    (folder / "corpus/words.txt").write_text(words, encoding="utf-8")


def stdlib(folder: Path) -> None:
    text(folder, "stdlib.py")
    prepare([folder / "stdlib.py"], folder / "data/python-stdlib")


def shards(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        text(folder, f"{name}.py")
        prepare([folder / f"{name}.py"], folder / "data" / name)

    return make


def demo(folder: Path) -> None:
    """What `make demo` leaves."""
    assert main(["train", "examples/quickstart.yaml", *SMALL, "run.max_steps=2"]) == 0


def wrong_key(folder: Path) -> None:
    """The README's YAML with a mistake in it."""
    (block,) = (block.text for block in blocks("README.md") if block.language == "yaml" and "quickstart" in block.text)
    wrong = block.replace("micro_batch_size: 16 ", "micro_batchsize: 16 ")
    (folder / "config.yaml").write_text(wrong, encoding="utf-8")


def base_model(folder: Path) -> None:
    """A small Llama with a tokenizer, in the place of one that is fetched."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=256)
    transformers.LlamaForCausalLM(config).save_pretrained("models/base")
    tokenizer = ["data", "train-tokenizer", "corpus/", "--vocab-size", "300", "--out", "models/base/tokenizer.json"]
    assert main(tokenizer) == 0


def tiny_run(folder: Path) -> None:
    (folder / "run.yaml").write_text(json.dumps(tiny("runs/ranks", data={"target_batch_size": 4})), encoding="utf-8")


def words_of_gpt2(folder: Path) -> None:
    """A tokenizer in the place of GPT-2's ranks, which need the network."""
    assert main(["data", "train-tokenizer", "corpus/", "--vocab-size", "300", "--out", "words.json"]) == 0


SMALL = ["model.d_model=32", "model.n_layer=1", "model.n_head=2"]


@dataclass(frozen=True)
class Reading:
    """How a page is done in the time of a test.

    Attributes:
        made: what lies in the reader's folder before.
        values: given to each `train` behind its own values.
        words: other words for those of the page.
        of: values for one configuration.
        replaced: other text for what the files of the page say.
    """

    made: tuple[Callable[[Path], None], ...] = ()
    values: list[str] = field(default_factory=lambda: ["run.max_steps=2"])
    words: dict[str, str] = field(default_factory=dict)
    of: dict[str, list[str]] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)


S3 = "s3://my-bucket/three-machines"
SHORT_ROUNDS = ["distributed.inner_steps=2", "distributed.poll_interval=0.1", "distributed.grace=0.5"]
READINGS: dict[str, Reading] = {
    "README.md": Reading(
        made=(stdlib, corpus, text, demo, wrong_key),
        values=[],
        of={
            "examples/quickstart.yaml": [*SMALL, "run.max_steps=4"],
            "examples/shakespeare_char.yaml": [*SMALL, "run.max_steps=2"],
            "examples/diloco/diloco.yaml": [*SMALL, "run.max_steps=8", "eval.every_steps=null", *SHORT_ROUNDS],
        },
        words={"runs/a": "runs/quickstart", "runs/b": "runs/shakespeare-char"},
    ),
    "docs/first_run.md": Reading(
        made=(text,),
        of={"examples/quickstart.yaml": [*SMALL, "eval.every_steps=1"], "examples/shakespeare_char.yaml": SMALL},
    ),
    "docs/diloco.md": Reading(
        made=(stdlib,), values=[*SMALL, "run.max_steps=8", "eval.every_steps=null", *SHORT_ROUNDS]
    ),
    "docs/evaluation.md": Reading(made=(stdlib, demo, shards("books"))),
    "docs/gpt2_124m.md": Reading(
        made=(corpus, words_of_gpt2), values=["run.max_steps=2", *SMALL], words={"gpt2.tiktoken": "words.json"}
    ),
    "docs/devices.md": Reading(made=(tiny_run,)),
    "docs/install.md": Reading(values=[]),
    "docs/migration.md": Reading(
        made=(text,), values=[], of={"examples/shakespeare_char.yaml": [*SMALL, "run.max_steps=2"]}
    ),
    "docs/mistakes.md": Reading(made=(text,), values=[]),
    "docs/recipes.md": Reading(
        made=(text, corpus, words_of_gpt2, base_model),
        values=["run.max_steps=2", *SMALL],
        words={"gpt2.tiktoken": "words.json"},
        of={
            "one_card.yaml": [*SMALL, "run.max_steps=2", "precision=fp32", "compile=false", "data.target_batch_size=8"]
            + ["data.validation_fraction=0.05", "model.max_seq_len=64"],
            "lora.yaml": ["run.max_steps=2", "model.max_seq_len=32"],
            "three_machines.yaml": [*SMALL, "run.max_steps=8", *SHORT_ROUNDS],
        },
        replaced={S3: "dir://store"},
    ),
    "docs/your_model.md": Reading(values=[]),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A clone in which nothing was done yet, whose modules are forgotten afterwards."""
    for name in ("examples", "docs", "benchmarks", "Makefile", "Dockerfile"):
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


class Reader:
    """Does the blocks of one page."""

    def __init__(
        self,
        page: str,
        capture: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        reading: Reading | None = None,
    ) -> None:
        self.page, self.capture, self.monkeypatch = page, capture, monkeypatch
        self.reading = reading or READINGS.get(page, Reading())
        self.together: list[tuple[Command, subprocess.Popen[str]]] = []

    def do(self, block: Block) -> None:
        done = {"console": self.type, "python": self.run, "yaml": self.load, "text": self.keep}
        done[block.language](block)

    def load(self, block: Block) -> None:
        if block.file is None:
            load_config(block.text)
        else:
            text = block.text
            for said, other in self.reading.replaced.items():
                text = text.replace(said, other)
            Path(block.file).write_text(text, encoding="utf-8")

    def keep(self, block: Block) -> None:
        if block.file is not None:
            Path(block.file).write_text(block.text.partition("\n")[2], encoding="utf-8")

    def run(self, block: Block) -> None:
        if block.file is None:
            done = subprocess.run([sys.executable, "-c", block.text], capture_output=True, text=True)
            assert done.returncode == 0, (f"{self.page}:{block.line}", done.stdout, done.stderr)
        else:
            Path(block.file).write_text(block.text, encoding="utf-8")

    def type(self, block: Block) -> None:
        for command in commands(block):
            place = f"{self.page}:{command.line}: {shlex.join(command.words)}"
            words = [self.reading.words.get(word, word) for word in command.words]
            if words[0] == "speedtronic":
                self.speedtronic(command, self.shortened(words[1:]), place)
            elif words[:3] == ["python", "-m", "build"] or words[0] == "ls":
                pass  # `make package` does it
            elif words[0] == "make":
                assert words[1] in TARGETS, place
            elif words[0] == "torchrun":
                self.end_together()
                launcher = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
                done = subprocess.run(launcher, capture_output=True, text=True, timeout=240)
                assert done.returncode == 0, (place, done.stdout, done.stderr)
            elif words[0] == "export":
                self.monkeypatch.setenv(*words[1].split("=", 1))
            elif words[:2] == ["pip", "install"]:
                sound_installation(words, place)
            elif "/" in words[0] and Path(words[0]).name in ("pytest", "pre-commit") or words[0] == "bash":
                pass  # of the developers' own tools
            elif words[0] == "python":
                subprocess.run([sys.executable, *words[1:]], check=True)
            else:
                assert words[0] in NOT_TYPED, place

    def speedtronic(self, command: Command, words: list[str], place: str) -> None:
        if words[:2] == ["diloco", "master"] or any(word.startswith("distributed.node_id=") for word in words):
            process = subprocess.Popen(
                [sys.executable, "-m", "speedtronic", *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.together.append((command, process))
            if words[0] == "diloco":  # runs as short as a test's could end before there is a version to begin from
                assert process.stdout is not None
                assert any("at version" in line for line in process.stdout), place
            return
        self.end_together()
        if words[0] == "bench":
            build_parser().parse_args(words)
            return  # half an hour: tests/bench measures in a short form
        if "--tasks" in words:
            return  # their data needs the network: tests/evaluation/test_lm_eval_tasks.py has tasks of its own
        if "--live" in words:
            served_until_interrupted(words)
            return
        self.capture.readouterr()
        code = main(words)
        output = "".join(self.capture.readouterr())
        assert (code != 0) is command.must_fail, (place, code, output)
        assert command.missing_from(output) is None, (place, command.missing_from(output), output)

    def end_together(self) -> None:
        """Wait for the processes that train together."""
        for command, process in self.together:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, (f"{self.page}:{command.line}", output)
        self.together.clear()

    def kill_together(self) -> None:
        for _, process in self.together:
            process.kill()
            process.communicate()

    def shortened(self, words: list[str]) -> list[str]:
        """The words of a command with a smaller text, a smaller vocabulary and fewer steps."""
        words = list(words)
        if "--source" in words:
            at = words.index("--source")
            text(Path.cwd(), "stdlib.py")
            words[at : at + 2] = ["stdlib.py"]
        if "--vocab-size" in words:
            words[words.index("--vocab-size") + 1] = "300"
        if "--until" in words:
            words[words.index("--until") + 1] = "8"
        config = next((word for word in words[1:] if word.endswith(".yaml")), "")
        extra = self.reading.of.get(config, self.reading.values)
        if words[0] == "train" or words[:2] == ["diloco", "master"]:
            words += extra
        if words[0] == "generate":
            words += ["--max-tokens", "5"]
        if "--weights" in words:
            words += [value for value in extra if value.startswith("model.")]
        return words


def served_until_interrupted(words: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "speedtronic", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        assert "http://127.0.0.1" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)
    finally:
        process.kill()
        process.communicate()


def sound_installation(words: list[str], place: str) -> None:
    """Refuse what would bring the earlier release of the package index, and extras that there are not."""
    for word in words[2:]:
        named = re.fullmatch(r"(.*?)(?:\[([\w,-]+)\])?", word)
        assert named is not None
        assert named.group(1) != "speedtronic", f"{place}: would install the earlier release of the package index"
        if named.group(1) == "." or named.group(1).endswith(".whl"):
            assert set((named.group(2) or "dev").split(",")) <= EXTRAS.keys(), place


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")
@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE and blocks(page)])
def test_every_block_of_a_page_does_what_the_page_says(
    page: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(page, capsys, monkeypatch)
    if page == "docs/mistakes.md":  # where it is installed, too
        monkeypatch.setattr("speedtronic.metrics.trackers.find_spec", lambda name: None)
    for make in reader.reading.made:
        make(folder)
    try:
        for block in blocks(page):
            reader.do(block)
        reader.end_together()
    finally:
        reader.kill_together()


@pytest.mark.stores
@pytest.mark.parametrize("server", [servers.moto, servers.seaweed], ids=["moto", "seaweed"])
def test_three_machines_train_over_s3_by_their_recipe(
    server: Callable[[], AbstractContextManager[str]],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = "docs/recipes.md"
    keys = servers.CREDENTIALS
    with server() as endpoint:
        servers.make_bucket(endpoint, "my-bucket")
        reading = replace(
            READINGS[page],
            words={"AWS_ACCESS_KEY_ID=your-key": f"AWS_ACCESS_KEY_ID={keys['key']}"}
            | {"AWS_SECRET_ACCESS_KEY=your-secret": f"AWS_SECRET_ACCESS_KEY={keys['secret']}"},
            replaced={S3: f"{S3}\n  store_options: {{endpoint: '{endpoint}', region: {keys['region']}}}"},
        )
        corpus(folder)
        text(folder)
        reader = Reader(page, capsys, monkeypatch, reading)
        recipe = [number for number, block in enumerate(blocks(page)) if block.file == "three_machines.yaml"]
        try:
            for block in blocks(page)[recipe[0] : recipe[0] + 2]:
                reader.do(block)
        finally:
            reader.kill_together()
    assert (folder / "three.safetensors").stat().st_size > 0


def test_what_is_done_elsewhere_is_there() -> None:
    assert set(ELSEWHERE) <= set(PAGES)
    assert all((ROOT / file).is_file() for file in ELSEWHERE.values())


OTHER_FILES = [
    str(file.relative_to(ROOT)) for file in (ROOT / "examples").rglob("*") if file.suffix in {".md", ".sh", ".yaml"}
]


@pytest.mark.parametrize("page", [*PAGES, *OTHER_FILES])
def test_no_file_for_readers_brings_the_earlier_release_of_the_package_index(page: str) -> None:
    """The package index holds 2.0, other code, under this name."""
    words = (ROOT / page).read_text(encoding="utf-8")
    assert re.findall(r"pip install (?:[^\n`]* )?['\"]?speedtronic\b(?!-)[^\n]*", words) == []


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(folder: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "examples/first_run.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs are not kept in the repository"
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    written = notebook.cells[-3].outputs[0].text
    assert written.strip()


def keys_in(page: str) -> set[str]:
    """The keys of the configuration that the tables of a page name."""
    rows = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    sections = "|".join(SECTIONS)
    return set(re.findall(rf"`((?:{sections})\.\w+)`", "\n".join(rows)))


SECTIONS = [name for name, value in load_config("{}").to_dict().items() if isinstance(value, dict)]


@pytest.mark.parametrize("page", ["docs/migration.md", "docs/troubleshooting.md", "docs/support.md"])
def test_every_key_that_a_table_names_is_one_of_the_configuration(page: str) -> None:
    known = load_config("{}").to_dict()
    named = keys_in(page)
    assert named
    assert [key for key in named if key.split(".")[1] not in known[key.split(".")[0]]] == []


def test_the_table_of_extras_is_that_of_the_package() -> None:
    table = (ROOT / "docs/install.md").read_text(encoding="utf-8").partition("| extra | for |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(EXTRAS)


def test_the_site_has_every_page() -> None:
    site = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"'([\w-]+\.md)'", str(site["nav"]))
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))
    assert site["theme"]["font"] is False, "a font would be fetched from another site"


def test_there_are_twenty_mistakes_and_each_shows_its_message() -> None:
    shown = [
        command for block in blocks("docs/mistakes.md") if block.language == "console" for command in commands(block)
    ]
    assert sum(command.must_fail for command in shown) == 20
    assert len(re.findall(r"^### \d+\. ", (ROOT / "docs/mistakes.md").read_text(encoding="utf-8"), re.MULTILINE)) == 20


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_to_a_file_leads_to_one(page: str) -> None:
    """Those to places on a page are checked on the built site."""
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    files = [link.partition("#")[0] for link in links if "://" not in link]
    assert [file for file in files if file and not (ROOT / page).parent.joinpath(file).exists()] == []
