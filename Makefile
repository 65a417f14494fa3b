# The two commands of the README are `make demo` and `make test`; `make check` is the quick look while developing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEMO ?=
COMMA := ,

.PHONY: venv demo test test-slow check bench bench-tunnel attacks fuzz docs proto clean

# editable_mode=compat: the default hides the twistd plugins of a flat layout.
define install
	@echo "==> installing localai-dist[$(1)] into $(VENV) (a minute or two on a fresh machine)"
	@$(PIP) install --use-pep517 --config-settings editable_mode=compat -e '.[$(1)]'
	@$(BIN)/python -c "from twisted.plugin import IPlugin, getPlugins; list(getPlugins(IPlugin))"
	@touch $@
endef

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "The Python module venv is missing. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "==> creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# A second run with an unchanged setup.cfg installs nothing and needs no network.
$(VENV)/.run: setup.cfg setup.py $(VENV)/bin/python
	$(call install,llama$(COMMA)embedded)

$(VENV)/.test: setup.cfg setup.py $(VENV)/bin/python
	$(call install,test)
	@touch $(VENV)/.run

venv: $(VENV)/.test

demo: $(VENV)/.run
	@$(BIN)/localai-dist demo $(DEMO)

test: $(VENV)/.test
	@$(BIN)/python -m tests all

test-slow: $(VENV)/.test
	@$(BIN)/python -m tests slow

check: $(VENV)/.test
	@$(BIN)/python -m tests check

attacks: $(VENV)/.test
	@$(BIN)/python -m tests.attacks

# FUZZ="FRAMES SEED" repeats a find.
fuzz: $(VENV)/.test
	@$(BIN)/python -m tests.mux.fuzz $(FUZZ)

bench: $(VENV)/.test
	@$(BIN)/python -m bench

bench-tunnel: $(VENV)/.test
	@$(BIN)/python -m bench tunnel

docs: $(VENV)/.test
	@$(BIN)/python -m localai_dist.settings.reference > docs/reference/options.md
	@$(BIN)/python -m tests.machines

proto: $(VENV)/.test
	@$(BIN)/python -m localai_dist.rpc.generate

clean:
	rm -rf $(VENV) build dist *.egg-info twisted/plugins/dropin.cache .mypy_cache .ruff_cache .hypothesis _trial_temp*
