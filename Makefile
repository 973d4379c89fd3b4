# Every target does its own set-up in .venv (test-newest and test-lowest beside it) and
# may be run again at any time.
#
#   make quickstart    train and look inside a small mixture of experts
#   make test          the library on PyTorch, its core on JAX and TensorFlow, too
#   make test-fast     the core of layers and one model, up to the first failures
#   make test-release  the guides, the wheel, the site, the tools, if anything changed
#   make test-newest   the core on the newest Python at hand and the newest packages
#   make test-lowest   the core with the lowest versions that pyproject.toml allows
#   make lint          formatting, static checks and types
#   make benchmark     one table of speed: ours, the limits, and other libraries
#   make guides        the notebooks of the guides, run again where they are older
#   make docs          the documentation site, in docs/_build/html
#   make clean         forget .venv, caches and built packages
#
# ARGS is passed on: make test ARGS="-k routing". BACKENDS chooses the backends; without
# PyTorch the first of them runs all of the library: make test BACKENDS=jax

KERAS_BACKEND ?= jax
BACKENDS ?= jax tensorflow torch

# The first interpreter that is new enough; PYTHON=... overrides.
IS_SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(IS_SUPPORTED)' 2>/dev/null && echo $$p && break; done)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

# An open range may pick a newer build that brings gigabytes of CUDA, so PyTorch is
# installed first, at the version that the suite is checked with.
TORCH ?= torch==2.13.0
# Each release of torchvision wants one of PyTorch.
TORCHVISION ?= torchvision==0.28.0

# What takes two minutes of the core.
FAST ?= tests/layers tests/losses tests/ops tests/routers tests/models/test_vit.py

# The two ends of what pyproject.toml allows, on JAX and without PyTorch, of which most
# versions are builds of gigabytes.
END_BACKENDS ?= jax
END_EXTRAS := .[jax,tensorflow,test,guides]
RUN_END = tools/run_tests.py --fast --jobs 1 --backends $(END_BACKENDS)
# The first of some versions of Python, from PATH or pyenv.
first_python = $(shell for v in $(1); do \
	for p in python$$v $$HOME/.pyenv/versions/$$v.*/bin/python; do \
	[ "$$($$p -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = $$v ] \
	&& echo $$p && exit; done; done)
NEWEST_PYTHON ?= $(call first_python,3.13 3.12)
LOWEST_PYTHON ?= $(call first_python,3.11)
NEWEST := .venv-newest
LOWEST := .venv-lowest

# One stamp per set of packages: a set is installed again when pyproject.toml changes.
CREATED := $(VENV)/.created
TORCH_READY := $(VENV)/.installed-torch
ALL := $(VENV)/.installed-all
BENCH := $(VENV)/.installed-bench
DOCS := $(VENV)/.installed-docs
QUICKSTART := $(VENV)/.installed-quickstart-$(KERAS_BACKEND)

# The digest of all files that git tracks or would track, as they are.
RELEASED := $(VENV)/.released
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable
TREE = cp "$$(git rev-parse --git-path index)" $(VENV)/.index && \
	GIT_INDEX_FILE="$$PWD/$(VENV)/.index" sh -c 'git add --all && git write-tree' || date

.NOTPARALLEL:
.PHONY: help quickstart test test-fast test-release test-newest test-lowest lint \
	benchmark guides docs clean

help:
	@sed -n 's/^#   make/make/p' Makefile

quickstart: $(QUICKSTART)
	@KERAS_BACKEND=$(KERAS_BACKEND) $(BIN)/keras-moe quickstart $(ARGS)

test: $(ALL)
	@$(BIN)/python tools/run_tests.py --backends $(BACKENDS) -- $(ARGS)

test-fast: $(ALL)
	@$(BIN)/python tools/run_tests.py --fast --backends $(BACKENDS) -- -x $(FAST) $(ARGS)

test-release: $(ALL)
	@tree="$$($(TREE)) $$(which $(BROWSERS) 2>/dev/null) $(BACKENDS) $(ARGS)"; \
	if [ $(RELEASED) -nt $(ALL) ] && [ "$$(cat $(RELEASED))" = "$$tree" ]; then \
		echo "Nothing has changed since these tests passed"; else \
		$(BIN)/python tools/run_tests.py --lane release --backends $(BACKENDS) -- \
		$(ARGS) && echo "$$tree" > $(RELEASED); fi

test-newest: $(if $(NEWEST_PYTHON),$(NEWEST)/.installed)
	@case "$(NEWEST_PYTHON)" in *3.13*) ;; *) \
		echo "!!! LACKED Python 3.13, tried: $(or $(NEWEST_PYTHON),nothing)" >&2;; esac
	@[ -z "$(NEWEST_PYTHON)" ] || $(NEWEST)/bin/python $(RUN_END) -- $(ARGS)

