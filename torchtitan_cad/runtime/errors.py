"""Errors of the runtime."""


class PeerError(RuntimeError):
    """A peer is gone, silent, or disagrees; the message names the peer and the phase."""


class PlanMismatchError(PeerError):
    """Ranks of one CAD group computed different plans for the same batch."""
