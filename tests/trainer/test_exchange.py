"""What ranks tell each other of an update."""

from __future__ import annotations

import signal

from speedtronic.ranks import SingleProcess
from speedtronic.trainer.exchange import Totals, exchange
from tests.support.thread_group import ThreadGroup, on_ranks


def totals(group: ThreadGroup, received: signal.Signals | None, save_due: bool) -> Totals:
    return exchange(group, Totals(5, 10 + group.rank, 2, 100, received, save_due))()


def test_weights_samples_and_tokens_are_those_of_all_ranks() -> None:
    assert on_ranks(3, lambda group: totals(group, None, False)) == [Totals(5, 33, 6, 300, None, False)] * 3


def test_a_signal_to_any_rank_is_known_to_all() -> None:
    found = on_ranks(2, lambda group: totals(group, signal.SIGTERM if group.rank else None, False))
    assert [each.signal for each in found] == [signal.SIGTERM] * 2
    both = on_ranks(2, lambda group: totals(group, signal.SIGTERM if group.rank else signal.SIGINT, False))
    assert both[0].signal == both[1].signal


def test_only_the_clock_of_rank_0_says_that_a_checkpoint_is_due() -> None:
    assert [each.save_due for each in on_ranks(2, lambda group: totals(group, None, group.rank == 0))] == [True] * 2
    assert [each.save_due for each in on_ranks(2, lambda group: totals(group, None, group.rank == 1))] == [False] * 2


def test_a_single_process_has_its_own_numbers() -> None:
    own = Totals(5, 1, 2, 3, signal.SIGINT, True)
    assert exchange(SingleProcess(), own)() is own
