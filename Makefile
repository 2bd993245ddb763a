# On a fresh machine: `make demo` trains on four ranks, `make test` runs the whole suite.
PYTHON ?= python3
MPI ?= mpich# the wheel that brings MPI; `MPI=` takes the site's own (after a change of it: make clean)

BIN := .venv/bin
MPIEXEC := $(if $(MPI),$(BIN)/mpiexec,mpiexec)
OPENMPI_BIN := .venv-openmpi/bin
ENV := .venv/installed
OPENMPI_ENV := .venv-openmpi/installed
COMMA := ,

export OMP_NUM_THREADS := 1
# Set in many containers; then each of the test suite's many pytests would compile all tests again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: env demo test test-long soak test-openmpi check docs wheels bench-quick doctor clean

env: $(ENV)

$(ENV): EXTRAS := $(if $(MPI),$(MPI)$(COMMA))examples,dev
$(OPENMPI_ENV): EXTRAS := openmpi,examples,dev
$(ENV) $(OPENMPI_ENV): pyproject.toml constraints.txt setup.py $(wildcard csrc/* csrc/cuda/*)
	"$(PYTHON)" -m venv "$(@D)"
	"$(@D)/bin/python" -m pip install -c constraints.txt -e ".[$(EXTRAS)]"
	touch "$@"

demo: $(ENV)
	"$(BIN)/hpcsgd" data convert digits examples/digits.h5
	rm -rf runs/digits
	"$(MPIEXEC)" -n 4 "$(BIN)/hpcsgd" train examples/digits.toml

test: $(ENV)
	"$(BIN)/python" -m pytest -m "not long and not soak and not large" --numprocesses auto --dist loadfile --no-loadscope-reorder
	tests/mpi.sh "$(MPIEXEC)" "$(BIN)/python" 2 4 8

# What `make test` leaves out; batch jobs and slow links need root, Slurm's daemons and iproute2.
test-long: $(ENV)
	"$(BIN)/python" -m pip install -q -c constraints.txt -e ".[wandb,mlflow]"
	"$(BIN)/python" -m pytest -m long

# An hour: ten thousand steps of every method, thousands of interleavings, damaged files, strangers at the door. What fails
# says by which number it is had again.
soak: $(ENV)
	"$(BIN)/python" -m pytest -m soak --numprocesses auto --dist load tests/soak

# The second MPI, in an environment of its own: transport on two ranks, each method once, on four.
test-openmpi: $(OPENMPI_ENV)
	tests/mpi.sh "$(OPENMPI_BIN)/mpiexec" "$(OPENMPI_BIN)/python" 2 4

check: $(ENV)
	PATH="$(CURDIR)/$(BIN):$$PATH" pre-commit run --all-files --show-diff-on-failure

# The pages as a site, in site/; nothing is fetched, and what is warned of is refused. The variable is one of the theme, whose
# makers tell of their next tool otherwise.
docs: $(ENV)
	NO_MKDOCS_2_WARNING=1 "$(BIN)/python" -m mkdocs build --strict

# What is handed out, in dist/: a source distribution and a wheel, tried in environments of their own in build/.
wheels:
	packaging/wheels.sh "$(PYTHON)"

bench-quick: $(ENV)
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
	"$(BIN)/python" benchmarks/gpu.py --quick

doctor: $(ENV)
	"$(MPIEXEC)" -n 2 "$(BIN)/hpcsgd" doctor

clean:
	rm -rf .venv .venv-openmpi site build dist *.egg-info .hypothesis .*_cache
