# SPDX-License-Identifier: BSD-3-Clause
"""What is gathered for a machine with a GPU, from small wheels; and what the sanitizer finds, by a stand-in for it."""

import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import collect, sanitizer
from bench.gpu.parts import Skip
from tests.lib.refusals import refusal

MEMCHECK, INITCHECK, RACECHECK = sanitizer.TOOLS


def make_wheel(
    folder: Path, name: str, version: str, *requirements: str, tag: str = "py3-none-any"
) -> None:
    """A wheel of one module and one script."""
    head = f"{name}-{version}.dist-info"
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        "Provides-Extra: more",
    ]
    files = {
        f"{name}.py": f"version = '{version}'\n",
        f"{head}/METADATA": "\n".join(
            [*metadata, *(f"Requires-Dist: {text}" for text in requirements), "", ""]
        ),
        f"{head}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n",
        f"{head}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    record = f"{head}/RECORD"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(record, "".join(f"{path},,\n" for path in (*files, record)))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which alone pip takes wheels."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    make_wheel(
        folder,
        "outer",
        "1.0",
        "inner[more]<2",
        "numpy>=2",
        "old; python_version < '3.10'",
        "torch",
    )
    make_wheel(
        folder, "inner", "1.5", "compiled; extra == 'more'", "other; extra == 'less'"
    )
    make_wheel(folder, "inner", "2.0")
    make_wheel(folder, "compiled", "3.0", tag="cp312-cp312-manylinux_2_28_x86_64")
    make_wheel(folder, "compiled", "4.0", tag="cp313-cp313-manylinux_2_28_x86_64")
    return folder


@pytest.mark.matrix
def test_what_the_machine_lacks_is_gathered(index, tmp_path):
    listed = tmp_path / "installed.txt"
    listed.write_text("# what the machine has\nNumPy==1.26\ntorch\n")
    folder = tmp_path / "packages"
    (folder / "earlier-1.0.dist-info").mkdir(parents=True)  # is made anew
    gathered = collect.fill(folder, ["outer==1.0"], collect.read_present(listed))
    versions = {wheel.name: wheel.version for wheel in gathered.wheels}
    assert versions == {"outer": "1.0", "inner": "1.5", "compiled": "3.0"}
    assert gathered.relied_on == {"numpy": [">=2 (outer)"], "torch": ["any (outer)"]}
    assert gathered.unmet == ["outer requires numpy>=2, the machine has 1.26"]
    modules = {path.name for path in folder.iterdir()} - {
        path.name for path in folder.glob("[oic]*.dist-info")
    }
    assert modules == {"outer.py", "inner.py", "compiled.py"}
    text = "\n".join(collect.describe(folder, gathered))
    assert "| compiled | 3.0 | 0.00 |" in text
    assert "**not met**: outer requires numpy>=2" in text


@pytest.mark.matrix
def test_requirements_that_exclude_each_other_are_refused(index, tmp_path):
    make_wheel(index, "late", "1.0", "inner>=2")
    with refusal():
        collect.resolve(["outer", "late"], {"numpy": "", "torch": ""}, tmp_path)
    with pytest.raises(subprocess.CalledProcessError):
        collect.resolve(["missing"], {}, tmp_path)


def test_a_folder_of_other_files_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("precious")
    with refusal():
        collect.fill(tmp_path, [], {})
    assert (tmp_path / "notes.txt").exists()


def test_the_list_of_what_the_machine_has_can_be_read():
    present = collect.read_present(collect.INSTALLED)
    assert present["torch"] == "2.11.0"
    assert present["pytest-timeout"] == ""
    assert "torchtitan" not in present


def test_programs_of_mps_come_from_a_package_or_a_folder(tmp_path):
    programs = tmp_path / "package/usr/bin"
    programs.mkdir(parents=True)
    for name in collect.MPS_PROGRAMS[:1]:
        (programs / name).write_text("control")
    target = tmp_path / "bin"
    with refusal():
        collect.extract_mps(tmp_path / "package", target)
    (programs / collect.MPS_PROGRAMS[1]).write_text("server")
    collect.extract_mps(tmp_path / "package", target)
    assert [(target / name).read_text() for name in collect.MPS_PROGRAMS] == [
        "control",
        "server",
    ]
    assert all(os.access(target / name, os.X_OK) for name in collect.MPS_PROGRAMS)
    if shutil.which("dpkg-deb"):
        control = tmp_path / "package/DEBIAN/control"
        control.parent.mkdir()
        control.write_text(
            "Package: p\nVersion: 1\nArchitecture: all\nMaintainer: nobody\nDescription: none\n"
        )
        package = tmp_path / "p.deb"
        subprocess.run(
            ["dpkg-deb", "--build", str(tmp_path / "package"), str(package)], check=True
        )
        shutil.rmtree(target)
        collect.extract_mps(package, target)
        assert (target / collect.MPS_PROGRAMS[1]).read_text() == "server"


def test_both_halves_of_an_archive_make_the_whole(tmp_path, monkeypatch):
    content = os.urandom(10_000)

    def fill(folder: Path, *_: Any) -> collect.Collection:
        (folder / "compiler").mkdir(parents=True)
        (folder / "compiler/library.so").write_bytes(content)
        return collect.Collection((), {}, ())

    monkeypatch.setattr(collect, "fill", fill)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    for _ in range(2):  # anew
        lines = collect.add_flash_attention_4(first, second, {})
    halves = [first / "flash_attn_4.tar.xz.1", second / "flash_attn_4.tar.xz.2"]
    assert f"cat {halves[0]} {halves[1]} > " in lines[-1]
    whole = tmp_path / "whole"
    whole.write_bytes(b"".join(half.read_bytes() for half in halves))
    with tarfile.open(whole) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert (tmp_path / "unpacked/compiler/library.so").read_bytes() == content
    (second / "notes.txt").write_text("precious")
    with refusal():
        collect.add_flash_attention_4(first, second, {})


def test_a_folder_has_a_limit(tmp_path, capsys):
    (tmp_path / "file").write_bytes(bytes(2**20))
    assert collect.within_limit(tmp_path, 1.5)
    assert not collect.within_limit(tmp_path, 0.5)
    assert "1.0 MiB in all, 1.5 may travel" in capsys.readouterr().out
    assert 0 < collect.working_tree_bytes() < collect.MOST_MIB * collect.MIB


HEAD = "========= COMPUTE-SANITIZER\n"
OWN = """========= Invalid __global__ read of size 4 bytes
=========     at _put_rows+0x160 in put.py:120
=========     by thread (0,0,0) in block (1,0,0)
=========     Access at 0x7f0000000000 is out of bounds
"""
OF_LIBRARY = """========= Uninitialized __global__ memory read of size 16 bytes
=========     at void flash_fwd_kernel<Traits<(int)128>, (bool)1>(Params)+0x2a0
=========     by thread (0,0,0) in block (1,0,0)
"""
RACE = "========= Error: Race reported between Write access at _sum_rows+0x10 and Read access at _sum_rows+0x20\n"
ENDED = "========= Error: process didn't terminate successfully\n=========     The application may have hit an error\n"
NONE = "========= ERROR SUMMARY: 0 errors"
SUMMARY = "========= ERROR SUMMARY: 2 errors\n"
RACE_SUMMARY = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"


@pytest.mark.parametrize(
    ("tool", "code", "output", "bad"),
    [
        (MEMCHECK, 0, HEAD + NONE + "\n", ""),
        (MEMCHECK, 9, HEAD + OWN + SUMMARY, "errors: 2"),
        (MEMCHECK, 9, HEAD + OF_LIBRARY + SUMMARY, "errors: 2"),
        (INITCHECK, 9, HEAD + OF_LIBRARY + SUMMARY, ""),
        (INITCHECK, 9, HEAD + OF_LIBRARY + OWN + SUMMARY, "errors: 2"),
        (INITCHECK, 9, HEAD + OF_LIBRARY + ENDED + SUMMARY, "errors: 2"),
        (INITCHECK, 9, HEAD + SUMMARY, "errors: 2"),
        (RACECHECK, 9, HEAD + RACE + RACE_SUMMARY, "errors: 1"),
        (MEMCHECK, 255, HEAD, "exit code 255"),
        (MEMCHECK, 0, "it never began", "it says nothing of errors"),
    ],
)
def test_a_tool_is_judged_by_its_reports(tool, code, output, bad, tmp_path):
    program = write_stand_in(tmp_path, f"cat <<'END'\n{output}END\nexit {code}")
    finding = sanitizer.run_tool(program, tool, ["the program"], 60)
    assert finding.bad == bad
    assert bool(finding.output) == bool(bad)
    assert finding.of_others == (
        ["flash_fwd_kernel<Traits<"] if tool is INITCHECK and not bad else []
    )
    if OWN in output:
        assert "_put_rows+0x160" in finding.output


def write_stand_in(folder: Path, script: str) -> str:
    program = folder / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_the_sanitizer_gets_the_tool_and_the_program(tmp_path):
    program = write_stand_in(tmp_path, 'echo "$@"; exit 3')
    output = sanitizer.run_tool(
        program, RACECHECK, sanitizer.watched_program("cuda"), 60
    ).output
    assert "--tool=racecheck --error-exitcode=9 --port=49352" in output
    assert output.rstrip().endswith("-m bench.gpu.sanitized cuda")
    assert len({tool.port for tool in sanitizer.TOOLS}) == len(sanitizer.TOOLS)


def test_every_tool_is_told_of_even_if_one_fails(tmp_path, monkeypatch):
    script = f"""case "$1" in *memcheck) sleep 60;; *racecheck) exit 9;; esac; echo '{NONE}'"""
    monkeypatch.setenv(
        "PATH", f"{Path(write_stand_in(tmp_path, script)).parent}:{os.environ['PATH']}"
    )
    monkeypatch.setattr(sanitizer, "LIMIT_S", 2.0)
    figures: dict[str, Any] = {}
    with refusal(error=RuntimeError):
        sanitizer.measure("cuda", figures.__setitem__)
    assert [row["tool"] for row in figures["tools"]] == [
        "memcheck",
        "initcheck",
        "racecheck",
    ]
    assert [row["bad"] for row in figures["tools"]][1] == ""


def test_a_sanitizer_must_find_what_is_planted(tmp_path, monkeypatch):
    finds = f"""case "$*" in *{sanitizer.PLANTED}) echo '{SUMMARY.strip()}'; exit 9;; esac; echo '{NONE}'"""
    monkeypatch.setenv(
        "PATH", f"{Path(write_stand_in(tmp_path, finds)).parent}:{os.environ['PATH']}"
    )
    figures: dict[str, Any] = {}
    sanitizer.measure("cuda", figures.__setitem__)
    assert figures["errors found where one is planted"] == 2
    write_stand_in(tmp_path, f"echo '{NONE}'")
    with refusal(error=RuntimeError):
        sanitizer.measure("cuda", figures.__setitem__)


def test_without_a_sanitizer_the_part_is_skipped(tmp_path, monkeypatch):
    program = write_stand_in(
        tmp_path, "echo '========= Error: Device not supported'; exit 1"
    )
    with refusal(error=Skip):
        sanitizer.run_tool(program, MEMCHECK, [], 60)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sanitizer, "FOLDERS", "/nowhere*/bin")
    with refusal(error=Skip):
        sanitizer.find_program()


def test_kernels_are_named_as_the_package_names_them():
    folder = sanitizer.ROOT / "torchtitan_cad/runtime/triton"
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    assert all(f"\ndef {kernel}(" in text for kernel in sanitizer.KERNELS)
