# SPDX-License-Identifier: BSD-3-Clause
"""What importing and planning change in a process, and that docs/seams.md lists what else does."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.lib.sets import matrix

ROOT = Path(__file__).parents[1]
CHANGES = (
    r"signal\.(?:signal|set_wakeup_fd)\(",
    r"register_(?:after_fork|at_fork)\(",
    r"atexit\.register\(",
    r"mock\.patch",
    r"os\.environ(?:\.setdefault|\.update|\[[^]]+\] = )",
    r"numba\.config",
    r"torch\._(?:dynamo|inductor)\.config",
    r"torch\.compiler\.config\.\w+ = ",
    r"torch\.set_\w+\(",
    r"gc\.disable\(",
    r"warnings\.\w*filter\w*\(",
    r"logging\.disable\(",
    r"getLogger\(.*\)\.setLevel\(",
    r"sched_setaffinity\(",
    r"setpriority\(",
    r"time\.perf_counter = ",
    r"sys\.modules\[[^]]+\] = ",
)
"""Code that changes what other code of the process meets."""

PLAN = """
    import importlib, os, pkgutil, signal, sys
    import numba, torch, torch._dynamo

    def state():
        return {
            "signals": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
            "wakeup": signal.set_wakeup_fd(-1),
            "numba": (numba.config.OPT, numba.config.LOOP_VECTORIZE),
            "environment": dict(os.environ),
            "dynamo": torch._dynamo.config.recompile_limit,
            "tag": torch.compiler.config.cache_key_tag,
            "threads": torch.get_num_threads(),
        }

    before = state()
    from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

    enable_cpu()  # before torchtitan is imported
    import torchtitan_cad.train, torchtitan_cad.job_config, torchtitan_cad.integration.torchtitan_v0_2.manager

    unwanted = ("torchtitan_cad.demo", "torchtitan_cad.tools", "matplotlib")
    print([name for name in sys.modules if name.startswith(unwanted)])
    OTHER_VERSION = "torchtitan_cad.integration.torchtitan_v0_3."
    for module in pkgutil.walk_packages(torchtitan_cad.__path__, "torchtitan_cad."):
        if not module.name.startswith(("torchtitan_cad.runtime.triton", "torchtitan_cad.demo", OTHER_VERSION)):
            importlib.import_module(module.name)
    from torchtitan_cad.planning import AttentionShape, TokenLayout, jit, make_plan

    make_plan(TokenLayout.from_segments([[(0, 0, 5000)], [(1, 0, 5000)]]), AttentionShape(8, 2, 64, 2))

    @jit.jit  # after the plan, which would compile the planner anew for a source file more
    def entry(count):
        return count + 1

    assert entry(1) == 2
    after = state()
    print([name for name in before if before[name] != after[name]])
"""


@matrix
def test_importing_and_planning_leave_the_process_as_it_was(tmp_path):
    """Jobs import no tools, and the demo only if they name it. A new entry point is compiled."""
    script = tmp_path / "plan.py"  # numba keeps what it compiles beside a file
    script.write_text(textwrap.dedent(PLAN))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["[]", "[]"]


def test_files_that_change_the_process_are_listed():
    """The sections of docs/seams.md name every file of the package that holds code of ``CHANGES``."""
    page = (ROOT / "docs" / "seams.md").read_text()
    pattern = re.compile("|".join(CHANGES))
    sources = (ROOT / "torchtitan_cad").rglob("*.py")
    files = [path.name for path in sources if pattern.search(path.read_text())]
    assert len(files) > 10
    missing = [name for name in files if not re.search(rf"\b{name}\b", page)]
    assert not missing, (
        f"say in docs/seams.md what these files change, from when and until when: {missing}"
    )
