# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad doctor``: would this job run, and what would it choose?"""

from torchtitan_cad.planning.model.layout import MAX_RANKS
from torchtitan_cad.tools.shared import JobFile, Overrides, check_job


def run(
    job: JobFile,
    overrides: Overrides = (),
    nproc: int | None = None,
    nnodes: int = 1,
) -> int:
    """Say, without training, what would fail in a job and what it would choose; one line per check.

    Run it on a machine like those of the job. Lines begin with ok, note (works, worth knowing), skip (cannot be known
    from here) or FAIL. The exit code is 1 if anything would fail.

    Args:
        job: torchtitan's TOML file.
        overrides: Further arguments of the job, such as --training.steps 5. They come last.
        nproc: Ranks per node, as torchrun's --nproc_per_node. Needed unless the job can run on one.
        nnodes: Nodes, as torchrun's.
    """
    for option, value in (("--nproc", nproc), ("--nnodes", nnodes)):
        if value is not None and value < 1:
            raise ValueError(f"{option} {value}: set a positive number")
    if (nproc or 1) * nnodes > MAX_RANKS:
        raise ValueError(
            f"--nproc {nproc} --nnodes {nnodes}: set numbers of which the product is at most {MAX_RANKS}"
        )
    check_job(job)
    from torchtitan_cad.tools.doctor.examine import examine
    from torchtitan_cad.tools.doctor.sample import is_drawing

    failed = 0
    for finding in examine([f"--job.config_file={job}", *overrides], nproc, nnodes):
        print(finding, flush=True)
        failed += finding.level == "FAIL"
    print(
        f"{failed} of these would fail" if failed else "nothing found that would fail"
    )
    code = int(failed > 0)
    # its thread, inside a tokenizer, may abort the interpreter's own end
    if is_drawing():
        from torchtitan_cad.runtime.signals import end_at_once

        end_at_once(code)
    return code
