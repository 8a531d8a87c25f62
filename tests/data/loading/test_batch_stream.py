from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, get_worker_info

from speedtronic.data import BatchStream, SyntheticTokenDataset, TokenLoader, infinite_batches
from speedtronic.errors import DataError


def capture_rng() -> dict[str, Any]:
    return {"python": random.getstate(), "torch": torch.get_rng_state()}


def restore_rng(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])


def batch_stream(loader: Any) -> BatchStream:
    return BatchStream(loader, capture_rng=capture_rng, restore_rng=restore_rng, warn=lambda _: None)


class Augmented(Dataset[torch.Tensor]):
    """Ten samples with noise from the global generator."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + 0.1 * torch.rand(1)


def foreign_loader() -> DataLoader[torch.Tensor]:
    return DataLoader(Augmented(), batch_size=2, shuffle=True)


def test_infinite_batches_cycles() -> None:
    assert list(islice(infinite_batches([1, 2, 3]), 7)) == [1, 2, 3, 1, 2, 3, 1]


def test_a_pass_that_yields_nothing_is_an_error_the_first_time() -> None:
    with pytest.raises(DataError, match="a whole pass over the data loader yielded no batch"):
        next(infinite_batches([]))
    with pytest.raises(DataError, match="yielded no batch"):
        next(batch_stream([]))


def test_a_pass_that_yields_nothing_is_an_error_later_too() -> None:
    batches = infinite_batches(iter([1, 2]))
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(DataError, match="yielded no batch"):
        next(batches)

    stream = batch_stream(iter([1]))
    next(stream)
    with pytest.raises(DataError, match=r"it is an iterator \(list_iterator\), which can be read only once"):
        next(stream)


def test_a_loader_that_cannot_be_iterated_is_refused() -> None:
    def yields_batches() -> Iterator[int]:
        yield 1

    with pytest.raises(DataError, match=r"must be an iterable of batches, not function; .* whose __iter__ calls it"):
        batch_stream(yields_batches)


def test_a_stream_continues_from_pass_to_pass() -> None:
    assert list(islice(batch_stream([1, 2]), 5)) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("done", [0, 1, 4, 5, 7])
def test_our_loader_continues_at_its_own_position(done: int) -> None:
    def stream() -> BatchStream:
        return batch_stream(TokenLoader(SyntheticTokenDataset(10, 4, 50, 0), 2, shuffle=True, seed=3))

    straight = [batch["labels"].tolist() for batch in islice(stream(), 12)]
    interrupted = stream()
    list(islice(interrupted, done))
    resumed = stream()
    resumed.load_state_dict(interrupted.state_dict())

    assert [batch["labels"].tolist() for batch in islice(resumed, 12 - done)] == straight[done:]


def train(stream: BatchStream, steps: int) -> list[Any]:
    """Steps that draw from the same generators as the data does, as dropout would."""
    return [(next(stream).tolist(), torch.rand(2).tolist(), random.random()) for _ in range(steps)]


@pytest.mark.parametrize("done", [0, 1, 4, 5, 6, 10, 13])
def test_a_foreign_loader_is_replayed_exactly(done: int) -> None:
    torch.manual_seed(0)
    random.seed(0)
    straight = train(batch_stream(foreign_loader()), 16)

    torch.manual_seed(0)
    random.seed(0)
    interrupted = batch_stream(foreign_loader())
    assert train(interrupted, done) == straight[:done]
    state, rng = interrupted.state_dict(), capture_rng()

    torch.manual_seed(99)
    resumed = batch_stream(foreign_loader())
    resumed.load_state_dict(state)
    restore_rng(rng)

    assert train(resumed, 16 - done) == straight[done:]


TEN = list(range(10))


@pytest.mark.parametrize(
    ("then", "now", "done", "left"),
    [(2, 4, 2, 6), (4, 2, 2, 2), (3, 2, 1, 8), (3, 5, 4, 10), (3, 2, 4, 10)],
)
def test_a_changed_batch_size_continues_with_the_same_samples_and_is_said(
    then: int, now: int, done: int, left: int
) -> None:
    """The last two are at the end of the epoch, whose last batch has one sample."""
    torch.manual_seed(0)
    interrupted = batch_stream(DataLoader(TEN, then, shuffle=True))
    seen = [sample for batch in islice(interrupted, done) for sample in batch.tolist()]
    said: list[str] = []
    resumed = BatchStream(
        DataLoader(TEN, now, shuffle=True), capture_rng=capture_rng, restore_rng=restore_rng, warn=said.append
    )
    resumed.load_state_dict(interrupted.state_dict())
    rest: list[int] = []
    while len(rest) < left:
        rest += next(resumed).tolist()
    assert f"the batch size of the data loader was {then} and is {now}" in said[0]
    twice = (done * then) % now if done * then < 10 else 0
    assert f", and {twice} samples come twice" in said[0] or not twice
    if done * then < 10:
        assert sorted(seen[: len(seen) - twice] + rest) == TEN
    else:
        assert sorted(rest) == TEN


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def orders(make: Callable[[], DataLoader[int]], done: int) -> tuple[list[Any], list[Any]]:
    """The ten batches after `done`, of a stream that was never interrupted and of one that was resumed."""
    torch.manual_seed(0)
    straight = [batch.tolist() for batch in islice(batch_stream(make()), done, done + 10)]
    torch.manual_seed(0)
    interrupted = batch_stream(make())
    list(islice(interrupted, done))
    state, rng = interrupted.state_dict(), capture_rng()
    torch.manual_seed(99)
    resumed = batch_stream(make())
    resumed.load_state_dict(state)
    restore_rng(rng)
    return straight, [batch.tolist() for batch in islice(resumed, 10)]


@pytest.mark.parametrize("done", range(10))
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(TEN, 4, shuffle=True, generator=own_generator()),
        lambda: DataLoader(TEN, 4, sampler=RandomSampler(TEN, generator=own_generator())),
        lambda: DataLoader(
            TEN, batch_sampler=BatchSampler(RandomSampler(TEN, generator=own_generator()), 4, drop_last=False)
        ),
    ],
    ids=["loader", "sampler", "batch sampler"],
)
def test_a_generator_of_the_loaders_own_continues_too(make: Callable[[], DataLoader[int]], done: int) -> None:
    straight, resumed = orders(make, done)

    assert resumed == straight


@pytest.mark.parametrize("generator", [own_generator, lambda: None], ids=["own", "global"])
def test_persistent_workers_keep_the_order_on_resume(generator: Callable[[], torch.Generator | None]) -> None:
    straight, resumed = orders(
        lambda: DataLoader(TEN, 4, shuffle=True, num_workers=1, persistent_workers=True, generator=generator()), 5
    )

    assert resumed == straight


def test_a_stream_goes_back_to_the_start_with_the_loader_at_hand() -> None:
    stream = batch_stream(DataLoader(TEN, 4, shuffle=True, generator=own_generator()))
    start = stream.state_dict()
    first = [batch.tolist() for batch in islice(stream, 5)]

    stream.load_state_dict(start)

    assert [batch.tolist() for batch in islice(stream, 5)] == first


def test_a_loader_without_the_checkpoints_generator_is_refused() -> None:
    interrupted = batch_stream(DataLoader(TEN, 4, shuffle=True, generator=own_generator()))
    next(interrupted)

    with pytest.raises(DataError, match="has 0 random generators of its own, but the checkpoint was saved with 1"):
        batch_stream(DataLoader(TEN, 4, shuffle=True)).load_state_dict(interrupted.state_dict())


def test_a_replay_warns_and_leaves_the_generators_as_they_are() -> None:
    interrupted = batch_stream(foreign_loader())
    list(islice(interrupted, 7))
    warnings: list[str] = []
    resumed = BatchStream(foreign_loader(), capture_rng=capture_rng, restore_rng=restore_rng, warn=warnings.append)
    before = capture_rng()

    resumed.load_state_dict(interrupted.state_dict())

    assert len(warnings) == 1
    assert "the first 2 batches of epoch 1 again" in warnings[0]
    assert torch.equal(capture_rng()["torch"], before["torch"])
    assert capture_rng()["python"] == before["python"]


def test_a_loader_that_has_become_shorter_is_an_error() -> None:
    interrupted = batch_stream([1, 2, 3])
    list(islice(interrupted, 3))

    with pytest.raises(DataError, match="ends after 2 batches, but the checkpoint was made after 3"):
        batch_stream([1, 2]).load_state_dict(interrupted.state_dict())


def test_the_state_of_another_kind_of_loader_is_refused() -> None:
    ours = batch_stream(TokenLoader(SyntheticTokenDataset(10, 4, 50, 0), 2))

    with pytest.raises(DataError, match="another kind of loader"):
        ours.load_state_dict(batch_stream([1]).state_dict())
    with pytest.raises(DataError, match="another kind of loader"):
        batch_stream([1]).load_state_dict(ours.state_dict())


class Stateful:
    """A loader of the kind that, restored at the end of its epoch, first finishes that epoch with nothing."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 3:
            self.position += 1
            yield self.position
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_a_loader_restored_at_the_end_of_its_epoch_begins_the_next() -> None:
    interrupted = batch_stream(Stateful())
    assert list(islice(interrupted, 3)) == [1, 2, 3]
    resumed = batch_stream(Stateful())

    resumed.load_state_dict(interrupted.state_dict())

    assert list(islice(resumed, 4)) == [1, 2, 3, 1]


