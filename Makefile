# What there is to run. Needs Linux, GNU make and Python 3.10 or newer; everything else goes into .venv.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv demo test lint test-s3 s3-suite test-streams test-gpu soak drills fuzz bench bench-control bench-restore bench-gpu bench-training picture docs chromium clean

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# Two ports of which the one a thousand above is free as well: Ceph's monitor takes a pair.
PORTS := import socket; s = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]; a, b = (x.getsockname()[1] for x in s); \
	print(a, b - 1000); socket.create_server(("127.0.0.1", b - 1000)).close()

help:  ## this list
	@sed -nE 's/^([a-z0-9-]+):[^#]*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 23

venv: $(READY)  ## the virtual environment in .venv, made once and after a change of dependencies

# torch first and pinned: left to itself, the resolver may try several versions of it, at gigabytes each.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("raystow needs Python 3.10 or newer; set PYTHON=python3.x")'
	@echo "Setting up .venv: some minutes, the first time"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[train,report,dev]"
	touch $@

demo: $(READY)  ## train on a real cluster, lose a node in mid-save, get every bit back (two minutes)
	$(BIN)/raystow demo
	@echo; echo "raystow is in $(BIN): source $(BIN)/activate puts it on the path"

test: lint  ## lint, types, layers, and all tests but those that need a GPU or take minutes
	$(BIN)/pytest -n 2 --no-loadscope-reorder -m "not slow and not gpu"

lint: $(READY)  ## style (ruff), types (mypy), layers (import-linter)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test-s3: $(READY)  ## tests and demo on a real S3 server: a private Ceph, or the one at $RAYSTOW_TEST_S3
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
	$(BIN)/pytest -m s3
	PYTHONPATH=tests $(BIN)/python -c 'import s3_server; s3_server.make_bucket("raystow-tests")'
	$(BIN)/raystow demo --store s3://raystow-tests/demo

SEEDS ?= 2

test-streams: $(READY)  ## what the host says to a GPU, tried without one, in SEEDS orders (2: three minutes; fetches Triton, 0.3 GB)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[streams]"
	SEEDS=$(SEEDS) $(BIN)/pytest tests/streams

test-gpu: $(READY)  ## the tests that need an NVIDIA GPU
	$(BIN)/pytest -m gpu

SOAK ?= tests

soak: $(READY)  ## the tests that take minutes, but for drills: one to two hours on two cores; SOAK=tests/simulation for those alone
	$(BIN)/pytest -v -m "slow and not drill" $(SOAK)

drills: $(READY)  ## kill and freeze everything on real clusters, and put what became of it into docs/failures.md (twenty minutes)
	$(BIN)/pytest tests/drills --drill-table=docs/failures.md

FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= any_record marker root record fragment pack value key

fuzz: $(READY)  ## fuzz every parser of stored bytes, FUZZ_SECONDS each (60)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[fuzz]"
	for target in $(FUZZ_TARGETS); do $(BIN)/python tests/fuzz/campaign.py $$target $(FUZZ_SECONDS) || exit; done

bench: $(READY)  ## how fast this machine codes and decodes
	$(BIN)/python benchmarks/cpu_codec.py

bench-control: $(READY)  ## what commits cost, the coordinator of 2,048 nodes, and opening 10,000 versions (some minutes)
	$(BIN)/python benchmarks/control_plane.py

bench-restore: $(READY)  ## how fast a state comes back from each place, and planning for 16,384 ranks (some minutes)
	$(BIN)/python benchmarks/restore.py

bench-gpu: $(READY)  ## what a save costs training on a GPU, and how fast it comes back
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/gpu_save.py
	$(BIN)/python benchmarks/gpu_restore.py
	$(BIN)/python benchmarks/gpu_pair.py

bench-training: $(READY)  ## what each way of making versions smaller saves, and costs the training resumed from them (needs a GPU)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/training_study.py run

picture: $(READY)  ## the picture in the README, from a real run of the demo
	$(BIN)/python tools/record_demo.py docs/images/demo.svg

docs: $(READY)  ## the documents as a site in site/, built strictly: a broken link or anchor fails
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict

chromium: $(READY)  ## a Chromium for the test that opens reports in it: Debian's where we are root, else Playwright's own
	@command -v chromium >/dev/null || if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; \
	else \
		$(BIN)/playwright install --only-shell chromium; \
	fi

clean:  ## remove caches, builds and what the demo left; .venv stays
	rm -rf raystow-demo site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
