# Everything a developer types. Each target sets up its own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# GPT-2's published BPE ranks, against which the tokenizers are tested, lie in this source distribution.
WHISPER := openai_whisper-20250625
RANKS := build/test-data/gpt2.tiktoken
HISTORY := benchmarks/history.jsonl
PEERS := build/peers-venv
# Microsoft's emulator of Azure Blob Storage, from npm.
AZURITE := build/azurite/node_modules/azurite/package.json
AZURITE_VERSION := 3.37.0
# One process a core; the tests of one file stay together.
PYTEST := $(BIN)/pytest -n logical --dist loadfile
# Compiled modules are kept: without them each process that a test starts would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo diloco-demo test test-fast test-slow test-all test-stores extras check lint docs docs-site package bench bench-peers torture diloco-torture diloco-campaign clean

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

test-stores: $(READY) $(AZURITE)  ## the tests that need servers of object storage or a Hub, which they start on this machine
	$(BIN)/pytest -m stores tests/distributed tests/test_pages.py tests/cli

extras: $(READY)  ## install what few people need, so that none of its tests is skipped: trackers, lm-eval
	$(BIN)/pip install --quiet -c constraints.txt -e '.[wandb,mlflow,trackio,lm-eval]'

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

# The time to a loss needs a text: `make bench TEXT=tinyshakespeare.txt`.
bench: $(READY)  ## the benchmarks, half an hour: beside loops by hand, into a history, and that as a drawing
	$(BIN)/speedtronic bench --history $(HISTORY) $(if $(TEXT),--text $(TEXT))
	$(BIN)/speedtronic bench --history $(HISTORY) --plot docs/images/benchmarks.svg
	$(BIN)/python benchmarks/cross_entropy.py --chunk 256 --rounds 1
	$(BIN)/python benchmarks/prepare.py --rounds 3
	$(BIN)/python benchmarks/diloco_ablation.py --quick

bench-peers: $(PEERS)/.ready  ## beside Lightning and the Hugging Face Trainer, in an environment of its own
	$(PEERS)/bin/speedtronic bench --only peers --history $(HISTORY)

torture: $(READY)  ## kill a training run three hundred times, and one of two ranks a hundred times, and lose nothing
	$(BIN)/python -m tests.torture --self-test
	$(BIN)/python -m tests.torture --kills 300
	$(BIN)/python -m tests.torture.ranks --kills 100

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

$(PEERS)/.ready: pyproject.toml constraints.txt benchmarks/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --editable . --requirement benchmarks/peers.txt
	touch $@

$(AZURITE):
	npm install --silent --no-fund --no-audit --no-save --prefix build/azurite azurite@$(AZURITE_VERSION)

$(RANKS): | $(READY)
	mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest $(@D) openai-whisper==$(lastword $(subst -, ,$(WHISPER)))
	tar -xzf $(@D)/$(WHISPER).tar.gz -C $(@D) --strip-components=3 $(WHISPER)/whisper/assets/$(@F)
	touch $@
