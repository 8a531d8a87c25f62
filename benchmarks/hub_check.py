"""What a store on the real Hub must do, one line for each: `bash benchmarks/hub_check.sh ADDRESS`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from speedtronic.distributed.stores import RetryingStore, open_store, prove_exclusive
from speedtronic.errors import SpeedtronicError


def main(address: str) -> int:
    store = RetryingStore(open_store(address), attempts=4)
    part = b"0123456789" * 100_000
    names = [f"head/{number:08d}.json" for number in range(3)]

    def check_listing() -> None:
        listed = [entry.name for entry in store.list_after("head/", names[0]).entries]
        assert listed == names[1:], listed

    def check_reading() -> None:
        assert store.get(names[0], limit=100) == b"{}"
        assert store.get("in/a/1/00000001.safetensors", limit=len(part)) == part
        assert store.get("in/a/1/00000001.safetensors", limit=10) is None
        assert store.get("head/00000009.json", limit=100) is None

    def check_creating() -> None:
        assert [store.put_if_absent(name, b"{}") for name in names] == [True] * 3
        assert store.put_if_absent("in/a/1/00000001.safetensors", part)
        assert not store.put_if_absent(names[0], b"again")

    def check_deleting() -> None:
        for name in (*names, "in/a/1/00000001.safetensors"):
            store.delete(name)
            assert store.get(name, limit=10**7) is None

    checks: dict[str, Callable[[], None]] = {
        "an object is created once": lambda: prove_exclusive(store),
        "objects are created": check_creating,
        "they are read at once": check_reading,
        "they are listed after a name": check_listing,
        "they are deleted": check_deleting,
    }
    failed = 0
    for name, check in checks.items():
        began = time.perf_counter()
        try:
            check()
        except (AssertionError, SpeedtronicError) as error:
            failed += 1
            print(f"FAILED  {name}: {error}")
        else:
            print(f"ok      {name} ({time.perf_counter() - began:.2f} s)")
    store.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