# Old packages warn of what their newer dependencies have deprecated.
test-lowest: $(if $(LOWEST_PYTHON),$(LOWEST)/.installed)
	@[ -n "$(LOWEST_PYTHON)" ] || echo "!!! LACKED Python 3.11, tried: nothing" >&2
	@[ -z "$(LOWEST_PYTHON)" ] || $(LOWEST)/bin/python $(RUN_END) -- \
		-W default $(ARGS)

lint: $(ALL)
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m basedpyright

benchmark: $(BENCH)
	@$(BIN)/python -m tools.benchmark $(ARGS)

guides: $(ALL)
	@$(BIN)/python -m tools.guides $(ARGS)

docs: $(DOCS)
	@KERAS_BACKEND=torch $(BIN)/python -m sphinx -W -n --keep-going -q docs docs/_build/html
	@echo "The site begins at docs/_build/html/index.html"

clean:
	rm -rf $(VENV) $(NEWEST) $(LOWEST) build dist docs/_build docs/api/generated docs/guides docs/repository .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CREATED):
	@$(or $(PYTHON),false) -c '$(IS_SUPPORTED)' 2>/dev/null || { \
		echo "keras_moe needs Python >= 3.11; found none that runs as" \
			"'$(or $(PYTHON),python3)'. Try: make PYTHON=/path/to/python" >&2; \
		exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(TORCH_READY): $(CREATED)
	@echo "Installing $(TORCH)"
	@$(PIP) "$(TORCH)"
	@touch $@

$(ALL): $(TORCH_READY) pyproject.toml
	@echo "Installing keras_moe, three backends and the test tools (minutes, once)"
	@$(PIP) --editable ".[all,test]"
	@# For CLIP's vocabulary alone: what it depends on would bring another PyTorch.
	@$(PIP) --no-deps "open_clip_torch>=2.30,<4"
	@touch $@

$(BENCH): $(ALL)
	@echo "Installing what the benchmarks compare with"
	@$(PIP) "$(TORCH)" "$(TORCHVISION)" --editable ".[bench]"
	@touch $@

$(DOCS): $(TORCH_READY) pyproject.toml
	@echo "Installing keras_moe, PyTorch and Sphinx (minutes, once)"
	@$(PIP) --editable ".[docs,report]"
	@touch $@

$(NEWEST)/.installed: pyproject.toml
	@echo "Creating $(NEWEST) with $$($(NEWEST_PYTHON) --version) (minutes, once)"
	@$(NEWEST_PYTHON) -m venv --clear $(NEWEST)
	@$(NEWEST)/bin/python -m pip install --quiet --quiet --editable "$(END_EXTRAS)"
	@touch $@

# pip has no rule for the lowest versions, uv has. KerasHub's tensorflow-text picks
# TensorFlow.
$(LOWEST)/.installed: pyproject.toml
	@echo "Creating $(LOWEST) with $$($(LOWEST_PYTHON) --version) (minutes, once)"
	@$(LOWEST_PYTHON) -m venv --clear $(LOWEST)
	@$(LOWEST)/bin/python -m pip install --quiet --quiet uv
	@$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python \
		--resolution lowest-direct --editable "$(END_EXTRAS)" "tensorflow-text>=2.20.1"
	@touch $@

# Only the backend that is asked for, and PyTorch's own rule where that is torch.
$(QUICKSTART): $(CREATED) $(if $(filter torch,$(KERAS_BACKEND)),$(TORCH_READY)) pyproject.toml
	@case "$(KERAS_BACKEND)" in jax|tensorflow|torch) ;; *) \
		echo "Expected KERAS_BACKEND to be jax, tensorflow or torch;" \
			"received: KERAS_BACKEND=$(KERAS_BACKEND)" >&2; exit 1;; esac
	@echo "Installing keras_moe for $(KERAS_BACKEND) (minutes, once)"
	@$(PIP) --editable ".[$(KERAS_BACKEND),digits,plots]"
	@touch $@
