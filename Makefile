# Each command makes or completes .venv first, and is safe to repeat.
.PHONY: run test test-all check format bench

run:     ## embed the docstrings of Python's standard library and answer a query from the vectors
	@scripts/run

test:    ## format, lint, types, import contracts, then all default tests
	@scripts/test

test-all: ## the same with the thorough tests
	@scripts/test --all

check:   ## the same without the tests
	@scripts/check

format:  ## rewrite the sources as `check` wants them
	@scripts/install all,dev
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

bench:   ## every benchmark: one table each, JSON beside it
	@scripts/bench
