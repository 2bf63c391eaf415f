# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

# A test run starts some thousand Python processes: modules are compiled once and not in each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test lint types tests docs scripts bench coverage test-long test-long-ray test-long-pure test-pythons test-engines test-frameworks clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@tools/make-venv "$(PYTHON)" "$(VENV)"
	@tools/install-packages $(BIN)/python -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/trimtab demo

test: lint
	@$(MAKE) --no-print-directory -j 2 types docs scripts tests

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/python tools/house.py

types: setup
	@nice -n 19 $(BIN)/mypy

docs: setup
	@mkdir -p out; NO_MKDOCS_2_WARNING=1 nice -n 19 $(BIN)/mkdocs build --strict >out/docs.log 2>&1 || { cat out/docs.log; exit 1; }

scripts: setup
	@nice -n 19 tools/check-scripts $(BIN)

tests: setup
	@tools/install-browser
	@$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=40

bench: setup
	@$(BIN)/python -m bench

coverage: setup
	@tools/install-browser
	@$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=term

# What starts a Ray mostly waits, and shares it within a file; the rest is work for the processor.
test-long: setup
	@tools/install-browser
	@$(MAKE) --no-print-directory -k -j 2 test-long-ray test-long-pure

test-long-ray: setup
	@$(BIN)/pytest -m long -n 2 --dist loadfile --no-loadscope-reorder --durations=20 tests/ray tests/browser

test-long-pure: setup
	@nice $(BIN)/pytest -m long -n 2 --dist worksteal --durations=20 tests --ignore tests/ray --ignore tests/browser

test-pythons: setup
	@tools/test-pythons

test-engines: setup
	@tools/make-engine-envs && $(BIN)/pytest -m engines tests

test-frameworks: setup
	@tools/make-framework-envs && $(BIN)/pytest -m frameworks -n 2 --dist worksteal tests/frameworks tests/ray

clean:
	rm -rf $(VENV) .venv-* build dist out .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
