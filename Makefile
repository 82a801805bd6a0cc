# A fresh clone needs nothing but Python 3.10 to 3.13: every target makes .venv first.

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
INSTALL = $(RUN) -m pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow gpu-test gpu-bench gpu-sanitize check bench clean

demo: $(VENV)/ready-demo  ## Train a click model with its embeddings on the cached-SSD store.
	$(RUN) examples/kuairand_dlrm.py --store ssd

# CUDA loops run in numba's simulator and are compiled for two GPUs; each reads its switch once a process.
test: $(VENV)/ready  ## The test suite.
	$(RUN) -m pytest
	NUMBA_ENABLE_CUDASIM=1 $(RUN) -m pytest -q tests/cuda
	ONEEMB_TEST_COMPILE=1 $(RUN) -m pytest -q tests/cuda_compile

test-slow: $(VENV)/ready  ## The long proofs: many crashes, many random models.
	$(RUN) -m pytest -m slow

# On a machine with a GPU whose driver knows CUDA 13, in the environment of RUN.
gpu-test: $(VENV)/ready  ## The tests of CUDA loops, of the device tier and of training, on the GPU.
	ONEEMB_TEST_GPU=1 $(RUN) -m pytest -q tests/cuda

gpu-bench: $(VENV)/ready  ## What has to be fast on the GPU, into benchmarks/results/gpu.json.
	rm -f benchmarks/results/gpu.json
	for bench in index step bus; do \
		$(RUN) benchmarks/bench_gpu_$$bench.py --out benchmarks/results/gpu.json || exit 1; done

# Memory is not kept between uses, so that each access is checked against what was asked for.
SANITIZE = ONEEMB_TEST_GPU=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1
gpu-sanitize: $(VENV)/ready  ## Every CUDA loop under compute-sanitizer, which the CUDA toolkit brings.
	@command -v compute-sanitizer > /dev/null || { echo "install compute-sanitizer, of the CUDA toolkit"; exit 1; }
	$(SANITIZE) --tool memcheck $(RUN) -m pytest -q tests/cuda --ignore=tests/cuda/test_large.py
	$(SANITIZE) --tool racecheck $(RUN) -m pytest -q tests/cuda/test_row_updates.py tests/cuda/test_pool.py

# mypy cannot see mapped folders: it is shown the package as it is installed, through links.
check: $(VENV)/ready  ## Style, types, and which package may import which.
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	rm -rf build/typed && mkdir -p build/typed/oneemb
	ln -s $(CURDIR)/oneemb/* $(CURDIR)/graph $(CURDIR)/storage $(CURDIR)/kernels build/typed/oneemb/
	cd build/typed && $(abspath $(RUN)) -m mypy --config-file ../../pyproject.toml -p oneemb
	MYPYPATH=build/typed:examples $(RUN) -m mypy examples/*.py
	$(RUN) -m pytest -q tests/test_layout.py

bench: $(VENV)/ready-bench  ## Every benchmark of a CPU: a table for people and one JSON line a case.
	for bench in $(filter-out benchmarks/bench_gpu_%,$(wildcard benchmarks/bench_*.py)); do $(RUN) $$bench || exit 1; done

# torch goes first and alone, so that its pinned build is settled before anything asks for "torch".
$(VENV)/ready-demo: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e .[demo]
	touch $@

$(VENV)/ready: $(VENV)/ready-demo
	$(INSTALL) -e .[dev]
	touch $@

$(VENV)/ready-bench: $(VENV)/ready
	$(INSTALL) -e .[bench]
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
