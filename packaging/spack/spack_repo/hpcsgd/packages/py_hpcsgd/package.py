from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHpcsgd(PythonPackage):
    """hpcsgd trains PyTorch models on supercomputers with far less communication. It uses data
    parallelism inside groups of ranks, and local SGD, gossip and related methods across groups."""

    # At a release, set its address here and the checksum of its source distribution below. Until then,
    # `spack develop` uses a checkout.
    homepage = "https://example.org/hpcsgd"
    url = "https://example.org/hpcsgd/hpcsgd-0.1.0.tar.gz"

    license("BSD-3-Clause")

    version("0.1.0", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    variant("cuda", default=False, description="Kernels for NVIDIA's GPUs")

    depends_on("cxx", type="build")
    depends_on("cuda@12:", type="build", when="+cuda")
    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")

    depends_on("py-torch@2.4:2", type=("build", "run"))
    depends_on("py-torch+cuda", type=("build", "run"), when="+cuda")
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-h5py@3.10:", type=("build", "run"))
    depends_on("py-mpi4py@4:", type=("build", "run"))  # with the site's MPI, an external package in Spack
    depends_on("py-cyclopts@5:", type=("build", "run"))
    depends_on("py-matplotlib@3.8:", type=("build", "run"))
    depends_on("py-rich@13:", type=("build", "run"))
    depends_on("py-tomli-w@1:", type=("build", "run"))
    depends_on("py-scipy@1.11:", type=("build", "run"))

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        # setup.py uses only the nvcc of $CUDA_HOME. A prefix without nvcc turns the CUDA kernels off.
        env.set("CUDA_HOME", self.spec["cuda"].prefix if self.spec.satisfies("+cuda") else self.prefix)
