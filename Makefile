# make test    what CI runs, in some minutes         make demo    see it work
# make prove   that, and what takes longer           make clean   remove what make made
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: test prove style demo clean

# Four tests at once, on two cores too: ranks wait for one another more than they compute.
PYTEST := $(BIN)/python -m pytest --numprocesses 4 --dist worksteal

test: style
	$(PYTEST)

prove: style
	$(PYTEST) -m "prove or not prove"

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Installed once; again only when a requirement or a pin changes.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
