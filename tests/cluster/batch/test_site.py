from __future__ import annotations

from pathlib import Path

import pytest

from hpcsgd.cluster.batch import Site, load_site
from hpcsgd.errors import UserError

SITES = Path(__file__).parents[3] / "jobs" / "sites"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def test_without_a_file_everything_is_left_to_slurm() -> None:
    assert load_site(None) == (Site(), None)
    assert Site().options() == {}


def test_the_folder_comes_before_the_home(elsewhere: Path) -> None:
    home = elsewhere / "home" / ".config" / "hpcsgd" / "site.toml"
    home.parent.mkdir(parents=True)
    home.write_text('partition = "home"')
    assert load_site(None)[0].partition == "home"
    (elsewhere / "site.toml").write_text('partition = "here"')
    assert load_site(None) == (Site(partition="here"), Path("site.toml"))


def test_options_of_sbatch(elsewhere: Path) -> None:
    (elsewhere / "site.toml").write_text('account = "us"\nsbatch = ["--constraint=gpu", "--exclusive"]')
    assert load_site(None)[0].options() == {"account": "us", "constraint": "gpu", "exclusive": ""}
    short = Site(partition="long", sbatch=("-C gpu&a100", "-x node[1-2]", "-H"))
    assert short.options() == {"partition": "long", "C": "gpu&a100", "x": "node[1-2]", "H": ""}


LAUNCHED = {
    "amd": "cray_shasta", "cray": "cray_shasta", "cray-gpu": "cray_shasta", "nvidia": "pmix", "pmix": "pmix",
    "pmi2": "pmi2",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(path.stem for path in SITES.glob("*.toml")))
def test_the_examples(name: str) -> None:
    site, _ = load_site(SITES / f"{name}.toml")
    assert site.mpi == LAUNCHED[name]


@pytest.mark.parametrize("name", ["amd", "cray-gpu", "nvidia"])
def test_ranks_see_all_gpus_of_their_node(name: str) -> None:
    """Ranks that do not see all GPUs could not access those of other ranks."""
    site, _ = load_site(SITES / f"{name}.toml")
    assert "--gpu-bind=none" in site.bindings()
    assert site.environment


def test_masks_of_amd_are_of_eight_ranks_with_seven_cores_each() -> None:
    masks = load_site(SITES / "amd.toml")[0].cpu_bind.removeprefix("mask_cpu:").split(",")
    cores = [int(mask, 16) for mask in masks]
    assert [mask.bit_count() for mask in cores] == [7] * 8
    assert sum(cores).bit_count() == 7 * 8, "no core is two ranks'"


def test_bindings_and_variables(elsewhere: Path) -> None:
    assert (Site().bindings(), Site().variables()) == (["--cpu-bind=cores"], [])
    text = 'cpu_bind = "map_ldom:1,0"\ngpu_bind = "closest"\nmem_bind = "local"\n[environment]\nNIC = "a b"'
    (elsewhere / "site.toml").write_text(text)
    site, _ = load_site(None)
    assert site.bindings() == ["--cpu-bind=map_ldom:1,0", "--gpu-bind=closest", "--mem-bind=local"]
    assert site.variables() == ["NIC=a b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('partitoin = "x"', "site.toml: partitoin = \"x\": unknown key: did you mean 'partition'?"),
        ('srun = "--exclusive"', 'site.toml: srun = "--exclusive": expected a list of strings'),
        ("environment = { A = 1 }", r"site.toml: \[environment\]: expected a table of strings"),
        ("modules = [1]", r"site.toml: modules = \[1\]: expected a list of strings"),
        ("modules = [", "site.toml: not valid TOML"),
    ],
)
def test_mistakes(text: str, message: str, elsewhere: Path) -> None:
    (elsewhere / "site.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_site(None)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"no\.toml: cannot be read"):
        load_site(Path("no.toml"))
