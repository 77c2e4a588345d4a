# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that share a GPU: the service by a stand-in of its control program, and what `sharing` finds and predicts."""

import os
from pathlib import Path

import numpy as np
import pytest

from bench.gpu import mps, sharing
from bench.gpu.parts import Skip
from tests.lib.refusals import refusal
from torchtitan_cad.tools.compare.comparison import Runs

CONTROL = """#!/bin/sh
# The daemon lives until it is told to quit; the front end answers while it lives.
state=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -f ]; then
    echo $$ > $state/daemon
    echo "$CUDA_MPS_LOG_DIRECTORY" > RECORD
    while [ ! -e $state/quit ]; do sleep 0.05; done
    rm $state/daemon
    exit 0
fi
read words
[ -e $state/daemon ] || { echo "no daemon"; exit 1; }
case "$words" in
    quit*) touch $state/quit ;;
    get_server_list) echo 1234 ;;
    *) echo "unknown $words"; exit 1 ;;
esac
"""


def stand_ins(folder, control):
    """Programs in ``folder`` under the names of the service's."""
    folder.mkdir()
    for name, text in ((mps.CONTROL, control), (mps.SERVER, "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return mps.find_programs([str(folder)])


def test_the_service_lives_as_long_as_its_context(tmp_path):
    record = tmp_path / "record"
    programs = stand_ins(tmp_path / "bin", CONTROL.replace("RECORD", str(record)))
    with mps.service(programs) as running:
        assert running.command("get_server_list") == "1234"
        share = running.share(25)
        assert share[mps.SHARE] == "25"
        pipes = Path(share[mps.PIPES])
        daemon = int((pipes / "daemon").read_text())
        os.kill(daemon, 0)
        assert record.read_text().strip() == share[mps.LOGS]
    assert not pipes.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(daemon, 0)


def test_a_service_that_cannot_be_is_a_reason_to_skip(tmp_path):
    programs = stand_ins(tmp_path / "bin", "#!/bin/sh\necho no such device\nexit 3\n")
    with refusal(error=Skip), mps.service(programs):
        pytest.fail("it must not begin")
    with refusal(error=Skip):
        mps.find_programs([str(tmp_path)])


LONG = [[10]]
SHORT = [[1] * 10]


def runs_of(seconds, rows, **changes):
    """Records of two ranks that take the same seconds in every step."""
    ones = np.ones((1, len(seconds), 2))
    names = ("busy", "attention", "waiting", "tokens", "loss", "gradient_norm")
    names += ("imbalance_before", "imbalance_after", "bytes_per_rank_mean")
    arrays = {name: ones.copy() for name in names}
    arrays["seconds"] = ones * np.array(seconds)[None, :, None]
    return Runs(**arrays | changes, rows=rows)


def test_the_ideal_spreads_attention_evenly_at_no_cost():
    """Seconds are 1 and one for every 100 pairs of the busiest rank; the even step has the mean's."""
    rows = [[LONG, SHORT], [SHORT, SHORT], [LONG, SHORT]]
    found = sharing.ideal_seconds(runs_of([2.0, 1.1, 2.0], rows), slice(0, None))
    np.testing.assert_allclose(found, [1.55, 1.1, 1.55])


def test_what_trains_otherwise_than_stock_is_an_error():
    rows = [[LONG, SHORT]] * 3
    stock = runs_of([2.0] * 3, rows)
    figures = {}

    def report(**changes):
        runs = {"stock": stock, "cad": runs_of([1.0] * 3, rows, **changes)}
        sharing.report(runs, sharing.CPU, figures.__setitem__)

    report()
    assert figures["modes"][1]["speed_up"] == 2.0
    wrong = np.ones((1, 3, 2))
    wrong[0, 0] += 1e-3
    for name in ("loss", "gradient_norm"):
        with refusal(error=RuntimeError):
            report(**{name: wrong})