# ---------------------------------------------------------------------- loaders with a position of their own


class Pair(Dataset[Any]):
    """Eleven samples; without workers they hold noise from the global generator."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.zeros(1) if get_worker_info() else 0.1 * torch.rand(1)
        return index + noise


def stateful(num_workers: int, own: bool) -> Any:
    library = pytest.importorskip("torchdata.stateful_dataloader")
    generator = own_generator() if own else None
    return library.StatefulDataLoader(Pair(), 2, shuffle=True, num_workers=num_workers, generator=generator)


def check_that_it_continues(make: Callable[[], Any], done: int) -> None:
    def seeded(seed: int) -> BatchStream:
        torch.manual_seed(seed)
        random.seed(seed)
        return batch_stream(make())

    straight = train(seeded(0), 16)
    interrupted = seeded(0)
    interrupted.state_dict()  # as the trainer does before it begins
    assert train(interrupted, done) == straight[:done]
    state, rng = interrupted.state_dict(), capture_rng()

    resumed = seeded(99)
    resumed.load_state_dict(state)
    restore_rng(rng)
    resumed.state_dict()

    assert train(resumed, 16 - done) == straight[done:]


LIBRARY_WARNS = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@LIBRARY_WARNS
@pytest.mark.parametrize("own", [False, True], ids=["global generator", "own generator"])
@pytest.mark.parametrize("done", [0, 1, 4, 6, 7, 13])
def test_a_stateful_loader_continues_at_its_own_position(done: int, own: bool) -> None:
    check_that_it_continues(lambda: stateful(0, own), done)


@LIBRARY_WARNS
@pytest.mark.parametrize("done", [4, 6])
def test_a_stateful_loader_with_workers_continues_at_its_own_position(done: int) -> None:
    check_that_it_continues(lambda: stateful(2, own=True), done)


def test_skipping_continues_behind_the_batches_whether_or_not_the_loader_seeks() -> None:
    dataset = SyntheticTokenDataset(10, 4, 64, seed=0)
    warnings: list[str] = []

    def streams() -> Iterator[BatchStream]:
        for loader in (
            TokenLoader(dataset, 2, shuffle=True),
            list(TokenLoader(dataset, 2, shuffle=True)),
        ):
            yield BatchStream(loader, capture_rng=capture_rng, restore_rng=restore_rng, warn=warnings.append)

    expected = list(TokenLoader(dataset, 2, shuffle=True))
    for stream in streams():
        next(stream)
        stream.skip(3)
        assert torch.equal(next(stream)["input_ids"], expected[4]["input_ids"])
    assert warnings == ["the data loader cannot seek: reading 3 batches to continue behind them"]


def test_skipping_over_the_end_of_an_epoch_and_right_after_a_resume() -> None:
    dataset = SyntheticTokenDataset(10, 4, 64, seed=0)
    whole = batch_stream(TokenLoader(dataset, 2, shuffle=True))
    expected = [next(whole)["input_ids"] for _ in range(12)]
    first = batch_stream(TokenLoader(dataset, 2, shuffle=True))
    next(first)
    resumed = batch_stream(TokenLoader(dataset, 2, shuffle=True))
    resumed.load_state_dict(first.state_dict())
    resumed.skip(4)
    assert torch.equal(next(resumed)["input_ids"], expected[5])
    again = batch_stream(TokenLoader(dataset, 2, shuffle=True))
    again.load_state_dict(resumed.state_dict())
    again.skip(5)
    assert torch.equal(next(again)["input_ids"], expected[11])
