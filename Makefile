# Shortcuts; CMake does the work. `make` without a target lists the targets.
SHELL := /bin/bash
BUILD ?= build
JOBS ?= $(shell nproc)
# A new build directory compiles the sources of each folder as one unit, which takes a third of the time. UNITY=OFF compiles
# each source by itself, for frequent changes. An existing build directory keeps its generator and this choice.
UNITY ?= ON
CONFIGURE = cmake -S . -B $(1) $(if $(wildcard $(1)/CMakeCache.txt),,-G Ninja -DTOPKNOT_UNITY=$(UNITY) \
  $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)) $(2) --log-level=NOTICE >/dev/null
# Address randomisation of recent kernels conflicts with the memory map of older thread sanitizers.
FIXED_ADDRESSES = $(if $(shell setarch -R true 2>/dev/null && echo yes),setarch -R)

.DEFAULT_GOAL := help
.PHONY: help demo test build lab test-lab bench gpu-check doctor format asan tsan fuzz clean deps
# The laboratory's tests (lab/), which `make test` leaves out. A program that was not built has a test of its own name.
LAB_TESTS = ^(lab:|test_lab)

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: deps  ## train four methods over an emulated slow link and write one HTML report (sets everything up)
	@$(call CONFIGURE,$(BUILD),)
	@cmake --build $(BUILD) -j $(JOBS) --target train
	@BUILD=$(BUILD) scripts/demo

test: build  ## build and test everything but the laboratory (sets everything up)
	@scripts/test $(BUILD) -E '$(LAB_TESTS)'

build: deps  ## configure and compile
	@$(call CONFIGURE,$(BUILD),)
	@cmake --build $(BUILD) -j $(JOBS)

lab: deps  ## compile what measures Topknot (lab/README.md)
	@$(call CONFIGURE,$(BUILD),)
	@cmake --build $(BUILD) -j $(JOBS) --target lab

test-lab: lab  ## build and test the laboratory
	@cmake --build $(BUILD) -j $(JOBS) --target test_lab
	@scripts/test $(BUILD) -R '$(LAB_TESTS)'

bench: lab  ## measure speed against PyTorch, as ratios (PEER_PYTHONS names the interpreters)
	@BUILD=$(BUILD) lab/bench/against-pytorch $(BENCH_ARGS)

# The target gpu_tests exists only in a build with CUDA. gpu-check exits with 3 where nothing could be checked; make prints it and exits with 2.
gpu-check: deps  ## check the CUDA backend on this machine's GPU (GPU_CHECK_ARGS: gpu-check --help)
	@$(call CONFIGURE,$(BUILD),)
	@cmake --build $(BUILD) -j $(JOBS) --target train gpu_timings
	@if cmake --build $(BUILD) --target help | grep -q 'gpu_tests'; then cmake --build $(BUILD) -j $(JOBS) --target gpu_tests; fi
	@$(BUILD)/bin/gpu-check $(GPU_CHECK_ARGS)

doctor:  ## list what is found, what is missing, and the package that provides it
	@scripts/doctor

format:  ## format the C++ sources
	@command -v clang-format >/dev/null || { echo "clang-format is missing: apt-get install clang-format" >&2; exit 1; }
	@git ls-files -z --cached --others --exclude-standard -- '*.cpp' '*.h' '*.cu' '*.cuh' | xargs -0 -r clang-format -i

# Memory is fresh with NaNs there (TOPKNOT_POISON); the sanitizer fills what malloc() gives.
asan: deps  ## run the tests under the address and undefined-behaviour sanitizers, with NaNs in all memory not yet written
	@$(call CONFIGURE,build-asan,-DTOPKNOT_ASAN=ON -DTOPKNOT_POISON=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo)
	@cmake --build build-asan -j $(JOBS) --target all lab test_lab
	@ASAN_OPTIONS=malloc_fill_byte=255:max_malloc_fill_size=2147483647 \
	  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 LSAN_OPTIONS=suppressions=$(CURDIR)/scripts/lsan.supp:print_suppressions=0 \
	  scripts/test build-asan

# FUZZ_CXX=clang++ builds with clang, where libFuzzer chooses the input by the code that it reaches.
FUZZ_SECONDS ?= 60
FUZZ_BUILD = $(if $(FUZZ_CXX),build-fuzz,build-asan)
fuzz: deps  ## run damaged files, messages and blocks through every reader, under the same sanitizers (FUZZ_SECONDS each)
	@$(call CONFIGURE,$(FUZZ_BUILD),-DTOPKNOT_ASAN=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  $(if $(FUZZ_CXX),-DCMAKE_CXX_COMPILER=$(FUZZ_CXX) -DCMAKE_CXX_FLAGS=-Wno-unknown-warning-option))
	@cmake --build $(FUZZ_BUILD) -j $(JOBS) --target fuzz_blocks fuzz_inputs
	@$(FUZZ_BUILD)/bin/fuzz_inputs --list | UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 xargs -P $(JOBS) -I NAME \
	  $(FUZZ_BUILD)/bin/fuzz_inputs --target NAME --seconds $(FUZZ_SECONDS) --out $(FUZZ_BUILD)
	@seq $(JOBS) | UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 xargs -P $(JOBS) -I SEED \
	  $(FUZZ_BUILD)/bin/fuzz_blocks --blocks $$(((10000000 + $(JOBS) - 1) / $(JOBS))) --seed SEED

# One compute thread per rank, because the sanitizer does not see libgomp's barriers. The tests that compare thread counts are
# therefore excluded; they compare results, and run in `make test`. Some tests fork beside other threads (die_after_fork).
tsan: deps  ## run the data, dist and compress tests under the thread sanitizer
	@$(call CONFIGURE,build-tsan,-DTOPKNOT_TSAN=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo)
	@$(FIXED_ADDRESSES) cmake --build build-tsan -j $(JOBS) --target test_data test_compress test_dist
	@OMP_NUM_THREADS=1 TSAN_OPTIONS="suppressions=$(CURDIR)/scripts/tsan.supp:halt_on_error=1:second_deadlock_stack=1:die_after_fork=0" \
	  $(FIXED_ADDRESSES) scripts/test build-tsan -R '^(data|dist|compress):' -E 'number of threads'

clean:  ## remove the build directories (runs are kept)
	rm -rf $(BUILD) build-asan build-fuzz build-tsan

deps:
	@scripts/install-deps
