"""`speedtronic diloco master`: average what the nodes send, until there is enough of it."""

from __future__ import annotations

import argparse
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from speedtronic.cli.arguments import add_config_arguments, load_from_arguments
from speedtronic.errors import ConfigError, DataError, MissingExtraError

if TYPE_CHECKING:
    from torch import nn

    from speedtronic.config import EvalConfig, SpeedtronicConfig
    from speedtronic.distributed.outer import MasterOuterLoop
    from speedtronic.distributed.protocol import Manifest
    from speedtronic.evaluation import Evaluation
    from speedtronic.metrics import MetricLogger

_TICK = 0.2  # seconds between two looks for a signal, a new version, and the end
_STOP_TIMEOUT = 10.0  # seconds that a running request gets to end


def add_master_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "master",
        help="average what the nodes send, and train nothing",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Publish the model's initial weights where the store has none, and from then on average what the\n"
        "nodes send and publish it. It needs no accelerator. All of its state is in the store: a master that ended\n"
        "or was killed at any moment, on this machine or another, continues where it stopped.\n"
        "Ctrl-C, SIGTERM or SIGHUP ends it, and --until does.\n\n"
        "With eval.every_steps it evaluates the global weights on the held-out data, on the CPU, each time that the\n"
        "node that is furthest has made so many steps; with --until and eval.at_end also at the end. Where the data\n"
        "is not on this machine, it says so and only averages.",
        epilog="exit code: 0 --until is reached, 128 + n ended by signal n, 1 the store does not answer at the start,\n"
        "2 it cannot be used, or holds another model, or bad use",
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--until",
        metavar="STEP",
        help="end when the published weights contain STEP optimizer steps of every node that has sent something, "
        "without those that are gone (see `diloco status`); usually the run.max_steps of the nodes",
    )
    parser.set_defaults(run=run_master)


def run_master(args: argparse.Namespace) -> int:
    config, folder = load_from_arguments(args)
    if config.distributed.repo_id is None:
        raise ConfigError("distributed.repo_id: needed; name a store, such as dir:///path or s3://bucket/prefix")
    until = None if args.until is None else _steps(args.until)
    config.distributed.enabled = True  # asked for by the command, so that what is not built is refused

    # torch is imported only now: a mistake in the file is reported at once.
    from speedtronic.checkpoint import RunLock
    from speedtronic.config.checks import refuse_what_is_not_built
    from speedtronic.distributed.coordinator import build_master
    from speedtronic.distributed.outer import say_through
    from speedtronic.distributed.stores.open import connect
    from speedtronic.runtime import build_initial_model, build_logger, import_plugins
    from speedtronic.trainer.signals import SignalWatch

    refuse_what_is_not_built(config)
    import_plugins(config.plugins, folder)
    # Two masters of one store do each other no harm, but their log files would mingle.
    writes_logs = config.logging.file is not None or config.logging.json_file is not None
    lock = RunLock(Path(config.run.output_dir)) if writes_logs else nullcontext()
    with lock, build_logger(config) as logger:
        stopping = threading.Event()
        store = connect(config.distributed, stopping=stopping)
        model = build_initial_model(config, logger)
        master = build_master(config.distributed, store, model, say_through(logger), stopping=stopping)
        evaluations = _build_evaluations(config, model, logger, at_end=until is not None)
        master.sync_once()  # a store that cannot be used, or holds another model, ends the command
        with SignalWatch() as watch:
            master.start()
            logger.info(
                f"at version {master.outer_step}, averaging what the nodes put into {store.url}; Ctrl-C ends it. "
                "A version's fraction is the part of a round (a delta of every node) that was in it"
            )
            # The rounds run on the master's thread. This one evaluates meanwhile.
            is_over = False
            while watch.received is None and not is_over:
                time.sleep(_TICK)
                is_over = until is not None and _has_reached(master.newest, until, time.time())
                if evaluations is not None:
                    evaluations.advance(master, is_over, lambda: watch.received is not None)
            master.stop(_STOP_TIMEOUT)
        best = "" if evaluations is None or evaluations.best is None else f"; the best was version {evaluations.best}"
        cause = f"by {watch.received.name} " if watch.received is not None else f"by --until {until} "
        logger.info(f"ended {cause}at version {master.outer_step}, which is in {store.url}{best}")
    return 0 if watch.received is None else 128 + watch.received


