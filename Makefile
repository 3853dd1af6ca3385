# Everything a person types. The work is done by tools/setup.sh, CMake and tools/run_tests.py.
#   JOBS=n      compile jobs (default: the processors of this machine)
#   FILE=...    the files whose tests make t runs (default: those that git sees as changed)
#   SWEEPS=K/14  a share of the tests other than that of the day (tools/tiers.py); all: every case, as make sweep
#   PYTHON=...  a Python whose torch is 2.10 to 2.15 (default: .venv, else one that is found, else .venv is made)

SHELL := /bin/bash
JOBS ?= $(shell nproc)
SWEEPS ?=
BUILD := build
EACH := $(BUILD)/each
CLANG ?= clang++-14
PYTHON_USED = $$(cat $(BUILD)/setup/python)
GENERATOR = $$(if command -v ninja >/dev/null; then echo Ninja; else echo "Unix Makefiles"; fi)

# On a machine with a GPU's driver the CUDA library is a part of the program.
CUDA_TARGET := $(if $(wildcard /dev/nvidiactl),espalier_cuda)

.PHONY: all setup setup-tests configure configure-each t each fast test sweep sweep-transformers torches aarch64 record faults cuda demo bench wheel check gpu-check gpu-bundle docs debug asan tsan clang clean help
.DEFAULT_GOAL := all

all: setup configure  ## set-up and optimised build: build/espalier
	@cmake --build $(BUILD) --parallel $(JOBS) --target espalier_cli espalier_core $(CUDA_TARGET)

setup:
	@tools/setup.sh program

setup-tests:
	@tools/setup.sh tests

# The generator of an existing folder stays; a torch from another Python is a new configuration.
configure: setup
	@if [ ! -f $(BUILD)/CMakeCache.txt ] || ! grep -q "^ESPALIER_PYTHON:[A-Z]*=$(PYTHON_USED)$$" $(BUILD)/CMakeCache.txt; then \
	  if [ -f $(BUILD)/CMakeCache.txt ]; then cmake -B $(BUILD) -S . -U ESPALIER_TORCH_DIR -DESPALIER_PYTHON="$(PYTHON_USED)"; \
	  else cmake -G "$(GENERATOR)" -B $(BUILD) -S . -DCMAKE_BUILD_TYPE=Release -DESPALIER_PYTHON="$(PYTHON_USED)"; fi; fi

# One object for each file, so that an edit compiles one file. A build folder that is like that already is taken.
configure-each: setup-tests
	@if ! grep -q '^ESPALIER_UNITY:BOOL=OFF' $(BUILD)/CMakeCache.txt 2>/dev/null && [ ! -f $(EACH)/CMakeCache.txt ]; then \
	  cmake -G "$(GENERATOR)" -B $(EACH) -S . -DCMAKE_BUILD_TYPE=Release -DESPALIER_UNITY=OFF -DESPALIER_PYTHON="$(PYTHON_USED)"; fi
each = $$(if grep -q '^ESPALIER_UNITY:BOOL=OFF' $(BUILD)/CMakeCache.txt 2>/dev/null; then echo $(BUILD); else echo $(EACH); fi)

# build/each compiles one file for an edit, build several as one; where `make each` was not run, a first verdict comes sooner from
# what `make` has built. Files of Python alone need no more than the program.
PYTHON_ALONE := $(if $(FILE),$(if $(filter-out %.py,$(FILE)),,yes))
OF_T := $(if $(PYTHON_ALONE),$(BUILD),$(if $(wildcard $(EACH)/CMakeCache.txt),$(EACH),$(BUILD)))
t: setup-tests configure  ## FILE=espalier/model/layer.cpp: build and run the tests of a file, within a minute behind the compiler
	@"$(PYTHON_USED)" tools/tests_of.py --build $(OF_T) --jobs $(JOBS) $(FILE)

each: configure-each  ## compiles every file alone, in build/each, where make t then compiles one file for an edit
	@cmake --build $(each) --parallel $(JOBS) --target all sweep_tests

fast: setup-tests configure  ## one case of every quick test: 3 minutes behind the build
	@cmake --build $(BUILD) --parallel $(JOBS)
	@"$(PYTHON_USED)" tools/run_tests.py --build $(BUILD) --tier fast

test: setup-tests configure  ## the tests that need no accelerator, C++ and Python, long ones and many cases by the day: 8 minutes behind the build
	@"$(PYTHON_USED)" tools/tiers.py $(SWEEPS) >/dev/null
	@cmake --build $(BUILD) --parallel $(JOBS) $(if $(filter all,$(SWEEPS)),--target all sweep_tests)
	@"$(PYTHON_USED)" tools/run_tests.py --build $(BUILD) --tier $(if $(filter all,$(SWEEPS)),sweep,test --sweeps "$(SWEEPS)")

