# `make demo` runs the main job, `make test` the gate, `make test-gpu` what needs a GPU; all make .venv first, once.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP = .venv/bin/python -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt
INSTALLED = .venv/installed
RARE = /tests/|/transformers/models/|/diffusers/(modular_)?pipelines/
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-gpu lint venv clean

demo: $(INSTALLED)
	.venv/bin/spotlight run examples/ocr-tiny.toml

# One BLAS thread per process: the tests start several, and results must not depend on how many cores there are. Two
# files of tests go on at a time; a file's tests share what they began. Files go in alphabetical order: else long files
# of few tests come last, and one process waits for the other.
test: export OMP_NUM_THREADS = 1
test: lint
	.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-gpu: $(INSTALLED)
	.venv/bin/python -m pytest -m gpu -ra

lint: $(INSTALLED)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

venv: $(INSTALLED)

# torch goes first, by itself: then an index of smaller CPU-only builds, if pip knows one, serves it. Compiled is at the
# end, on all cores (pip does it on one), but for what is hardly used, which is compiled
# when it is needed.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and \
	    f"Python 3.11 or later is needed, and $(PYTHON) is {v}: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	@.venv/bin/python -m compileall -qq -j 0 -x '$(RARE)' .venv/lib > /dev/null 2>&1 || true
	@touch $@

clean:
	rm -rf .venv
