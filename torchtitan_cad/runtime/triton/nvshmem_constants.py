"""Numbers of NVSHMEM's device interface, importable without its device library.

The source is NVSHMEM's headers (nvshmem_common_transport.h, nvshmem_constants.h); the docstrings of torch's wrappers
give other numbers.
"""

SIGNAL_SET = 9
"""``nvshmemx_signal_op``: replace the signal word."""
CMP_GE = 5
"""``nvshmem_signal_wait_until``: until the word is at least the value."""