sweep:  ## every case of every test, under every instruction set, deliberate faults and emulated devices included; every file compiled alone; make torches and make aarch64 where they can run
	@$(MAKE) --no-print-directory test SWEEPS=all
	@$(MAKE) --no-print-directory each
	@tools/other_torches.sh --if-possible
	@tools/aarch64.sh --if-possible

torches: setup-tests  ## builds with the oldest and the newest torch, each with verify and the tests of make fast, in build/torch-VERSION
	@tools/other_torches.sh

aarch64: all  ## a build for aarch64 and its checks under qemu-user; Debian, Ubuntu: g++-aarch64-linux-gnu, qemu-user
	@tools/aarch64.sh

sweep-transformers:  ## the sweep over all causal language models with the newest release of transformers
	@tools/newest_transformers.sh

record: configure-each  ## writes down which tests reach which file, and their seconds: tests/recording
	@cmake --build $(each) --parallel $(JOBS) --target all sweep_tests espalier_entered_functions
	@"$(PYTHON_USED)" tools/record_tests.py --build $(each)

faults: setup-tests  ## which tier notices which deliberate fault, in tests/mutation/noticed.txt; a run that was stopped goes on
	@cmake -G "$(GENERATOR)" -B $(BUILD)/faults -S . -DCMAKE_BUILD_TYPE=Release -DESPALIER_FAULTS=ON -DESPALIER_PYTHON="$(PYTHON_USED)"
	@cmake --build $(BUILD)/faults --parallel $(JOBS) --target all espalier_entered_functions
	@"$(PYTHON_USED)" tools/faults_by_tier.py --build $(BUILD)/faults

cuda: setup configure  ## the library behind --device cuda, build/libespalier_cuda.so, where there is an nvcc
	@cmake --build $(BUILD) --parallel $(JOBS) --target espalier_cuda

demo: all  ## the main job on a small model made on the spot
	@tools/demo.sh

bench: all  ## dense against packed against phased against auto
	@tools/bench.sh

wheel: all  ## dist/espalier-*.whl: program, core library and Python package, from this build
	@"$(PYTHON_USED)" -m pip wheel . --disable-pip-version-check --quiet --no-deps --wheel-dir dist \
	  --config-settings=cmake.define.ESPALIER_BUILT="$(CURDIR)/$(BUILD)" --config-settings=build-dir=$(BUILD)/wheel-of-this && ls dist/*.whl

check:  ## format, tidy, include order, sizes, documents
	@tools/check.sh

gpu-check:  ## all that needs a GPU; says so without one
	@tools/gpu_check.sh

gpu-bundle: all cuda  ## build/gpu-bundle: a folder that runs the GPU checks on a machine without network and compiler
	@tools/gpu_bundle.sh

docs: setup configure  ## regenerate docs/options.md and the types of the verbs from the table of options
	@cmake --build $(BUILD) --parallel $(JOBS) --target option_docs
	@option_docs=$$(find $(BUILD) -name option_docs -type f -perm -u+x | head -1) && "$$option_docs" > $(BUILD)/options.md && cp $(BUILD)/options.md docs/options.md
	@cmake --build $(BUILD) --parallel $(JOBS) --target espalier_core && "$(PYTHON_USED)" tools/verb_stubs.py

debug: setup  ## debug build in build/debug
	@ESPALIER_PYTHON="$(PYTHON_USED)" cmake --preset debug && cmake --build --preset debug --parallel $(JOBS)

asan: setup-tests  ## build and C++ tests under the address and undefined-behaviour sanitizers, in build/asan-ubsan
	@ESPALIER_PYTHON="$(PYTHON_USED)" cmake --preset asan-ubsan && cmake --build --preset asan-ubsan --parallel $(JOBS) --target all sweep_tests
	@"$(PYTHON_USED)" tools/run_tests.py --build build/asan-ubsan --no-python

tsan: setup-tests configure  ## the CUDA kernels on a processor under ThreadSanitizer: races between threads of a grid
	@cmake --build $(BUILD) --parallel $(JOBS) --target kernel_races_test_tsan
	@OMP_NUM_THREADS=1 $(BUILD)/tests/cuda/kernel_races_test_tsan --gtest_brief=1 2>$(BUILD)/tsan.log || { grep SUMMARY $(BUILD)/tsan.log; exit 1; }

clang: setup-tests  ## everything by clang++-14 (CLANG=... another one), in build/clang; Debian, Ubuntu: clang-14, libomp-14-dev
	@cmake -G "$(GENERATOR)" -B $(BUILD)/clang -S . -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER=$(CLANG) -DESPALIER_PYTHON="$(PYTHON_USED)"
	@cmake --build $(BUILD)/clang --parallel $(JOBS) --target all sweep_tests

clean:  ## remove what was built; .venv stays
	@rm -rf $(BUILD)

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18
