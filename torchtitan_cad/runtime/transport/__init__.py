# SPDX-License-Identifier: BSD-3-Clause
"""Transports: how rows travel between the ranks of a CAD group."""

from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL
from torchtitan_cad.runtime.transport.base import (
    Peers,
    Pending,
    Route,
    Routes,
    Transport,
)
from torchtitan_cad.runtime.transport.build import build_transport, expected_transport
from torchtitan_cad.runtime.transport.collective import (
    CollectiveTransport,
)
from torchtitan_cad.runtime.transport.symmetric import SymmetricTransport

__all__ = [
    "BUFFERS_PER_CALL",
    "CollectiveTransport",
    "Peers",
    "Pending",
    "Route",
    "Routes",
    "SymmetricTransport",
    "Transport",
    "build_transport",
    "expected_transport",
]
