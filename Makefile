# A fresh clone needs nothing but Python 3.11 to 3.13: every target makes .venv first.
#
# With RUN, as in `make gpu-test RUN=python3`, a target runs in an environment that is there already and makes and
# installs nothing. Where that environment has no oneemb: python3 -m pip install --no-deps --no-build-isolation -e .

PYTHON ?= python3
VENV ?= .venv
ifneq ($(origin RUN), command line)
RUN = $(VENV)/bin/python
ready = $(VENV)/ready-$(1)
endif
INSTALL = $(RUN) -m pip install -q --disable-pip-version-check

.PHONY: demo test test-changed test-slow test-s3 test-nightly gpu-test gpu-bench gpu-sanitize gpu-sanitize-quick gpu-all check docs bench bench-compare bench-tables clean test-versions

demo: $(call ready,demo)  ## Train a click model with its embeddings on the cached-SSD store.
	$(RUN) examples/kuairand_dlrm.py --store ssd

# Tests wait for children, disks and timeouts, so there are more processes than cores, up to 8. Temporary folders are in
# /dev/shm where it has 6 GB free and allows libraries to be loaded.
# `python -m pytest` alone runs in one process, as a debugger wants it.
MOUNTS = /proc/mounts
WORKERS ?= $(shell n=$$(($$(nproc) * 2)); echo $$((n < 8 ? n : 8)))
MEMORY := $(shell [ "$$(df --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 6000000 ] 2>/dev/null && \
	! grep -q ' /dev/shm [^ ]* [^ ]*noexec' $(MOUNTS) && echo /dev/shm)
# With that variable every process of a test would compile each module anew.
unexport PYTHONDONTWRITEBYTECODE
MEMORY_TMPDIR = $(if $(MEMORY),TMPDIR=$(MEMORY))
PYTEST = $(MEMORY_TMPDIR) $(RUN) -m pytest -n $(WORKERS) --dist worksteal $(if $(RERUNS),--reruns $(RERUNS) -rfER)
# Tests of the simulator and of compilers wait for nothing, and a process takes five seconds to begin: half as many.
BUSY = -n $(shell echo $$((($(WORKERS) + 1) / 2)))

# CUDA loops run in numba's simulator and are compiled for two GPUs. Each variable is read once a process.
# A test that takes 10 minutes ends its process, which prints where each thread is; xdist goes on with a new process.
# RERUNS=1 runs a test that fails once more, and the closing lines name the test: for a machine that others load.
test: PYTEST += -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
test: $(call ready,test)  ## The test suite.
	$(PYTEST)
	NUMBA_ENABLE_CUDASIM=1 $(PYTEST) $(BUSY) -q tests/cuda
	ONEEMB_TEST_COMPILE=1 $(PYTEST) $(BUSY) -q tests/cuda_compile

test-changed: $(call ready,test)  ## The tests nearest to what differs from BASE, for three minutes.
	$(MEMORY_TMPDIR) $(RUN) -m tests.changed --base $(BASE)

test-slow: $(call ready,test)  ## The long proofs: every crash, whole products of parameters, soaks.
	$(PYTEST) -m slow
	NUMBA_ENABLE_CUDASIM=1 $(PYTEST) $(BUSY) -q -m slow tests/cuda
	ONEEMB_TEST_COMPILE=1 $(PYTEST) $(BUSY) -q -m slow tests/cuda_compile

# In an environment of its own, over that of the other tests.
test-s3: $(VENV)/s3/ready  ## Snapshots and checkpoints in S3, by s3fs and a server of moto.
	$(VENV)/s3/bin/python -m pytest -q tests/storage/test_objects_s3.py

$(VENV)/s3/ready: $(VENV)/ready-test constraints/s3.txt
	$(VENV)/bin/python -m venv $(VENV)/s3
	$(VENV)/s3/bin/python -m pip install -q --disable-pip-version-check --no-deps -r constraints/s3.txt
	cd $(VENV)/s3/lib/python3* && echo "import site; site.addsitedir('$(abspath $(VENV))/lib/$$(basename $$PWD)/site-packages')" \
		> site-packages/tests.pth
	touch $@

MINUTES ?= 60
test-nightly: $(call ready,test)  ## Tests that draw, with new seeds, for MINUTES; nightly.log has seeds and failures.
	$(MEMORY_TMPDIR) $(RUN) -m tests.nightly --minutes $(MINUTES) -- -n $(WORKERS)

test-versions:  ## A core of the tests with the oldest and the newest torch, numba and numpy, for each Python that is there.
	$(PYTHON) -m tests.versions --table docs/install.md

# On a machine with a GPU whose driver knows CUDA 13, in the environment of RUN.
GPU_WORKERS ?= 8
gpu-test: $(call ready,test)  ## The tests of CUDA loops, of the device tier and of training, on the GPU.
	ONEEMB_TEST_GPU=1 $(RUN) -m pytest -q -n $(GPU_WORKERS) --dist loadfile tests/cuda

gpu-bench: $(call ready,test)  ## What has to be fast on the GPU, into benchmarks/results/gpu.json.
	rm -f benchmarks/results/gpu.json
	for bench in index step bus; do \
		$(RUN) benchmarks/bench_gpu_$$bench.py --out benchmarks/results/gpu.json || exit 1; done

# Memory is not kept between uses, so that each access is checked against what was asked for.
SANITIZE = ONEEMB_TEST_GPU=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --target-processes all --error-exitcode 1
gpu-sanitize: $(call ready,test)  ## Every CUDA loop under compute-sanitizer, which the CUDA toolkit brings.
	@command -v compute-sanitizer > /dev/null || { echo "install compute-sanitizer, of the CUDA toolkit"; exit 1; }
	$(SANITIZE) --tool memcheck $(RUN) -m pytest -q tests/cuda --ignore=tests/cuda/test_large.py
	$(SANITIZE) --tool racecheck $(RUN) -m pytest -q $(SHARED_MEMORY) tests/cuda/test_row_updates.py tests/cuda/test_pool.py

# Loops that share memory of a block, in which threads could write before others have read.
SHARED_MEMORY = tests/cuda/test_unique_keys.py tests/cuda/test_lookups_without_waits.py
QUICK = $(addprefix tests/cuda/test_,gradients.py device_tier.py late_checks.py)
gpu-sanitize-quick: $(call ready,test)  ## The loops of training steps under compute-sanitizer.
	@command -v compute-sanitizer > /dev/null || { echo "install compute-sanitizer, of the CUDA toolkit"; exit 1; }
	$(SANITIZE) --tool memcheck $(RUN) -m pytest -q -n 3 --dist loadfile $(QUICK)
	$(SANITIZE) --tool racecheck $(RUN) -m pytest -q -n 3 --dist loadfile $(SHARED_MEMORY) tests/cuda/test_row_updates.py

gpu-all: $(call ready,test)  ## The tests, the benchmarks and gpu-sanitize-quick on a GPU, in less than eight minutes.
	$(RUN) -m tests.on_gpu

check: $(call ready,test)  ## Style, what the oldest Python knows, types, imports, and which package may import which.
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -c 'import vermin; vermin.main()' oneemb graph storage kernels examples benchmarks tests
	$(RUN) -m mypy -p oneemb
	MYPYPATH=.:examples $(RUN) -m mypy --allow-untyped-defs --allow-incomplete-defs examples/*.py
	$(RUN) -m basedpyright --pythonpath "$$($(RUN) -c 'import sys; print(sys.executable)')"
	$(RUN) -m pytest -q tests/test_layout.py tests/test_documents.py

# Strictly: a link that leads nowhere is an error. Nothing is fetched.
docs: $(call ready,test)  ## The documents as a site of static files, in build/site.
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build

bench: $(call ready,bench)  ## Every benchmark of a CPU: a table for people and one JSON line a case.
	for bench in $(filter-out benchmarks/bench_gpu_%,$(wildcard benchmarks/bench_*.py)); do $(RUN) $$bench || exit 1; done

# make bench-compare BASE=v1.0 CASES="'small/*' 'eval/*'"
BASE ?= main
bench-compare: $(call ready,test)  ## Whether this tree is slower than the revision BASE; exit code 1 if it is.
	$(RUN) benchmarks/compare.py $(BASE) $(if $(CASES),--cases $(CASES))

# On a quiet machine, for half an hour.
RESULTS = benchmarks/results
bench-tables: $(call ready,bench)  ## Measure what the tables of docs/benchmarks.md say, and write them.
	$(RUN) benchmarks/bench_embedding_step.py --runs 20 --out $(RESULTS)/embedding_step.json
	$(RUN) benchmarks/bench_embedding_step.py --optimizer row_wise_adagrad --batch 1 16 256 4096 65536 --out $(RESULTS)/batch_sizes.json
	for bench in small_step lookup_threads dense_share longest_steps scale_out persistent_table loader serving_lag publish gpu_host; do \
		$(RUN) benchmarks/bench_$$bench.py --out $(RESULTS)/$$bench.json || exit 1; done
	$(RUN) benchmarks/readme_tables.py
	$(RUN) benchmarks/draw_results.py

# What a target installs is pinned by its own file of constraints; each file begins with the one before it.
$(VENV)/ready-demo: setup.cfg pyproject.toml constraints/demo.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -c constraints/demo.txt -e .[demo]
	touch $@

$(VENV)/ready-test: $(VENV)/ready-demo constraints/test.txt
	$(INSTALL) -c constraints/test.txt -e .[dev]
	# By itself: it asks for fbgemm-gpu, which needs CUDA, where fbgemm-gpu-cpu of `dev` does the same.
	$(INSTALL) -c constraints/test.txt --no-deps torchrec
	touch $@

$(VENV)/ready-bench: $(VENV)/ready-test constraints/bench.txt
	$(INSTALL) -c constraints/bench.txt -e .[bench]
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
