# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's dry runs, in which one process plays a rank of a larger job, are refused with CAD."""

import pytest

from tests.lib.jobs.harness import parse_job
from tests.lib.refusals import refusal

MODES = ["fake_backend", "local_tensor"]


@pytest.mark.parametrize("mode", MODES)
def test_dry_runs_are_refused(mode, tmp_path):
    with refusal("comm.mode", mode, remedy="'default'"):
        parse_job(tmp_path, f"--comm.mode={mode}", "--parallelism.cad")


@pytest.mark.parametrize("mode", MODES)
def test_jobs_without_cad_run_dry_as_torchtitan_has_them(mode, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    degrees = "--parallelism.context_parallel_degree=2"
    parse_job(tmp_path, f"--comm.mode={mode}", "--parallelism.no-cad", degrees)
