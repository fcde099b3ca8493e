# One command each: `make demo` on a machine without a GPU, `make test` for what CI runs.

BIN := .venv/bin
# Pure packages and modules, type-checked strictly. sglang is not typed, so those that import it are not.
STRICT := admission.py config.py decode_groups.py errors.py leader.py log.py member.py messages.py numbering.py record.py \
	sequencer.py sharing.py stats.py hint_index mpu radix/ledger.py radix/lease.py radix/protocol.py

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint typecheck

help:  ## List these commands
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

setup:  ## Make .venv with all that the demo and the tests need (no GPU)
	@bash scripts/setup-cpu.sh

demo: setup  ## Start a two-stage server on the CPU and show what WavePP does
	$(BIN)/wavepp demo

test: lint typecheck  ## Run all checks: style, types, tests
	$(BIN)/python -m pytest -q

lint: setup  ## Check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# The folders install as parts of one package; mypy gets to see them as it in a tree of links.
TREE := build/typecheck
typecheck: setup  ## Check types, strictly in the pure packages
	@rm -rf $(TREE) && mkdir -p $(TREE)/sglang_wavepp
	@ln -s $(addprefix $(CURDIR)/,$(wildcard sglang_wavepp/*.py sglang_wavepp/py.typed) hint_index launch mpu radix) \
		$(TREE)/sglang_wavepp/
	cd $(TREE) && $(CURDIR)/$(BIN)/mypy --follow-imports=silent --ignore-missing-imports -p sglang_wavepp
	cd $(TREE) && $(CURDIR)/$(BIN)/mypy --strict --follow-imports=silent $(addprefix sglang_wavepp/,$(STRICT))
