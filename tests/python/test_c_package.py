"""find_package(espalier): the installed C interface serves another project."""

import shutil
import subprocess

import pytest

from conftest import ROOT


def run(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("wanted, found", [("0.1", True), ("0.2", False)])
def test_the_example_links_the_installed_package_and_plans(program, tmp_path, wanted, found):
    build = program.resolve().parent
    if not (build / "CMakeCache.txt").is_file():
        pytest.skip(f"{program} lies in no build folder")
    prefix, source = tmp_path / "prefix", tmp_path / "source"
    run("cmake", "--install", build, "--component", "development", "--prefix", prefix)
    shutil.copytree(ROOT / "examples/c_interface", source)
    lists = source / "CMakeLists.txt"
    lists.write_text(lists.read_text().replace("find_package(espalier 0.1", f"find_package(espalier {wanted}"))
    configure = ("cmake", "-B", tmp_path / "out", "-S", source, f"-DCMAKE_PREFIX_PATH={prefix}")
    if not found:
        with pytest.raises(AssertionError, match="espalier"):
            run(*configure)
        return
    run(*configure)
    run("cmake", "--build", tmp_path / "out")
    printed = run(tmp_path / "out/plan")
    assert printed.startswith("2 items\n")  # the prompt's trunk and one wave
    assert "phased" in printed
    assert next(prefix.rglob("libespalier_core.so.0.1")).is_symlink()
