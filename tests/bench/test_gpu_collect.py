# SPDX-License-Identifier: BSD-3-Clause
"""What is gathered for a machine with a GPU, from small wheels; and what the sanitizer finds, by a stand-in for it."""

import os

import pytest

from bench.gpu import collect, sanitizer
from tests.lib.refusals import refusal

MEMCHECK, INITCHECK, RACECHECK = sanitizer.TOOLS


def test_a_folder_of_other_files_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("precious")
    with refusal():
        collect.fill(tmp_path, [], {})
    assert (tmp_path / "notes.txt").exists()


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
    ("tool", "code", "reports", "bad"),
    [
        (MEMCHECK, 0, NONE, ""),
        (MEMCHECK, 9, OF_LIBRARY + SUMMARY, "errors: 2"),
        (INITCHECK, 9, OF_LIBRARY + SUMMARY, ""),
        (INITCHECK, 9, OF_LIBRARY + OWN + SUMMARY, "errors: 2"),
        (INITCHECK, 9, OF_LIBRARY + ENDED + SUMMARY, "errors: 2"),
        (RACECHECK, 9, RACE + RACE_SUMMARY, "errors: 1"),
        (MEMCHECK, 255, "", "exit code 255"),
        (MEMCHECK, 0, "", "it says nothing of errors"),
    ],
)
def test_a_tool_is_judged_by_its_reports(tool, code, reports, bad, tmp_path):
    output = HEAD + reports
    program = write_stand_in(tmp_path, f"cat <<'END'\n{output}\nEND\nexit {code}")
    finding = sanitizer.run_tool(program, tool, ["the program"], 60)
    assert finding.bad == bad
    assert bool(finding.output) == bool(bad)
    forgiven = tool is INITCHECK and not bad
    assert finding.of_others == (["flash_fwd_kernel<Traits<"] if forgiven else [])
    assert OWN not in output or "_put_rows+0x160" in finding.output


def write_stand_in(folder, script):
    program = folder / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_a_sanitizer_must_find_what_is_planted(tmp_path, monkeypatch):
    finds = f"""case "$*" in *{sanitizer.PLANTED}) echo '{SUMMARY.strip()}'; exit 9;; esac; echo '{NONE}'"""
    write_stand_in(tmp_path, finds)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    figures = {}
    sanitizer.measure("cuda", figures.__setitem__)
    assert figures["errors found where one is planted"] == 2
    write_stand_in(tmp_path, f"echo '{NONE}'")
    with refusal(error=RuntimeError):
        sanitizer.measure("cuda", figures.__setitem__)


def test_kernels_are_named_as_the_package_names_them():
    folder = sanitizer.ROOT / "torchtitan_cad/runtime/triton"
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    assert all(f"\ndef {kernel}(" in text for kernel in sanitizer.KERNELS)
