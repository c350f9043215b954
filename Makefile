# Everything runs in .venv/ of this folder.  make venv | test | demo | lint | test-slow
PYTHON ?= python3.11
EXTRA ?= cpu
VENV := .venv
BIN := $(VENV)/bin

.PHONY: venv test test-slow demo lint clean

venv: $(VENV)/.ready

# vLLM's CPU wheel pulls builds of torchvision, torchaudio and torchcodec that do not match
# its torch and break `import transformers`; an extra cannot uninstall, so this does.
$(VENV)/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -e ".[$(EXTRA),eval,demo,dev]"
	$(if $(filter cpu,$(EXTRA)),$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec)
	touch $@

test: venv
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: venv
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu"

demo: venv
	$(BIN)/python eval/demo.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info
