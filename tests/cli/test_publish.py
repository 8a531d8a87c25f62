"""Weights on the Hub, through its real client in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from speedtronic.checkpoint.export.hub import publish_to_hub, repository_of
from speedtronic.cli import main
from speedtronic.distributed.stores import open_store
from speedtronic.errors import ConfigError
from speedtronic.runtime import train_from_config
from tests.distributed.stores.servers import on_hub_repository
from tests.support.configs import tiny
from tests.support.hub_server import Hub
from tests.support.published import publish, publish_two_versions, weights_of

ADDRESS = "hf://someone/model"


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    with on_hub_repository(hub):
        yield hub


def speedtronic(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "speedtronic", *map(str, words)], capture_output=True, text=True, timeout=200
    )


@pytest.mark.stores
def test_a_checkpoint_becomes_a_private_repository_with_a_card(tmp_path: Path, hub: Hub) -> None:
    train_from_config(tiny(tmp_path / "run", logging={"json_file": "metrics.jsonl", "every_steps": 1}))
    done = speedtronic("checkpoints", "publish", tmp_path / "run", ADDRESS)
    assert done.returncode == 0, done.stderr
    assert "published: hf://someone/model: step 4, " in done.stdout
    repository = hub.repositories["someone/model"]
    assert repository.private
    assert repository.files.keys() >= {"README.md", "model.safetensors", "config.json", "loss.png"}
    assert json.loads(repository.files["config.json"])["model_type"] == "llama"
    assert repository.files["loss.png"].startswith(b"\x89PNG")
    card = repository.files["README.md"].decode()
    for words in ("# model", "| step | 4 |", "fingerprint", "| versions | speedtronic ", "max_steps: 4", "loss.png"):
        assert words in card
    assert repository.commits == ["step 4"]

    again = speedtronic("checkpoints", "publish", tmp_path / "run", ADDRESS, "--message", "again")
    assert again.returncode == 0, again.stderr
    assert len([asked for asked in hub.asked if asked.startswith("PUT /lfs/")]) == 2, "nothing large is sent twice"


@pytest.mark.stores
def test_a_version_of_a_store_is_published(tmp_path: Path, hub: Hub) -> None:
    publish_two_versions(open_store(f"dir://{tmp_path}/store"))
    done = speedtronic("diloco", "publish", f"dir://{tmp_path}/store", ADDRESS, "--public")
    assert done.returncode == 0, done.stderr
    repository = hub.repositories["someone/model"]
    assert not repository.private
    assert repository.files["model.safetensors"] == weights_of(2)
    assert "| version of the global weights | 2 |" in repository.files["README.md"].decode()


@pytest.mark.stores
def test_with_every_each_newer_version_follows(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"dir://{tmp_path}/store")
    newest = publish_two_versions(store)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:  # before the first look there is nothing new, before the second there is
            publish(store, newest)
        if len(waited) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("speedtronic.cli.diloco._sleep", sleep)
    assert main(["diloco", "publish", f"dir://{tmp_path}/store", ADDRESS, "--every", "2"]) == 130
    assert waited == [120, 120, 120]
    assert hub.repositories["someone/model"].commits == ["version 2", "version 3"]


@pytest.mark.stores
def test_a_commit_that_fails_for_a_while_is_made_again_after_the_time_that_the_hub_names(
    tmp_path: Path, hub: Hub
) -> None:
    (tmp_path / "a.txt").write_text("a")
    hub.failures = [503, 429, -502]
    waited: list[float] = []
    publish_to_hub(tmp_path, ADDRESS, private=True, message="m", warn=pytest.fail, sleep=waited.append)
    assert waited == [7, 7, 8]
    assert hub.repositories["someone/model"].commits == ["m"], "an answer that was lost makes no second commit"


@pytest.mark.stores
def test_a_repository_that_is_public_already_is_warned_of(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "a.txt").write_text("a")
    warned: list[str] = []
    for private in (False, True):
        publish_to_hub(tmp_path, ADDRESS, private=private, message="m", warn=warned.append)
    assert [word for word in warned if "is public" in word] == warned != []


@pytest.mark.stores
def test_without_a_token_the_remedy_is_named(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrongsecret")
    publish_two_versions(open_store(f"dir://{tmp_path}/store"))
    done = speedtronic("diloco", "publish", f"dir://{tmp_path}/store", ADDRESS)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: hf://someone/model: the Hub does not know the token (401); log in with")
    assert "hf_wrongsecret" not in done.stderr


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("hf://buckets/someone/x", "not the address of a repository"),
        ("hf://someone", "not the address of a repository"),
        ("hf://someone/x/y", "not the address of a repository"),
        ("someone/x", "not the address of a repository"),
    ],
)
def test_a_wrong_address_is_refused(address: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        repository_of(address)


def test_offline_mode_is_refused_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        repository_of(ADDRESS)
    for url in ("hf://buckets/someone/x", "hf://someone/x", "someone/x"):
        with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
            open_store(url)


@pytest.mark.parametrize("words", [[], ["hf://buckets/a/b"], [ADDRESS, ADDRESS]])
def test_exactly_one_repository_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diloco", "publish", "dir:///nowhere", *words]) == 2
    assert "name one repository of the Hub to publish to" in capsys.readouterr().err
