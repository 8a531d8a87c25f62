from __future__ import annotations

import json
from pathlib import Path

import pytest

from speedtronic.config import SpeedtronicConfig, load_config
from speedtronic.config.run_folder import (
    config_in,
    imported_from,
    is_of_a_run,
    load_config_in,
    redacted_keys,
    run_folder,
    save_run,
)

ID = "0123456789abcdef" * 2
SECRET = "hf_verysecret123"


def test_the_configuration_of_a_run_is_resolved_redacted_and_loads_again(tmp_path: Path) -> None:
    config = SpeedtronicConfig(
        run={"max_steps": 7}, distributed={"token": SECRET}, model={"extra": {"pad_token": "\x85"}}
    )
    assert save_run(tmp_path / "new" / "run", config, ID, [])
    file = tmp_path / "new" / "run" / "config.yaml"
    text = file.read_text(encoding="utf-8")
    assert text.startswith(f"# The configuration of run {ID}: resolved, without secrets.\nrun:\n")
    assert SECRET not in text
    loaded = load_config(file)
    assert (loaded.scheduler.max_steps, loaded.model.extra) == (7, {"pad_token": "\x85"})
    assert loaded.to_dict(redact_secrets=True)["model"] == config.to_dict(redact_secrets=True)["model"]
    assert json.loads((file.parent / "run.json").read_bytes()) == {"run_id": ID, "import_from": []}
    assert sorted(path.name for path in file.parent.iterdir()) == ["config.yaml", "run.json"]


def test_a_later_start_of_the_run_replaces_its_files(tmp_path: Path) -> None:
    for steps in (1, 2):
        assert save_run(tmp_path, SpeedtronicConfig(run={"max_steps": steps}), ID, [])
    assert load_config(tmp_path / "config.yaml").run.max_steps == 2


def test_a_file_of_the_users_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("# mine\nmax_steps: 3\n", encoding="utf-8")
    assert not is_of_a_run(tmp_path / "config.yaml")
    assert not save_run(tmp_path, SpeedtronicConfig(), ID, [])
    assert (tmp_path / "config.yaml").read_text(encoding="utf-8") == "# mine\nmax_steps: 3\n"


def test_which_config_yaml_is_that_of_the_run_in_its_folder(tmp_path: Path) -> None:
    own, users, others, broken, none = (tmp_path / name for name in ("own", "users", "others", "broken", "none"))
    for folder in (users, others, broken, none):
        folder.mkdir()
    save_run(own, SpeedtronicConfig(), ID, [])
    (users / "config.yaml").write_text(f"output_dir: {users}\n", encoding="utf-8")
    (others / "config.yaml").write_text("output_dir: elsewhere\n", encoding="utf-8")
    (broken / "config.yaml").write_text("services: {web: 1}\n", encoding="utf-8")
    found = [config_in(folder) for folder in (own, users, others, broken, none)]
    assert found == [own / "config.yaml", users / "config.yaml", None, None, None]


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"import_from": 3}', '{"import_from": ["/nowhere/at/all", 5]}'])
def test_a_record_that_cannot_be_read_names_no_folders(tmp_path: Path, record: str) -> None:
    (tmp_path / "run.json").write_text(record, encoding="utf-8")
    assert imported_from(tmp_path) == []


def test_the_keys_whose_secrets_are_left_out_are_known(tmp_path: Path) -> None:
    config = SpeedtronicConfig(distributed={"token": SECRET}, model={"extra": {"deep": {"api_key": SECRET}}})
    save_run(tmp_path, config, ID, [])
    file = tmp_path / "config.yaml"
    assert redacted_keys(file, load_config(file)) == ("model.extra.deep.api_key", "distributed.token")
    assert redacted_keys(file, load_config(file, ["distributed.token=new"])) == ("model.extra.deep.api_key",)


def test_a_run_that_writes_nothing_has_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    off = {"checkpoint": {"enabled": False}}
    assert run_folder(load_config(off)) is None
    assert run_folder(load_config({**off, "logging": {"file": "l.txt"}})) == tmp_path / "runs"
    assert run_folder(load_config({"output_dir": "x"})) == tmp_path / "x"


def test_keys_that_follow_others_follow_them_again(tmp_path: Path) -> None:
    given = {"run": {"max_steps": 500, "seed": 5}, "model": {"n_head": 4, "d_ff": 640}, "data": {"seed": 9}}
    config = load_config(given)
    save_run(tmp_path, config, ID, [])
    file = tmp_path / "config.yaml"
    assert load_config_in(file).to_dict() == config.to_dict()
    for overrides in (["run.max_steps=3000"], ["run.seed=6"], ["model.n_head=8", "model.d_model=128", "log_every=7"]):
        assert load_config_in(file, overrides).to_dict() == load_config(given, overrides).to_dict()
