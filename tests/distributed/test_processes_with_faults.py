"""Three processes, each with its own client, over servers of which a third of the requests fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from speedtronic.distributed.tensors import load_safetensors
from tests.distributed.stores.servers import ON_SERVERS, PLACES
from tests.support.apart import run_apart
from tests.support.faulty_proxy import FaultyProxy
from tests.support.together import together

NODES, ROUNDS = 2, 3


@pytest.mark.parametrize("kind", ON_SERVERS)
def test_three_processes_end_with_the_weights_of_a_run_without_faults(kind: str, tmp_path: Path) -> None:
    undisturbed = together(NODES, ROUNDS)[0].state_dict()
    with PLACES[kind]() as place:
        proxy = FaultyProxy(place.address, failing=0.3, seed=1)
        with place.through(proxy) as faulty:
            files = run_apart(NODES, ROUNDS, f"{faulty.url}/run", faulty.options, tmp_path)
    assert proxy.failed > len(proxy.asked) / 5
    for file in files:
        weights = load_safetensors(file)
        assert weights.keys() == undisturbed.keys()
        assert all(torch.equal(weights[name], undisturbed[name]) for name in weights)
