# make demo and make test each set up all they need; nothing else has to be called first.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
CORE := .venv/core-ready
READY := .venv/ready
export HF_HUB_OFFLINE := 1
export PYTHONDONTWRITEBYTECODE :=  # empty: pytest keeps the test modules that it has rewritten, and the next run starts sooner

.PHONY: setup demo test test-slow browser fuzz torture check format notebook bench costs clean

setup: $(READY)

$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e '.[serve]'
	touch $@

$(READY): $(CORE)
	$(PIP) -e '.[log,fast,export,embed,text,serve,test,parity]'
	$(PIP) --no-deps lightly  # for the parity of losses; its dependencies would pull in a training framework
	touch $@

demo: $(CORE)  ## train a small ViT on the bundled images and show what it attends to; installs only what this needs
	$(BIN)/python examples/demo.py

test: setup  ## everything that is fast
	$(BIN)/pytest -n 3 -m "not slow"  # on two cores, since tests often wait for processes

test-slow: setup  ## full-size models against the peers
	$(BIN)/pytest -m slow

AS_ROOT = $(shell test $$(id -u) = 0 || command -v sudo)
browser:  ## Debian's Chromium, where there is none: without it the tests of pages in a browser skip by name
	@command -v chromium || command -v apt-get > /dev/null || \
		{ echo "make browser: no apt-get here; install Chromium so that the command chromium is found" >&2; exit 1; }
	@command -v chromium > /dev/null || { $(AS_ROOT) apt-get update --quiet && \
		$(AS_ROOT) apt-get install --quiet --yes --no-install-recommends chromium; }

FUZZ = tests/checkpoint/test_damaged_checkpoints.py tests/checkpoint/test_hostile_pickles.py tests/checkpoint/test_checksums.py \
	tests/data/images/decoding/test_hostile_images.py tests/export/test_damaged_exports.py tests/predict/output/test_damaged_partial_folders.py \
	tests/train/test_run_folder_damage.py tests/tasks/test_teacher_cache.py tests/cli/test_special_files.py tests/serve/test_malformed_requests.py
fuzz: setup  ## damaged and hostile files of every kind, 10,000 per kind; `make test` makes 2,000
	$(BIN)/pytest -n 2 $(FUZZ) --mutations 10000

TORTURE = tests/train/test_interruptions.py tests/train/test_run_folder_damage.py \
	tests/cli/test_interrupted_predict.py tests/cli/test_concurrent_predict.py
torture: setup  ## kills trainings and prediction jobs, alone and several on one folder, 200 times; `make test` 12 times
	$(BIN)/pytest $(TORTURE) --kills 200

check: setup  ## format, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

notebook: setup  ## after changing examples/first_steps.py: executes it and stores the notebook with its outputs
	$(BIN)/python scripts/make_notebook.py

bench: setup  ## speed and memory next to other libraries, in 30 minutes of an idle machine; writes docs/results.md and docs/benchmarks.md
	$(BIN)/python benchmarks/run_all.py

costs: setup  ## after adding a preset or a checkpoint's tensor names: writes the lists by which models are found without importing them
	$(BIN)/python scripts/preset_costs.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache
