"""CAD in torchtitan's log line and TensorBoard, and the summary at the end of a run."""

import os
from typing import Any

import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor, _get_metrics_rank
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from torchtitan_cad.integration.session import current_session
from torchtitan_cad.integration.summary import write_summary


class CadMetricsProcessor(MetricsProcessor):
    """torchtitan's metrics plus CAD's; the rank with the loss writes ``cad_summary.json`` and ``imbalance.png``."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims, model_args: Any = None) -> None:
        super().__init__(job_config, parallel_dims)
        self._history: list[dict[str, Any]] = []
        self._last_step = 0
        # The summary comes from the rank whose loss torchtitan reports: under PP the others hold a placeholder.
        self._writes_summary = dist.get_rank() == _get_metrics_rank(parallel_dims, job_config)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        session = current_session()
        figures = session.statistics.drain()
        # A resumed run does not log its first steps.
        steps = step - (self._last_step or step - 1)
        figures["exchange_seconds"] = session.engine.clock.reset() / steps
        self._last_step = step
        super().log(
            step,
            global_avg_loss,
            global_max_loss,
            grad_norm,
            extra_metrics={**(extra_metrics or {}), **_scalars(figures)},
        )
        if "imbalance_before" in figures:
            logger.info(_log_line(figures))
            self._history.append({"step": step, "loss": float(global_avg_loss), **figures})

    def close(self) -> None:
        super().close()
        if self._history and self._writes_summary:
            folder = os.path.join(self.job_config.job.dump_folder, self.job_config.metrics.save_tb_folder)
            text = write_summary(folder, self._history)
            logger.info(f"CAD summary, written to {folder}:\n{text}")
            self._history = []


def _scalars(figures: dict[str, Any]) -> dict[str, float]:
    """TensorBoard scalars."""
    scalars = {"cad/exchange_time(s)": figures["exchange_seconds"]}
    if "imbalance_before" in figures:
        scalars |= {
            "cad/imbalance_before": figures["imbalance_before"],
            "cad/imbalance_after": figures["imbalance_after"],
            "cad/forward_layer_MB_per_rank_mean": figures["bytes_per_rank_mean"] / 1e6,
            "cad/forward_layer_MB_per_rank_max": figures["bytes_per_rank_max"] / 1e6,
            "cad/forward_layer_MB_copied": figures["bytes_copied"] / 1e6,
            "cad/tasks": figures["tasks"],
            "cad/tasks_moved": figures["tasks_moved"],
            "cad/plan_time(s)": figures["plan_seconds"],
        }
    if "imbalance_backward" in figures:
        scalars |= {key: figures[key[4:]] for key in ("cad/imbalance_backward", "cad/backward_plans")}
    return scalars


def _log_line(figures: dict[str, Any]) -> str:
    backward = ""
    if "imbalance_backward" in figures:
        own = f"{100 * figures['backward_plans']:.0f}% planned apart"
        backward = f"(backward {figures['imbalance_backward']:.3f}, {own})  "
    return (
        f"cad: imbalance {figures['imbalance_before']:.3f} -> {figures['imbalance_after']:.3f}  {backward}"
        f"moved {figures['tasks_moved']:.0f} of {figures['tasks']:.0f} tasks, "
        f"{figures['bytes_per_rank_mean'] / 1e6:.2f} MB per rank and forward layer "
        f"(worst {figures['bytes_per_rank_max'] / 1e6:.2f})  "
        f"plan {figures['plan_seconds'] * 1e3:.1f} ms  exchange {figures['exchange_seconds'] * 1e3:.0f} ms"
    )
