# Everything runs in .venv, which the first target creates: pip, constraints.txt, and a build of the C++ extension.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NATIVE_SOURCES := CMakeLists.txt $(wildcard cpp/*.?pp)

# What `make sanitize` runs; `make sanitize SANITIZE_ISAS=avx2 SANITIZE_ROUNDS=5` is a short slice.
SANITIZE_ISAS ?= baseline avx2 avx512
SANITIZE_ROUNDS ?= 300
SANITIZE_SEED ?= 0

.PHONY: demo wheel test fuzz lint format bench papers-quick docs browse sanitize clean

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py --out demo

# Build a wheel, install it into a new environment without a compiler, and use it there.
wheel:
	packaging/check_wheel '$(PYTHON)'

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2

# Random examples against oracles: new ones each time, for so many minutes; a failure prints the command that repeats it.
MINUTES ?= 5
fuzz: $(INSTALLED)
	cd tests && ../$(BIN)/python -m fuzz --minutes $(MINUTES)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror cpp/*.cpp cpp/*.hpp cpp/check/*.cpp
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i cpp/*.cpp cpp/*.hpp cpp/check/*.cpp

bench: $(INSTALLED)
	$(BIN)/python benchmarks/sweeps.py --out results/benchmarks/sweeps
	$(BIN)/python benchmarks/chains.py --out results/benchmarks/chains
	$(BIN)/python benchmarks/calls.py --out results/benchmarks/calls
	$(BIN)/python benchmarks/gradients.py --out results/benchmarks/gradients
	$(BIN)/python benchmarks/convex.py --out results/benchmarks/convex
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/sequences.py --out results/benchmarks/sequences
	PYTHONPATH=. $(BIN)/python benchmarks/smd.py --out results/benchmarks/smd

# Every study that needs no download, at reduced size.
papers-quick: $(INSTALLED)
	$(BIN)/python -m papers gradients --quick
	$(BIN)/python -m papers misspecification --quick
	$(BIN)/python -m papers erm --quick

docs: $(INSTALLED)
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html
	$(BIN)/python docs/check_site.py docs/_build/html

# Open every page in a browser, on a wide screen and on a phone, light and dark.
browse: docs
	$(BIN)/python -m pip install --quiet playwright
	$(BIN)/python docs/browse_site.py docs/_build/html

# The engine under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer.
sanitize:
	SANITIZE_ISAS='$(SANITIZE_ISAS)' cpp/check/sanitize $(SANITIZE_SEED) $(SANITIZE_ROUNDS)

$(INSTALLED): pyproject.toml constraints.txt $(NATIVE_SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build docs/_build docs/gallery demo
