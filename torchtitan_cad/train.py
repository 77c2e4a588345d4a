"""Start torchtitan: on accelerators as it is, on CPU ranks when there are none.

    torchrun --nproc_per_node=2 -m torchtitan_cad.train --job.config_file train.toml

takes the same arguments as `-m torchtitan.train` and runs the same `Trainer`. Whether core attention is disaggregated
is decided by the configuration (`job.custom_config_module`, `parallelism.cad`), not by this entry point.
"""

from torchtitan_cad.integration.cpu import enable_cpu


def main() -> None:
    """Run torchtitan's own `main` with its own `Trainer` on `sys.argv`."""
    enable_cpu()
    # torchtitan must not be imported before enable_cpu().
    from torchtitan.train import Trainer
    from torchtitan.train import main as torchtitan_main

    torchtitan_main(Trainer)


if __name__ == "__main__":
    main()
