# SPDX-License-Identifier: BSD-3-Clause
"""CAD in torchtitan's log line, in TensorBoard (docs/operations.md), and in the file that `report` reads."""

import logging
import os
import statistics
import threading
import time
from datetime import datetime
from typing import Any

from torchtitan_cad.integration.report.steps_file import StepsFile, new_path
from torchtitan_cad.integration.session import current_session
from torchtitan_cad.integration.shadow import Shadow

logger = logging.getLogger(__name__)

TAGS: dict[str, tuple[str, float]] = {
    "cad/exchange/host(s)": ("exchange_seconds", 1),
    "cad/exchange/exposed(%)": ("exposed_percent", 1),
    "cad/mfu(%)": ("mfu_percent", 1),
    "cad/imbalance/before": ("imbalance_before", 1),
    "cad/imbalance/after": ("imbalance_after", 1),
    "cad/sent/mean(MB)": ("bytes_per_rank_mean", 1e-6),
    "cad/sent/max(MB)": ("bytes_per_rank_max", 1e-6),
    "cad/hosts/sent(MB)": ("bytes_between_hosts", 1e-6),
    "cad/tasks/all": ("tasks", 1),
    "cad/tasks/moved": ("tasks_moved", 1),
    "cad/servers/share(%)": ("served_share", 100),
    "cad/plan/time(s)": ("plan_seconds", 1),
    "cad/plan/tolerance": ("tolerance", 1),
}
"""Tags of scalars, with the figure that each shows and the factor to its unit."""


