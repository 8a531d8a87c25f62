from __future__ import annotations

import warnings
from collections import Counter

import pytest

from speedtronic.data.loading.datasets import SyntheticTokenDataset, TokenDataset
from speedtronic.data.loading.loader import TokenLoader
from speedtronic.data.loading.mixture import JoinedDataset, MixtureDataset
from speedtronic.errors import DataError


def dataset(size: int, seed: int) -> TokenDataset:
    return SyntheticTokenDataset(size, 4, 2**40, seed)


def mixture(weights: dict[str, float], sizes: dict[str, int], seed: int = 0) -> MixtureDataset:
    return MixtureDataset(
        {name: dataset(size, number) for number, (name, size) in enumerate(sizes.items())}, weights, seed
    )


def origins(mixed: MixtureDataset, count: int) -> list[tuple[str, int]]:
    """Which sample of which dataset each of the first samples is."""
    place = {
        tuple(row): (name, index)
        for name, each in mixed.datasets.items()
        for index, row in enumerate(each.batch(range(len(each)))["input_ids"].tolist())
    }
    return [place[tuple(row)] for row in mixed.batch(range(count))["input_ids"].tolist()]


def test_samples_come_as_often_as_their_weights_say_in_every_stretch() -> None:
    mixed = mixture({"a": 3, "b": 1}, {"a": 400, "b": 400})
    found = origins(mixed, 400)

    for start in range(0, 400, 100):
        share = Counter(name for name, _ in found[start : start + 100])
        assert abs(share["a"] - 75) <= 4
    for name in "ab":  # each dataset gives its samples in its own order
        numbers = [number for own, number in found if own == name]
        assert numbers == list(range(len(numbers)))


def test_the_mixture_ends_when_each_sample_has_come_and_repeats_the_others() -> None:
    mixed = mixture({"a": 0.5, "b": 0.5}, {"a": 30, "b": 7})
    found = Counter(origins(mixed, len(mixed)))

    assert set(found) == {("a", number) for number in range(30)} | {("b", number) for number in range(7)}
    assert max(found[("a", number)] for number in range(30)) == 1
    assert {found[("b", number)] for number in range(7)} <= {4, 5}


def test_it_is_a_function_of_seed_and_index() -> None:
    sizes = {"a": 300, "b": 300}
    first = mixture({"a": 1, "b": 2}, sizes)
    alone = [first[index]["labels"].tolist() for index in (5, 299, 17)]

    assert first.batch([5, 299, 17])["labels"].tolist() == alone
    assert mixture({"a": 2, "b": 4}, sizes).batch([5, 299, 17])["labels"].tolist() == alone
    assert origins(mixture({"a": 1, "b": 2}, sizes, seed=1), 100) != origins(first, 100)


def test_more_than_a_cycle_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speedtronic.data.loading.mixture.SLOTS", 20)
    mixed = mixture({"a": 1, "b": 1}, {"a": 95, "b": 3})
    found = origins(mixed, len(mixed))

    assert [number for name, number in found if name == "a"] == list(range(95))
    assert [number for name, number in found if name == "b"][:7] == [0, 1, 2, 0, 1, 2, 0]
    assert 180 < len(mixed) <= 190


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (0.0, "must be more than 0"),
        (-1.0, "must be more than 0"),
        (float("nan"), "must be more than 0"),
        (1e-9, "is 1e-09 of all, less than 1 in 10,000"),
    ],
)
def test_a_weight_without_a_slot_is_refused(weight: float, reason: str) -> None:
    with pytest.raises(DataError, match=f"the weight of b {reason}"):
        mixture({"a": 1.0, "b": weight}, {"a": 5, "b": 5})


def test_changed_weights_are_shown_on_resume_and_other_data_refused() -> None:
    sizes = {"web": 40, "code": 40}
    state = TokenLoader(mixture({"web": 3, "code": 1}, sizes), 2).state_dict()
    assert state["weights"] == [0.75, 0.25]

    told: list[str] = []
    loader = TokenLoader(mixture({"web": 1, "code": 1}, sizes), 2)
    loader.warn = told.append
    loader.load_state_dict(state)
    assert told == [
        "the weights of the mixture have changed: web 0.75 → 0.5, code 0.25 → 0.5; the new ones hold from here on, and "
        "until the epoch ends some samples may come twice and others not at all"
    ]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TokenLoader(mixture({"web": 6, "code": 2}, sizes), 2).load_state_dict(state)
    with pytest.raises(DataError, match="the data is not that of the checkpoint"):
        TokenLoader(mixture({"web": 3, "code": 1}, {"web": 40, "code": 41}), 2).load_state_dict(state)


def test_joined_datasets_come_one_behind_the_other() -> None:
    parts = [dataset(3, 0), dataset(2, 1)]
    joined = JoinedDataset(parts)

    expected = [part[index]["input_ids"].tolist() for part in parts for index in range(len(part))]
    assert joined.batch(range(5))["input_ids"].tolist() == expected
    assert len(joined) == 5
    assert joined.fingerprint != JoinedDataset(parts[::-1]).fingerprint
