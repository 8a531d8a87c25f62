"""What a launcher says by its variables."""

from __future__ import annotations

import pytest

from speedtronic.errors import ConfigError
from speedtronic.parallel.launch import Launch, launched

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_torchruns_variables_are_read() -> None:
    assert launched(TORCHRUN) == Launch(3, 4, 1, 2, "host", 29500, 2)


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "4"}, {**TORCHRUN, "WORLD_SIZE": "1"}])
def test_a_process_that_was_started_alone_has_no_launch(variables: dict[str, str]) -> None:
    assert launched(variables) is None


def test_missing_variables_are_named() -> None:
    with pytest.raises(ConfigError, match=r"lacks LOCAL_RANK, MASTER_PORT: start them with torchrun"):
        launched({key: value for key, value in TORCHRUN.items() if key not in ("LOCAL_RANK", "MASTER_PORT")})


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="whole numbers"):
        launched({**TORCHRUN, "MASTER_PORT": "http"})
