# SPDX-License-Identifier: BSD-3-Clause
"""Errors of the runtime."""

import re

# torch appends C++ stacks and advice to the messages of failed communication.
_NOT_THE_REASON = re.compile(
    r"\nException raised from|\nC\+\+ CapturedTraceback|\nLast error:|[.,] ?GLHF|\. This may "
)
# Gloo's messages begin with a line of its source.
_SOURCE = re.compile(r"^\[\S+:\d+\] ")
# The stack in an error of a data-loading worker, up to its last line, the error itself.
_STACK_OF_WORKER = re.compile(r"\nOriginal Traceback .*\n(?=\S)", re.DOTALL)


class PeerError(RuntimeError):
    """A peer has ended, does not answer, or disagrees; the message names the peer and the phase."""


class PlanMismatchError(PeerError):
    """Ranks of one CAD group computed different plans for the same batch."""


def first_sentence(error: BaseException) -> str:
    """Return the error's message on one line, without the stacks and advice that torch appends."""
    text = _STACK_OF_WORKER.sub(" ", _SOURCE.sub("", str(error)))
    return " ".join(_NOT_THE_REASON.split(text)[0].split())
