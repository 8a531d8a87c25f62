"""The public surface is frozen: names, signatures, events, checkpoint keys, options and configuration keys.

`docs/api.md` and `docs/configuration.md` are the snapshot. What fails here is a change that users see: if it is meant,
`make docs` writes the pages anew, and the change log says so.
"""

from __future__ import annotations

import ast
from pathlib import Path

from docs.reference import CHECKPOINT_KEYS, PAGE, _leaf_parsers, _options, page
from speedtronic.cli import build_parser
from speedtronic.metrics.events import EVENTS
from speedtronic.runtime import build_runtime
from tests.support.configs import tiny
from tests.support.models import Events

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/speedtronic"


def test_the_api_page_is_the_one_that_the_package_describes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "the public surface has changed: `make docs`, if it is meant to"


def test_every_option_tells_its_default() -> None:
    """The page shows what the help says, so that another default is a change of the page."""
    for name, parser in _leaf_parsers(build_parser()):
        for option in _options(parser):
            if option.nargs == 0:
                assert option.default is False, (name, option.option_strings)
            elif option.default is not None:
                assert "default" in (option.help or ""), (name, option.option_strings)
                assert str(option.default) in (option.help or ""), (name, option.option_strings)


def called(function: ast.expr) -> str | None:
    return getattr(function, "attr", getattr(function, "id", None))


def emitted_names() -> set[str]:
    """The first argument of every call of `emit`, `say` or `_say` in the source, where it is a literal."""
    calls = [
        node
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and called(node.func) in {"emit", "say", "_say"}
    ]
    return {arg.value for call in calls for arg in call.args[:1] if isinstance(arg, ast.Constant)}


def test_the_documented_events_are_those_that_the_source_sends() -> None:
    assert emitted_names() | {"log"} == EVENTS.keys()


def test_the_events_of_a_run_have_the_documented_keys(tmp_path: Path) -> None:
    config = tiny(tmp_path, data={"validation_fraction": 0.2}, checkpoint={"every_steps": 2}, eval={"every_steps": 2})
    trainer, _ = build_runtime(config)
    events = Events()
    trainer.logger.add_hook(events)
    trainer.fit()
    assert {"train_start", "train_step", "eval", "checkpoint", "train_end"} <= set(events.names())
    for name, payload in events.seen:
        assert payload.keys() - set(EVENTS[name].sometimes) == set(EVENTS[name].keys), name


def test_a_checkpoint_has_the_documented_keys(tmp_path: Path) -> None:
    trainer, manager = build_runtime(tiny(tmp_path))
    trainer.fit()
    state = manager.load_latest()
    assert state is not None
    flat = {
        f"{key}.{inner}" if inner else key
        for key, value in state.items()
        for inner in (value if key in {"rng", "data", "metrics"} else [""])
    }
    assert flat == CHECKPOINT_KEYS.keys()
