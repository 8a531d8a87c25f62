# Everything a developer types. Each target sets up its own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check lint docs bench clean

demo: $(READY)  ## train the quickstart model on Python's own library and let it write
	$(BIN)/speedtronic data prepare --source python-stdlib --out data/python-stdlib
	$(BIN)/speedtronic train examples/quickstart.yaml
	$(BIN)/speedtronic generate examples/quickstart.yaml --prompt "def " --max-tokens 400 --seed 5
	@printf '%s\n' '' 'Next, after `source $(BIN)/activate`:' \
	  '  speedtronic generate examples/quickstart.yaml --prompt "class " --temperature 0.7' \
	  '  speedtronic train examples/quickstart.yaml run.max_steps=3000 --resume' \
	  '  speedtronic train examples/shakespeare_char.yaml data.text_path=FILE.txt' \
	  '  speedtronic checkpoints list runs/quickstart'

test: lint  ## every check and every test
	$(BIN)/pytest

check: lint  ## what must be green before each commit: everything but the slow tests
	$(BIN)/pytest -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)  ## write the generated pages anew
	$(BIN)/speedtronic schema --format markdown > docs/configuration.md

bench: $(READY)  ## the short benchmarks
	$(BIN)/python benchmarks/loop_overhead.py
	$(BIN)/python benchmarks/startup.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)
