from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from speedtronic.cli import main
from speedtronic.cli.arguments import CommandParser, add_config_arguments, load_from_arguments
from speedtronic.errors import ConfigError


def _parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prog")
    commands = parser.add_subparsers(parser_class=CommandParser)
    command = commands.add_parser("train")
    add_config_arguments(command)
    command.add_argument("--resume", action="store_true")
    command.add_argument("--device")
    return parser.parse_args(["train", *words])


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "c.yaml"
    path.write_text("max_steps: 3\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "order",
    [
        "FILE --resume --device cpu seed=5 log_every=2",
        "--resume FILE seed=5 --device cpu log_every=2",
        "FILE seed=5 log_every=2 --device cpu --resume",
        "--config FILE --resume seed=5 --device cpu log_every=2",
        "seed=5 --resume --config FILE log_every=2 --device=cpu",
    ],
)
def test_words_and_options_come_in_any_order(order: str, file: str) -> None:
    args = _parse(*order.replace("FILE", file).split())
    config, folder = load_from_arguments(args)
    assert (args.resume, args.device) == (True, "cpu")
    assert (config.run.max_steps, config.run.seed, config.run.log_every) == (3, 5, 2)
    assert folder == Path(file).parent.resolve()


def test_extra_overrides_go_before_those_on_the_command_line(file: str) -> None:
    config, _ = load_from_arguments(_parse(file, "max_steps=5"), extra=["run.max_steps=6"])
    assert config.run.max_steps == 6


@pytest.mark.parametrize("words", [(), ("seed=5",), ("model.extra.a=5", "--resume")])
def test_no_file_is_an_error(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="no configuration file is named"):
        load_from_arguments(_parse(*words))


def test_an_unknown_option_is_bad_use(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        _parse(file, "--bogus")
    assert stop.value.code == 2
    assert "--bogus" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian", "invalid choice: 'trian'; did you mean train? (choose from train, tune,"),
        ("checkpoints lsit x", "invalid choice: 'lsit'; did you mean list? (choose from list, verify,"),
        ("zzz", "invalid choice: 'zzz' (choose from"),
        (
            "train c.yaml --lr 1e-3",
            "no such option: --lr; to set a key of the configuration, write optimizer.lr=1e-3\n",
        ),
        (
            "train --lr=1e-3 c.yaml",
            "no such option: --lr; to set a key of the configuration, write optimizer.lr=1e-3\n",
        ),
        ("train c.yaml --lr", "write optimizer.lr=VALUE\n"),
        ("train c.yaml --optimizer.lr 3", "write optimizer.lr=3\n"),
        ("train c.yaml --batch-size 8", "write data.micro_batch_size=8\n"),
        ("train c.yaml --token hf_secret", "write distributed.token=VALUE\n"),
        ("train c.yaml --max-stesp 3", "no such option: --max-stesp; did you mean --max-steps?\n"),
        ("train c.yaml --every-steps 3", "no such option: --every-steps\n"),
        ("checkpoints list x --jsn", "no such option: --jsn; did you mean --json?\n"),
        ("generate x --lr 3", "no such option: --lr\n"),
        ("checkpoints list x --lr 3", "no such option: --lr\n"),
        ("generate x --max-seq-len 8", "write model.max_seq_len=8\n"),
        ("data inspect x --lr 1", "no such option: --lr\n"),
    ],
)
def test_a_slip_of_the_fingers_gets_a_suggestion(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "hf_secret" not in error
