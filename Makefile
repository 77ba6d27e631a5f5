# Requires Linux, GNU make and Python 3.10 or newer; everything else is installed into .venv.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv azurite demo test test-long lint test-frameworks test-megatron test-s3 s3-suite byte-loops test-streams test-trackers test-gpu soak drills fuzz bench-control bench-restore bench-gpu kernels package picture trace docs cli-docs chromium clean

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
FRAMEWORKS := .venv-frameworks
VERL := .venv-verl
STREAMS := .venv-streams
MEGATRON := .venv-megatron
# Megatron-Core needs Python 3.12 or newer: PYTHON_MEGATRON, or the first of these that runs (pyenv's are in its own folders).
PYTHON_MEGATRON ?= $(firstword $(foreach python,$(PYTHON) python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[23]*/bin/python3),\
	$(if $(shell $(python) -c 'import sys; print(sys.version_info >= (3, 12) or "")' 2>/dev/null),$(python))))
# A free port for S3, and one for Ceph's monitor, which also uses the port 1,000 above.
PORTS := import socket; s = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]; a, b = (x.getsockname()[1] for x in s); \
	print(a, b - 1000); socket.create_server(("127.0.0.1", b - 1000)).close()

help:  ## list the targets
	@sed -nE 's/^([a-z0-9-]+):[^#]*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 23

venv: $(READY)  ## create .venv, again after dependencies change

# torch is installed first and pinned, because the resolver may download several versions of some gigabytes.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("raystow needs Python 3.10 or newer; set PYTHON=python3.x")'
	@echo "Creating .venv: this takes some minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[train,report,dev]"
	touch $@

# Another place: AZURITE_HOME. Tests of Azure Blob Storage are skipped without it.
azurite:  ## install Azurite, the emulator of Azure Blob Storage, from npm (half a minute; needs Node 20)
	@npm install --silent --no-audit --no-fund --prefix "$${AZURITE_HOME:-$$HOME/.cache/raystow-azurite}" azurite@3.35.0

demo: $(READY)  ## train on a real cluster, lose a node during a save, restore every bit (two minutes)
	$(BIN)/raystow demo
	@echo; echo "raystow is in $(BIN): source $(BIN)/activate puts it on the path"

test: lint  ## lint, types, layers, and all tests except long, slow and GPU tests
	$(BIN)/pytest -n 3 --no-loadscope-reorder -m "not long and not slow and not gpu"

test-long: $(READY)  ## tests that take more than five seconds each (some minutes); those on S3: make test-s3
	$(BIN)/pytest -n 3 --no-loadscope-reorder -m "long and not s3 and not slow and not gpu"

lint: $(READY)  ## style (ruff), types (mypy), layers (import-linter)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_imports.py

test-s3: $(READY)  ## store tests and demo on a real S3 server: a private Ceph, or $RAYSTOW_TEST_S3
	@if [ -n "$${RAYSTOW_TEST_S3:-}" ]; then \
		AWS_ENDPOINT_URL=$$RAYSTOW_TEST_S3 $(MAKE) --no-print-directory s3-suite; exit; \
	fi; \
	[ -x "$${CEPH_HOME:-$$HOME/.cache/ceph-s3}/root/usr/bin/radosgw" ] || tools/ceph_s3.sh install; \
	read -r PORT MONPORT < <($(BIN)/python -c '$(PORTS)'); \
	RUN=$$(mktemp -d); export RUN PORT MONPORT; \
	trap 'tools/ceph_s3.sh stop wipe' EXIT; \
	settings=$$(tools/ceph_s3.sh start); export $$settings; \
	RAYSTOW_TEST_S3=$$AWS_ENDPOINT_URL $(MAKE) --no-print-directory s3-suite

s3-suite: $(READY)
	$(BIN)/pytest -n 3 --no-loadscope-reorder -m s3
	PYTHONPATH=tests $(BIN)/python -c 'from helpers import s3_server; s3_server.make_bucket("raystow-tests")'
	$(BIN)/raystow demo --store s3://raystow-tests/demo

kernels: $(STREAMS)/ready  ## compile the GPU kernels to raystow/workers/gpu/kernels/binaries (needs no GPU; installs Triton, 0.3 GB)
	$(STREAMS)/bin/python tools/build_kernels.py

byte-loops:  ## compile raystow/storage/coding/byte_loops.c (needs gcc and gcc-aarch64-linux-gnu)
	tools/build_byte_loops.sh

SEEDS ?= 2

test-streams: $(STREAMS)/ready  ## stream order of the GPU code without a GPU, SEEDS=2 orders (three minutes; installs Triton, 0.3 GB)
	SEEDS=$(SEEDS) $(STREAMS)/bin/python -m pytest tests/streams

MARK ?= not slow

test-frameworks: export DS_ACCELERATOR := cpu
test-frameworks: $(FRAMEWORKS)/ready $(VERL)/ready  ## tests with training frameworks, in environments of their own (MARK=slow: the slow ones)
	@$(MAKE) --no-print-directory test-megatron
	for env in $(FRAMEWORKS) $(VERL); do $$env/bin/python -m pytest tests/unit/project/test_public_docstrings.py || exit; done
	$(FRAMEWORKS)/bin/python -m pytest -m "$(MARK)" tests/integration/test_torch*.py tests/integration/test_deepspeed*.py
	$(VERL)/bin/python -m pytest -m "$(MARK)" tests/integration/test_verl.py tests/integration/test_peft.py

