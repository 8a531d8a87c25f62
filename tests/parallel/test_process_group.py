"""Real processes share numbers and values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launching import run_ranks


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_numbers_values_and_tensors_travel_between_processes(size: int, tmp_path: Path) -> None:
    results = run_ranks(size, ["-W", "error", "-m", "tests.parallel.operations"], cwd=tmp_path)
    for rank, (code, output, errors) in enumerate(results):
        # gloo of torch 2.9 prints a line of its own before it.
        assert (code, output.splitlines()[-1:]) == (0, [f"checked {rank} of {size}"]), errors


@pytest.mark.slow
def test_a_rank_that_never_comes_is_an_error_of_the_others(tmp_path: Path) -> None:
    code = (
        "import os\nfrom speedtronic.config import ParallelConfig\nfrom speedtronic.parallel.start import join_group\n"
        "group = join_group(ParallelConfig(), 'cpu')[0]\n"
        "group.reduce(1)\n"
        "os._exit(3) if group.rank else group.reduce(1)\n"
    )
    (first, _, errors), (second, _, _) = run_ranks(2, ["-c", code], cwd=tmp_path)
    assert second == 3
    assert first == 1
    assert "RankError: rank 0 waited for a number of the other ranks, and one of them has gone" in errors
