# SPDX-License-Identifier: BSD-3-Clause
"""A rank of the bench's part ``sharing`` with a planted fault: rank 1 takes received rows in another order."""

import os

from torch import Tensor

from bench.gpu import shared_rank
from torchtitan_cad.runtime.packing import RowFormat

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        unpack = RowFormat.unpack

        def unpack_swapped(self: RowFormat, message: Tensor) -> list[Tensor]:
            return [rows.flip(0) for rows in unpack(self, message)]

        RowFormat.unpack = unpack_swapped  # type: ignore[method-assign]
    shared_rank.main()