def _steps(word: str) -> int:
    """The number that `--until` gives."""
    try:
        steps = int(word)
    except ValueError:
        steps = 0
    if steps < 1:
        raise ConfigError(f"--until must be a whole number of steps, at least 1, not {word}")
    return steps


def _has_reached(head: Manifest | None, until: int, now: float) -> bool:
    """Whether a version contains so many steps of every node that is not gone, and of at least one node."""
    from speedtronic.distributed.status import status_of

    if head is None:
        return False
    nodes = status_of("", head, None, {}, now).nodes
    return any(node.step >= until for node in nodes) and all(
        node.step >= until for node in nodes if node.health != "gone"
    )


# ---------------------------------------------------------------------- evaluation


def _build_evaluations(
    config: SpeedtronicConfig, model: nn.Module, logger: MetricLogger, *, at_end: bool
) -> Evaluations | None:
    """What evaluates the global weights, if the configuration asks for it and this machine has the data."""
    from speedtronic.runtime import build_evaluator_on_cpu

    at_end = at_end and config.eval.at_end
    if config.data.source is None or (config.eval.every_steps is None and not at_end):
        return None
    try:
        evaluator = build_evaluator_on_cpu(config, logger)
    except (DataError, MissingExtraError, OSError) as error:
        logger.warning(f"nothing is evaluated, since the data cannot be read on this machine: {error}")
        return None
    return None if evaluator is None else Evaluations(evaluator, model, logger, config.eval, at_end)


class Evaluations:
    """The evaluations of a master: when they are due, and which version was the best.

    Args:
        evaluator: measures the loss.
        model: filled with the global weights for each evaluation.
        logger: gets an `eval` event for each.
        section: `every_steps` of the node that is furthest are between two evaluations; None for none before the end.
        at_end: whether the last version is evaluated.

    Attributes:
        best: the version that is the best by `eval.monitor` so far.
    """

    def __init__(
        self, evaluator: Evaluation, model: nn.Module, logger: MetricLogger, section: EvalConfig, at_end: bool
    ) -> None:
        from speedtronic.trainer.monitor import Monitor

        self.best: int | None = None
        self._monitor = Monitor(section)
        self._best_value: float | None = None
        self._evaluator = evaluator
        self._model = model
        self._logger = logger
        self._every = section.every_steps
        self._at_end = at_end
        self._step: int | None = None  # of the last evaluation, or of the start
        self._version: int | None = None  # of the last evaluation
        self._failed = False

    def advance(self, master: MasterOuterLoop, is_over: bool, should_stop: Callable[[], bool]) -> None:
        """Evaluate the newest version, if that is due."""
        from speedtronic.distributed.schema import rebase_
        from speedtronic.trainer.monitor import emit_evaluation

        if self._failed or master.newest is None or not self._is_due(master.newest, is_over):
            return
        published = master.published()
        until = time.monotonic() + _STOP_TIMEOUT
        while published is None and is_over and not should_stop() and time.monotonic() < until:
            time.sleep(_TICK)  # there will be no other chance
            published = master.published()
        if published is None:
            return
        head, weights = published
        rebase_(self._model, weights, {}, adopt=True)
        del published, weights  # a whole model, which the next round needs
        try:
            found = self._evaluator(self._model, should_stop)
            value = None if found is None else self._monitor.value(found)
        except Exception as error:  # noqa: BLE001 - the user's model and data; the rounds go on without evaluations
            self._failed = True
            trace = "".join(traceback.format_exception(error)).rstrip()
            self._logger.warning(f"the evaluation of version {head.version} failed; there will be no more:\n{trace}")
            return
        if found is None or value is None:
            return
        self._step, self._version = _furthest(head), head.version
        if self._monitor.improves(value, self._best_value):
            self._best_value, self.best = value, head.version
        emit_evaluation(self._logger, self._step, found, version=head.version, best_version=self.best)

    def _is_due(self, head: Manifest, is_over: bool) -> bool:
        if is_over:
            return self._at_end and head.version != self._version
        step = _furthest(head)
        if self._step is None:  # the start
            self._step = step
        return self._every is not None and step // self._every > self._step // self._every


def _furthest(head: Manifest) -> int:
    """Optimizer steps of the node of which a version contains the most."""
    return max((mark.position.step for mark in head.nodes.values()), default=0)
