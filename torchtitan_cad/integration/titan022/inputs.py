"""Checks of what a job reads, made before process groups exist and on every rank."""

from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools import utils

from torchtitan_cad.demo.datasets import check_known
from torchtitan_cad.demo.tokenizer import check_files
from torchtitan_cad.runtime.kernels.select import get_kernel


def check_inputs(config: JobConfig, spec: TrainSpec) -> None:
    """Check the names of datasets, that there is a tokenizer, and on CPU the kernel and what was measured of it.

    Raises:
        ValueError: names the TOML key, the value, and what to set instead.
    """
    if utils.device_type == "cpu":  # on CUDA the session looks, once the rank has its device
        config.cad.check_profiled_kernel(get_kernel(config.cad.kernel, "cpu").name)
    check_known(config, spec)
    if spec.build_tokenizer_fn is build_hf_tokenizer:
        check_files(config.model.hf_assets_path)