# verl itself is installed without what it needs for GPUs, rollouts and trackers, but with these.
WITH_VERL := cachetools codetiming datasets fastapi hydra-core peft pillow pylatexenc "tensordict>=0.8,<=0.10" torchdata \
	"transformers>=5.5.3,<5.11" uvicorn

ifneq ($(PYTHON_MEGATRON),)
test-megatron: $(MEGATRON)/ready
	$(MEGATRON)/bin/python -m pytest -m "$(MARK)" tests/integration/test_*megatron*.py
else
test-megatron:
	@echo "Skipped: tests with Megatron-Core need Python 3.12 or newer (PYTHON_MEGATRON=...)"
endif

# Without .venv below it, whose Python may be older. Not all of verl's packages have a release for the pinned Triton.
$(MEGATRON)/ready: pyproject.toml constraints.txt
	$(PYTHON_MEGATRON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -c constraints.txt torch
	$(@D)/bin/python -m pip install --quiet -c constraints.txt -e ".[megatron]" hypothesis "moto[server]" pytest pytest-xdist pyyaml
	$(@D)/bin/python -m pip install --quiet --no-deps "verl<0.10"
	$(@D)/bin/python -m pip install --quiet $(WITH_VERL)
	touch $@

# An environment on top of .venv: what these frameworks pin stays out of it, and torch and Ray are not installed twice.
.venv-%/below: $(READY) pyproject.toml
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(" + repr(sysconfig.get_path("purelib")) + ")")' \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth
	touch $@

# The Triton that compiles the GPU kernels: another version makes other binaries, and torch from PyPI pins its own.
$(STREAMS)/ready: $(STREAMS)/below
	$(@D)/bin/python -m pip install --quiet --no-deps triton==3.9.0
	touch $@

# With Triton, which the models of TorchTitan import.
$(FRAMEWORKS)/ready: $(FRAMEWORKS)/below
	$(@D)/bin/python -m pip install --quiet setuptools wheel
	DS_BUILD_OPS=0 $(@D)/bin/python -m pip install --quiet --no-build-isolation -c constraints.txt "deepspeed<0.20"
	$(@D)/bin/python -m pip install --quiet -c constraints.txt -e ".[deepspeed,torchtitan]" "torchft>=0.2,<0.3" triton
	$(@D)/bin/python -m pip install --quiet --no-deps torchao
	touch $@

$(VERL)/ready: $(VERL)/below
	$(@D)/bin/python -m pip install --quiet --no-deps "verl<0.10" -e .
	$(@D)/bin/python -m pip install --quiet -c constraints.txt $(WITH_VERL)
	touch $@

test-trackers: $(READY)  ## versions in W&B, MLflow and TensorBoard (installs them, 0.1 GB)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[trackers]"
	$(BIN)/pytest tests/trackers

test-gpu: $(READY)  ## tests that need an NVIDIA GPU
	$(BIN)/pytest -m gpu

SOAK ?= tests

soak: $(READY)  ## slow tests except drills: one to two hours on two cores; SOAK=tests/simulation selects some
	$(BIN)/pytest -v -m "slow and not drill" $(SOAK)

drills: $(READY)  ## kill and freeze processes of real clusters; write the table of docs/failures.md (45 minutes)
	$(BIN)/pytest tests/drills --drill-table=docs/failures.md

FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= any_record marker root record fragment pack value key value_text value_tree safetensors plan prune

fuzz: $(READY)  ## fuzz each parser of stored bytes for FUZZ_SECONDS (60)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[fuzz]"
	for target in $(FUZZ_TARGETS); do $(BIN)/python tests/fuzz/campaign.py $$target $(FUZZ_SECONDS) || exit; done

bench-control: $(READY)  ## commits, opening 10,000 versions, saves and restores of 65,536 ranks (some minutes)
	$(BIN)/python benchmarks/control_plane.py
	$(BIN)/python benchmarks/scale.py

bench-restore: $(READY)  ## restore speed from each source (some minutes)
	$(BIN)/python benchmarks/restore.py

bench-gpu: $(READY)  ## cost of saves for training on a GPU, and restore speed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/gpu_save.py
	$(BIN)/python benchmarks/gpu_restore.py
	$(BIN)/python benchmarks/gpu_cold.py
	$(BIN)/python benchmarks/gpu_recovery.py
	$(BIN)/python benchmarks/gpu_pair.py
	$(BIN)/python benchmarks/gpu_ranks.py

package:  ## build sdist and wheel, check them, and read with the wheel in fresh environments of PYTHONS="python3.12 ..."
	tools/check_package.sh

picture: $(READY)  ## record the demo for the README
	$(BIN)/python tools/record_demo.py docs/images/demo.svg

trace: $(READY)  ## record the trace of docs/traces.md
	folder=$$(mktemp -d) && $(BIN)/python examples/traced_training.py $$folder && \
	$(BIN)/python tools/trace_picture.py $$folder/traces docs/images/trace.svg; rm -rf $$folder

docs: $(READY)  ## build the documentation in site/, strictly
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict

cli-docs: $(READY)  ## write docs/cli.md from the commands' help texts
	$(BIN)/python tools/cli_docs.py

chromium: $(READY)  ## install Chromium for tests of reports: Debian's as root, else Playwright's
	@command -v chromium >/dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; \
	else \
		$(BIN)/playwright install --only-shell chromium; \
	fi

clean:  ## remove caches, builds and the demo's folder; .venv stays
	rm -rf raystow-demo site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
