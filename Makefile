# Every target works on a fresh clone: the virtual environment is made on first use.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
BASE   := $(VENV)/.base
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

#: bytecode is kept also where the environment says otherwise: tests start many processes; one thread each, two at a time
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

.PHONY: demo test check test-all test-avx2 unit quick lint docs bench experiments clean
.DEFAULT_GOAL := test

$(BASE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[data,train,report]'
	touch $@

$(STAMP): $(BASE)
	$(PIP) -e '.[dev,docs]' -e lab
	touch $@

demo: $(BASE)             ## the main job on bundled data; little to install
	$(BIN)/equipoise demo

test: $(STAMP)            ## everything except the slow tests
	$(MAKE) --no-print-directory -j 2 lint docs unit

check: $(STAMP)           ## style, types and the quick tests (not marked `medium` or `slow`): for every edit
	$(MAKE) --no-print-directory -j 2 lint quick

unit: $(STAMP)
	$(PYTEST) -m "not slow"

quick: $(STAMP)
	$(PYTEST) -m "not slow and not medium"

test-all: $(STAMP)        ## everything
	$(BIN)/python -m pytest

test-avx2: $(STAMP)       ## the same tests with the kernels of an older processor
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(PYTEST) -m "not slow"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet

bench: $(STAMP)           ## ratios against the alternatives, side by side in one run
	$(BIN)/equipoise bench norms

experiments: $(STAMP)     ## every experiment of the thesis at laptop scale; goes on where it was stopped
	$(BIN)/equipoise reproduce --all -o lab/results/experiments
	$(BIN)/equipoise reproduce -o lab/results/experiments --page docs/experiments/index.md

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