class CadMetrics:
    """What a job with CAD adds to torchtitan's metrics: a class before torchtitan's own among the bases of another.

    The rank with the loss writes the figures to the run's own folder.
    """

    time_last_log: float
    ntokens_since_last_log: int
    num_flops_per_token: float
    gpu_peak_flops: float
    parallel_dims: Any
    logger: Any

    def begin(self, *, writes_steps: bool, folder: str) -> None:
        """Prepare for the first step, after torchtitan's part.

        Args:
            writes_steps: whether this is the rank whose loss torchtitan reports: under PP others hold a placeholder.
            folder: of the figures of all runs.
        """
        self._last_step: int | None = None
        """The step of this process's last log line; before the first, the step before the process's own first one."""
        self._steps_file = StepsFile(lambda: new_path(self._run_folder()), "report")
        # a signal closes from another thread, perhaps in the middle of a step's log
        self._writing = threading.Lock()
        self._closed = False
        self._writes_steps = writes_steps
        self._folder = folder

    def _run_folder(self) -> str:
        """Return TensorBoard's folder of this run; without TensorBoard one that torchtitan would have made for it."""
        for logs in getattr(self.logger, "_loggers", []):
            writer = getattr(logs, "writer", None)
            if writer is not None:
                return writer.log_dir
        return os.path.join(self._folder, datetime.now().strftime("%Y%m%d-%H%M"))

    def should_log(self, step: int) -> bool:
        """Tell whether a step is logged; torchtitan asks once a step, the first time of the process's first step."""
        if self._last_step is None:
            self._last_step = step - 1
        return super().should_log(step)  # type: ignore[misc]

    def log(
        self,
        step: int,
        global_avg_loss: float,
        *others: float,
        extra_metrics: Any = None,
        **named: float,
    ) -> None:
        """Log a step, unless an exchange of it has failed: then raise ``PeerError``, as its loss means nothing."""
        session = current_session()
        session.confirm_exchanges()
        last_step = step - 1 if self._last_step is None else self._last_step
        steps = step - last_step
        elapsed = time.perf_counter() - self.time_last_log
        figures = session.statistics.drain()
        starting, waiting = session.engine.clock.reset()
        figures["exchange_seconds"] = (starting + waiting) / steps
        if session.device.type == "cpu":  # elsewhere the host does not wait
            figures["exposed_percent"] = 100 * waiting / elapsed
        gpus_of_tokens = self.parallel_dims.non_data_parallel_size
        speed = self.ntokens_since_last_log / (elapsed * gpus_of_tokens)
        figures["tokens_per_second"] = speed
        if "pairs_per_token" in figures:
            beside_rows = session.job.flops_beside_rows(figures["pairs_per_token"])
            flops = self.num_flops_per_token + beside_rows
            figures["mfu_percent"] = 100 * flops * speed / self.gpu_peak_flops
        self._last_step = step
        scalars = scalars_of(figures)
        with self._writing:
            if self._closed:
                return
            metrics = {**(extra_metrics or {}), **scalars}
            super().log(step, global_avg_loss, *others, extra_metrics=metrics, **named)  # type: ignore[misc]
            if "imbalance_before" in figures:
                logger.info(_log_line(figures))
                if self._writes_steps:
                    line = {"step": step, "loss": float(global_avg_loss), **figures}
                    self._steps_file.append(line)

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Log a validation; raises ``PeerError`` in place of it if an exchange so far has failed."""
        session = current_session()
        session.confirm_exchanges()
        with self._writing:
            if not self._closed:
                super().log_validation(loss, step, extra_metrics)  # type: ignore[misc]
        # As for torchtitan's own times, what comes before and the validation itself do not count for the next log line.
        session.engine.clock.reset()
        self._last_step = step

    def close(self) -> None:
        """Close the loggers, once. ``log`` does nothing from then on."""
        with self._writing:
            if not self._closed:
                super().close()  # type: ignore[misc]
            self._closed = True


class ShadowMetrics:
    """What a job with ``cad.shadow`` adds to torchtitan's metrics: the imbalance as loaded; used as ``CadMetrics``."""

    shadow: Shadow

    def log(
        self,
        step: int,
        global_avg_loss: float,
        *others: float,
        extra_metrics: Any = None,
        **named: float,
    ) -> None:
        """Log a step, with the mean imbalance of the steps since the last log line."""
        imbalances = self.shadow.drain_imbalances()
        scalars = (
            {"cad/imbalance/before": statistics.fmean(imbalances)} if imbalances else {}
        )
        metrics = {**(extra_metrics or {}), **scalars}
        super().log(step, global_avg_loss, *others, extra_metrics=metrics, **named)  # type: ignore[misc]
        for imbalance in scalars.values():
            logger.info(f"cad.shadow: imbalance {imbalance:.3f} as loaded")


def scalars_of(figures: dict[str, Any]) -> dict[str, float]:
    """Return the scalars of docs/operations.md by tag."""
    return {
        tag: unit * figures[name]
        for tag, (name, unit) in TAGS.items()
        if name in figures
    }


def _log_line(figures: dict[str, Any]) -> str:
    served = hosts = exposed = ""
    if "served_share" in figures:
        served = f", {100 * figures['served_share']:.0f}% of attention by servers"
    if "bytes_between_hosts" in figures:
        hosts = f"; {figures['bytes_between_hosts'] / 1e6:.2f} MB between hosts"
    if "exposed_percent" in figures:
        exposed = f" (exposed wait {figures['exposed_percent']:.1f}% of the step)"
    return (
        f"cad: imbalance {figures['imbalance_before']:.3f} -> {figures['imbalance_after']:.3f}  "
        f"moved {figures['tasks_moved']:.0f} of {figures['tasks']:.0f} tasks{served}, "
        f"{figures['bytes_per_rank_mean'] / 1e6:.2f} MB per rank and forward layer "
        f"(worst {figures['bytes_per_rank_max'] / 1e6:.2f}{hosts})  "
        f"plan {figures['plan_seconds'] * 1e3:.1f} ms  "
        f"exchange {figures['exchange_seconds'] * 1e3:.0f} ms{exposed}  "
        f"mfu {figures['mfu_percent']:.2f}% by documents"
    )
