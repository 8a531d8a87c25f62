# Everything a developer types. Each target sets up its own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# GPT-2's published BPE ranks, against which the tokenizers are tested, lie in this source distribution.
WHISPER := openai_whisper-20250625
RANKS := build/test-data/gpt2.tiktoken
# One process a core; the tests of one file stay together.
PYTEST := $(BIN)/pytest -n logical --dist loadfile
# Compiled modules are kept: without them each process that a test starts would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo diloco-demo test test-fast test-slow test-all test-stores check lint docs docs-site package bench torture diloco-torture diloco-campaign clean

demo: $(READY)  ## train the quickstart model on Python's own library, let it write, and draw its report
	$(BIN)/speedtronic data prepare --source python-stdlib --out data/python-stdlib
	$(BIN)/speedtronic train examples/quickstart.yaml --overwrite
	$(BIN)/speedtronic generate examples/quickstart.yaml --prompt "def " --max-tokens 400 --seed 5
	$(BIN)/speedtronic report runs/quickstart
	@printf '%s\n' '' 'Open runs/quickstart/report.html in a browser to see the run. Next, after `source $(BIN)/activate`:' \
	  '  speedtronic generate examples/quickstart.yaml --prompt "class " --temperature 0.7' \
	  '  speedtronic train examples/quickstart.yaml run.max_steps=3000 --resume' \
	  '  speedtronic train examples/shakespeare_char.yaml data.text_path=FILE.txt' \
	  '  speedtronic checkpoints list runs/quickstart'

diloco-demo: $(READY)  ## let three processes that share only a folder train the quickstart model, and kill one of them
	$(BIN)/speedtronic data prepare --source python-stdlib --out data/python-stdlib
	$(BIN)/python benchmarks/diloco_demo.py

test: $(RANKS)  ## everything that a change needs: lint, types, and all tests but the slow ones
	$(MAKE) --jobs 2 lint test-fast

test-fast: $(READY)
	$(PYTEST)

test-slow: $(READY) $(RANKS)  ## the slow tests: campaigns, compilers, examples, many processes
	$(PYTEST) -m "slow and not stores"

test-all: test test-slow  ## both of the above

test-stores: $(READY)  ## the tests that need a server of S3: two are started on this machine
	$(BIN)/pytest -m stores tests/distributed

check: test  ## what must be green before each commit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)  ## write the generated pages anew
	$(BIN)/speedtronic schema --format markdown > docs/configuration.md
	$(BIN)/python docs/reference.py

docs-site: $(READY)  ## build the site of the documentation, warnings as errors, and check its links
	$(BIN)/zensical build --clean --strict
	$(BIN)/python docs/site_links.py build/site

package: $(READY)  ## make a wheel and a source distribution, and use the wheel in an empty environment
	PYTHON=$(PYTHON) .ci/package $(BIN)

bench: $(READY)  ## the benchmarks
	$(BIN)/python benchmarks/loop_overhead.py
	$(BIN)/python benchmarks/tune.py --rounds 3
	$(BIN)/python benchmarks/loop_overhead.py --compile
	$(BIN)/python benchmarks/loop_overhead.py --compile --size small --rounds 5 --steps 20
	$(BIN)/python benchmarks/cross_entropy.py --chunk 256 --rounds 1
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/prepare.py --rounds 3
	$(BIN)/python benchmarks/checkpoint.py --rounds 3
	$(BIN)/python benchmarks/optimizer_step.py --rounds 5 --bf16-rounds 0
	$(BIN)/python benchmarks/generation.py
	$(BIN)/python benchmarks/diloco.py --history 10 200 --nodes 2 16 --rounds 1
	$(BIN)/python benchmarks/diloco_ablation.py --quick

torture: $(READY)  ## kill a training run three hundred times, and lose nothing
	$(BIN)/python -m tests.torture --self-test
	$(BIN)/python -m tests.torture --kills 300

diloco-torture: $(READY)  ## kill three processes that train together again and again, and see what it costs
	$(BIN)/python -m tests.torture_diloco --seeds 0 1 2

diloco-campaign: $(READY)  ## two hundred such kills, over a folder and over S3, and each version recomputed; an hour
	$(BIN)/python -m tests.torture_diloco --only-killed --kills 100 --steps 150 --inner-steps 10 --every 30 --pace 0.02
	$(BIN)/python -m tests.torture_diloco --only-killed --kills 100 --steps 150 --inner-steps 10 --every 30 --pace 0.02 --store s3

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	touch $(READY)

$(RANKS): | $(READY)
	mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest $(@D) openai-whisper==$(lastword $(subst -, ,$(WHISPER)))
	tar -xzf $(@D)/$(WHISPER).tar.gz -C $(@D) --strip-components=3 $(WHISPER)/whisper/assets/$(@F)
	touch $@
