"""What `data prepare` reaches of the rate of `tokenizers.encode_batch` alone, and whether its result is the same.

    python benchmarks/prepare.py [--rounds N] [--megabytes N] [--vocab-size N] [--processes N] [--json]

The text is Python's own library, a file a document, and the tokenizer a byte-level BPE trained on it. `prepare` reads
the files, and in another turn the same documents as the lines of one `.jsonl`. Rounds alternate between them (A B C A B
C …); the figures are the medians of the rounds' ratios. `encode_batch` gets all documents at once
and may use the same number of CPUs; its time is without reading or writing anything, that of `prepare` is all of it,
starting processes included. Then the shards of one process, of several, and of several that were killed in the middle
and begun again are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers

from speedtronic.data.prepare.prepare import prepare
from speedtronic.data.prepare.process_pool import available_cpus
from speedtronic.data.prepare.sources import library_sources, texts
from speedtronic.data.prepare.staging import is_resumable
from speedtronic.data.prepare.train_tokenizer import train_tokenizer


def write_corpus(folder: Path, size: int) -> None:
    """Files of Python's library until they have `size` bytes, then those again."""
    sources, _ = library_sources()
    documents = list(texts(sources))
    folder.mkdir()
    number = written = 0
    while written < size:
        text = documents[number % len(documents)].encode()
        (folder / f"{number:05d}.py").write_bytes(text)
        written += len(text)
        number += 1


def fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def prepare_killed(corpus: Path, out: Path, tokenizer: Path, processes: int) -> bool:
    """Prepare by the command, kill it when it can go on, and run it again. Returns whether it was killed in time."""
    command = [sys.executable, "-m", "speedtronic", "data", "prepare", str(corpus), "--out", str(out)]
    command += ["--tokenizer", str(tokenizer), "--processes", str(processes)]
    # Python itself remarks there on what a killed process leaves.
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while running.poll() is None and not is_resumable(out):
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    killed = running.wait() == -signal.SIGKILL
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return killed


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=30)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--processes", type=int, default=available_cpus())
    parser.add_argument("--json", action="store_true", help="one line for a program")
    args = parser.parse_args()
    # Before the library starts its threads.
    os.environ["RAYON_NUM_THREADS"] = str(args.processes)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), args)
    print(json.dumps({"benchmark": "prepare", **report}) if args.json else table(report))


def measure(folder: Path, args: argparse.Namespace) -> dict[str, object]:
    corpus, tokenizer = folder / "corpus", folder / "tokenizer.json"
    write_corpus(corpus, args.megabytes * 10**6)
    train_tokenizer([corpus], tokenizer, vocab_size=args.vocab_size)
    documents = [path.read_text(encoding="utf-8") for path in sorted(corpus.iterdir())]
    size = sum(len(document.encode()) for document in documents)
    library = tokenizers.Tokenizer.from_file(str(tokenizer))

    def by_itself() -> None:
        library.encode_batch(documents, add_special_tokens=False)

    def by_prepare() -> None:
        prepare([corpus], folder / "shards", tokenizer=str(tokenizer), processes=args.processes, force=True)

    lines = folder / "corpus.jsonl"
    lines.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), encoding="utf-8")

    def by_prepare_from_lines() -> None:
        prepare([lines], folder / "from-lines", tokenizer=str(tokenizer), processes=args.processes, force=True)

    contenders: dict[str, Callable[[], None]] = {
        "encode_batch": by_itself,
        "prepare": by_prepare,
        "from .jsonl": by_prepare_from_lines,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, run in contenders.items():
            started, cpu_before = time.perf_counter(), cpu_seconds()
            run()
            seconds[name].append(time.perf_counter() - started)
            cpu[name].append(cpu_seconds() - cpu_before)
    prepare([corpus], folder / "one", tokenizer=str(tokenizer), processes=1)
    killed = prepare_killed(corpus, folder / "killed", tokenizer, args.processes)
    made = {name: fingerprint(folder / name) for name in ("shards", "one", "killed")}
    ratios = {
        name: [alone / whole for alone, whole in zip(seconds["encode_batch"], seconds[name], strict=True)]
        for name in ("prepare", "from .jsonl")
    }
    return {
        "megabytes": size / 1e6,
        "vocab_size": library.get_vocab_size(),
        "processes": args.processes,
        "rates": {name: statistics.median(each) for name, each in ratios.items()},
        "ratios": ratios,
        "megabytes_per_second": {name: size / 1e6 / statistics.median(each) for name, each in seconds.items()},
        "cpu_seconds": {name: statistics.median(each) for name, each in cpu.items()},
        "killed_in_the_middle": killed,
        "identical": len(set(made.values())) == 1,
    }


def table(report: dict[str, object]) -> str:
    rates, cpu, ratios = report["megabytes_per_second"], report["cpu_seconds"], report["ratios"]
    assert isinstance(rates, dict)
    assert isinstance(cpu, dict)
    assert isinstance(ratios, dict)
    reached = report["rates"]
    assert isinstance(reached, dict)
    lines = [
        f"{report['megabytes']:.1f} MB, vocabulary {report['vocab_size']}, {report['processes']} processes, "
        f"tokenizers {tokenizers.__version__}"
    ]
    lines += [f"  {name:12} {rates[name]:8.2f} MB/s {cpu[name]:8.1f} CPU seconds" for name in rates]
    for name, rate in reached.items():
        lines.append(f"  {name:12} reaches {rate:.2f} of encode_batch (median of {len(ratios[name])} ratios)")
    outcome = "identical" if report["identical"] else "DIFFERENT"
    killed = "killed in the middle" if report["killed_in_the_middle"] else "not killed in time"
    lines.append(f"  shards of 1 process, of {report['processes']}, and {killed} and begun again: {outcome}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
