"""`speedtronic diloco master`: average what the nodes send, and train nothing."""

from __future__ import annotations

import argparse
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedtronic.cli.arguments import add_config_arguments, load_from_arguments
from speedtronic.errors import ConfigError

if TYPE_CHECKING:
    from speedtronic.config import SpeedtronicConfig
    from speedtronic.distributed.outer import MasterOuterLoop
    from speedtronic.metrics import MetricLogger

_LOOK = 0.2  # seconds between two looks for a signal
_PATIENCE = 10.0  # seconds that a request which runs gets to end


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "master",
        help="average what the nodes send, and train nothing",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Publish the model's initial weights where the store has none, and from then on average what the\n"
        "nodes send and publish it. It needs neither data nor an accelerator. Everything that it knows is in the\n"
        "store: ended or killed at any moment, on this machine or another, it goes on where it was. Ctrl-C or SIGTERM\n"
        "ends it.",
        epilog="exit code: 128 + n ended by signal n, 1 the store does not answer at the start, 2 it cannot be used,\n"
        "or holds another model, or bad use",
    )
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config, folder = load_from_arguments(args)
    if config.distributed.repo_id is None:
        raise ConfigError("distributed.repo_id: needed; name a store, such as dir:///path or s3://bucket/prefix")

    config.distributed.enabled = True  # asked for by the command, so that what is not built is refused

    # Only now torch: a mistake in the file answers at once.
    from speedtronic.distributed.coordinator import build_master, say_through
    from speedtronic.distributed.stores.connect import connect
    from speedtronic.runtime import build_initial_model, build_logger, import_plugins, refuse_what_is_not_built

    refuse_what_is_not_built(config)
    import_plugins(config.plugins, folder)
    with _locked(config), build_logger(config) as logger:
        stopping = threading.Event()
        store = connect(config.distributed, stopping=stopping)
        model = build_initial_model(config, logger)
        master = build_master(config.distributed, store, model, say_through(logger), stopping=stopping)
        master.sync_once()  # a store that cannot be used, or holds another model, ends the command
        return 128 + _look_until_a_signal(master, store.url, logger)


def _look_until_a_signal(master: MasterOuterLoop, url: str, logger: MetricLogger) -> int:
    """Returns the signal."""
    from speedtronic.trainer.signals import SignalWatch

    with SignalWatch() as watch:
        master.start()
        logger.info(f"at version {master.outer_step}, averaging what the nodes put into {url}; Ctrl-C ends it")
        while watch.received is None:
            time.sleep(_LOOK)
        master.stop(_PATIENCE)
    logger.info(f"ended by {watch.received.name} at version {master.outer_step}, which is in {url}")
    return watch.received


def _locked(config: SpeedtronicConfig) -> AbstractContextManager[Any]:
    """Two masters of one store do each other no harm, but their log files would mingle."""
    from speedtronic.checkpoint import RunLock

    writes = config.logging.file is not None or config.logging.json_file is not None
    return RunLock(Path(config.run.output_dir)) if writes else nullcontext()
