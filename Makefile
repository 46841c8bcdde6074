# Everything runs in .venv, which is made on first use. Needs only Python >= 3.11 and, for the fast kernels, a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
NODE := tests/clients/node
PIP := PIP_CONSTRAINT=constraints.txt $(BIN)/pip --disable-pip-version-check -q

# Two workers, each on its own half of the cores (tests/conftest.py); one that is done takes over tests of the other.
PYTEST := $(BIN)/pytest -n 2 --dist worksteal

.PHONY: demo test test-slow test-clients check format install clean sanitize

demo: $(VENV)/.installed  ## plain decoding beside speculation, live, on the default model
	@$(BIN)/paceline demo

test: $(VENV)/.dev
	$(PYTEST) -m "not slow and not cuda"

test-slow: $(VENV)/.dev
	$(BIN)/pytest -m "slow and not cuda" --timeout 3600

# A client that cannot be installed is no fault of ours: it is named here, and its tests say that they were skipped.
test-clients: $(VENV)/.dev  ## clients of the OpenAI API, from PyPI and npm, against the real server
	@for part in $(CLIENTS)/.installed $(NODE)/node_modules/.installed; do \
	    $(MAKE) --no-print-directory $$part || echo "paceline: NOT INSTALLED, see above: $$part. Its tests are skipped"; \
	done
	PATH="$(CURDIR)/$(CLIENTS)/bin:$$PATH" $(CLIENTS)/bin/python -m pytest -n 2 --dist worksteal -rs tests/clients

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow and not cuda" --ignore tests/clients
	$(MAKE) test-clients

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(VENV)/.installed

$(VENV)/bin/pip:
	@echo "paceline: making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

SOURCES := pyproject.toml constraints.txt setup.py $(wildcard paceline/ops/native/src/*)
# torch goes first and by itself, so that pip never weighs another build of it.
INSTALL = $(PIP) install "$$(grep ^torch== constraints.txt)" && $(PIP) install -e

$(VENV)/.installed: $(SOURCES) | $(VENV)/bin/pip
	@echo "paceline: installing (a few minutes the first time)"
	@$(INSTALL) ".[serve,plot,bench]"
	@touch $@

$(VENV)/.dev: $(SOURCES) | $(VENV)/bin/pip
	@echo "paceline: installing, with the development tools (a few minutes the first time)"
	@$(INSTALL) ".[dev]"
	@touch $@ $(VENV)/.installed

# Beside what the clients bring in their own versions it uses what .venv has.
$(CLIENTS)/.installed: tests/clients/requirements.txt | $(VENV)/.dev
	@echo "paceline: installing clients from PyPI"
	@$(PYTHON) -m venv $(CLIENTS)
	@ls -d $(CURDIR)/$(VENV)/lib/python*/site-packages > $$(ls -d $(CLIENTS)/lib/python*/site-packages)/venv.pth
	@$(CLIENTS)/bin/pip --disable-pip-version-check -q install --no-deps --no-compile -r $<
	@touch $@

$(NODE)/node_modules/.installed: $(NODE)/package.json
	@echo "paceline: installing clients from npm"
	@cd $(NODE) && PATH="$(CURDIR)/$(CLIENTS)/bin:$$PATH" npm install --no-audit --no-fund --no-package-lock
	@touch $@

sanitize: $(VENV)/.dev  ## the kernel tests under AddressSanitizer and UBSan
	PATH="$(CURDIR)/$(BIN):$$PATH" sh -c "$$($(BIN)/python -m paceline.ops.native.build --sanitize)"

clean:
	rm -rf $(VENV) $(CLIENTS) $(NODE)/node_modules build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
