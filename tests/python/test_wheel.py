"""The wheel in an empty environment: made of the finished build, installed, and run where the source tree is not on the path."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conftest import ROOT



def folder_of(package):
    """Where a package of the running Python lies; none: it has none."""
    spec = importlib.util.find_spec(package)
    return Path(next(iter(spec.submodule_search_locations))).parent if spec else None


def run(*command, **settings):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, **settings)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(program, tmp_path_factory):
    pytest.importorskip("scikit_build_core")
    if not (program.resolve().parent / "CMakeCache.txt").is_file():
        pytest.skip(f"{program} lies in no build folder")
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", ROOT, "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder,
        f"--config-settings=cmake.define.ESPALIER_BUILT={program.resolve().parent}", f"--config-settings=build-dir={folder / 'build'}")
    return next(folder.glob("*.whl"))


class Environment:
    """A virtual environment without packages, and what it runs: outside of the source tree, without the tree's variables."""

    def __init__(self, folder, wheel):
        self.folder = folder
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        self.python = folder / "bin/python"
        run(sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-index", "--no-deps", wheel)
        self.site = Path(run(self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ESPALIER_", "PYTHON", "LD_"))}
        self.variables = {**kept, "OMP_NUM_THREADS": "1", "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def run(self, *command):
        return run(*command, cwd=self.folder, env=self.variables)


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """torch and the rest through a .pth file: another folder than the wheel's own."""
    made = Environment(tmp_path_factory.mktemp("environment") / "venv", wheel)
    folders = {folder_of(package) for package in ("torch", "numpy", "transformers", "jinja2", "trl", "datasets")} - {None}
    (made.site / "others.pth").write_text("".join(f"{folder}\n" for folder in folders))
    return made


def test_the_wheel_holds_program_library_and_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    minor = ".".join(importlib.metadata.version("torch").split(".")[:2])
    assert wheel.name.startswith(f"espalier-0.1.0+torch{minor}-py3-none-linux_")
    for name in ("bin/torch_version", "bin/espalier", "bin/libespalier_core.so", "py.typed", "verbs.pyi", "hf/__init__.py", "trl/__init__.py", "records/__main__.py"):
        assert f"espalier/{name}" in names
    assert not [name for name in names if "__pycache__" in name]


def test_versions_agree(wheel):
    import espalier
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert f"project(espalier VERSION {espalier.__version__} " in cmake and wheel.name.startswith(f"espalier-{espalier.__version__}+torch")


def test_the_range_of_torch_stands_in_one_place():
    """pyproject.toml cannot read tools/torch_versions.txt, so it repeats it."""
    import tomllib
    versions = dict(line.split() for line in (ROOT / "tools/torch_versions.txt").read_text().splitlines() if line[0] != "#")
    major, minor = map(int, versions["newest"].split("."))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["program"] == [f"torch>={versions['oldest']},<{major}.{minor + 1}"]
    assert f"torch=={versions['downloaded']}." in (ROOT / "tools/requirements-build.txt").read_text()


def test_the_installed_program_runs(environment, model_of, tmp_path):
    program = environment.folder / "bin/espalier"
    assert environment.run(program, "--version").split()[-1].startswith("0.1.0")
    rollouts = tmp_path / "rollouts.jsonl"
    records = [{"prompt_ids": [5, 6, 7], "response_ids": [8, 9 + i], "advantage": 1 - i} for i in range(3)]
    rollouts.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert json.loads(environment.run(program, "inspect", rollouts, "--json"))["rollouts"] == 3
    command = [program, "train", "--model", model_of("qwen3_tied"), "--rollouts", rollouts, "--out", tmp_path / "out", "--json"]
    assert len(json.loads(environment.run(*command))["steps"]) == 1
    # a dump that only Python reads: the program's Python is the environment's, and the package the installed one
    import torch
    from dumps import make_samples, trl_batch
    torch.save(trl_batch(make_samples()), tmp_path / "dump.pt")
    assert json.loads(environment.run(program, "inspect", tmp_path / "dump.pt", "--json"))["rollouts"] == 7


def test_the_installed_package_runs(environment, model_of):
    where = environment.run(environment.python, "-c", "import espalier; print(espalier.__file__)").strip()
    assert Path(where).parent == environment.site / "espalier"
    code = f"import espalier; print(espalier.plan(model={str(model_of('qwen3_tied'))!r}, rollouts='r.jsonl', quiet=True)['verb'])"
    (environment.folder / "r.jsonl").write_text('{"prompt_ids": [5, 6], "response_ids": [8], "advantage": 1}\n')
    assert environment.run(environment.python, "-c", code).strip() == "plan"
    assert "pass: " in environment.run(environment.python, ROOT / "examples/plain_loop.py", "--steps", "2")


def test_the_installed_trainer_runs(environment):
    pytest.importorskip("trl")
    assert "rows run instead of" in environment.run(environment.python, ROOT / "examples/trl_grpo.py", "--steps", "1")


def test_torch_beside_the_wheel_needs_no_search_path(wheel, tmp_path):
    """Where torch lies in the same site-packages the program finds its library by itself."""
    made = Environment(tmp_path / "venv", wheel)
    for package in ("torch", "nvidia"):
        if folder_of(package):
            (made.site / package).symlink_to(folder_of(package) / package)
    assert made.run(made.site / "espalier/bin/espalier", "--version")


def test_the_wheel_carries_the_library_of_gpus(wheel, program, tmp_path):
    """It is found beside the installed program and opened: what is missing then is the driver."""
    if not (program.resolve().parent / "libespalier_cuda.so").is_file():
        pytest.skip("libespalier_cuda.so is not beside the program: make cuda builds it where there is an nvcc")
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU: make gpu-check shows more")
    made = Environment(tmp_path / "venv", wheel)
    for package in ("torch", "nvidia"):
        if folder_of(package):
            (made.site / package).symlink_to(folder_of(package) / package)

    def refused():
        command = [made.folder / "bin/espalier", "selftest", "--device", "cuda", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=made.variables)
        assert done.returncode == 8, done.stderr
        return json.loads(done.stdout)["error"]

    assert refused()["expected"] == "a GPU with CUDA 13 and its driver"
    (made.site / "espalier/bin/libespalier_cuda.so").unlink()
    assert refused()["expected"].startswith("the CUDA library of this build") and refused()["got"] == "no such file"


def test_another_torch_is_named(wheel, tmp_path):
    made = Environment(tmp_path / "venv", wheel)
    program = made.folder / "bin/espalier"

    def refused(*arguments):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, cwd=tmp_path, env=made.variables)
        assert done.returncode == 8
        return done

    linked = (made.site / "espalier/bin/torch_version").read_text().strip()
    assert f"expected torch {linked}, got no torch in" in refused("--version").stderr
    (made.site / "torch").mkdir()
    (made.site / "torch/version.py").write_text("__version__ = '2.6.0+cpu'\n")
    (made.site / "torch/__init__.py").touch()
    error = json.loads(refused("inspect", "x.jsonl", "--json").stdout)["error"]
    assert error["kind"] == "device" and "torch 2.6.0+cpu in" in error["got"] and f"pip install 'torch=={linked}.*'" in error["remedy"]
    code = "import espalier\ntry: espalier.inspect('x')\nexcept espalier.Error as e: print(e.exit_code)"
    for package in ("numpy", "numpy.libs"):
        (made.site / package).symlink_to(folder_of("numpy") / package)
    assert run(made.python, "-c", code, env=made.variables).strip() == "8"
    shutil.rmtree(made.folder)
