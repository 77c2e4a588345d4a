"""Other plans for core attention that a CUDA graph has captured (docs/performance.md). Training does not use it."""

from torchtitan_cad.runtime.engine import CoreAttentionEngine


def copy_plan(engine: CoreAttentionEngine, source: int, target: int) -> None:
    """Make the plan under ``target`` the one under ``source``, in place and on the current stream.

    A CUDA graph that has captured core attention by the plan ``target`` executes what is copied there. Capture it after
    a run outside, which compiles kernels, while no plan is added; keep ``target`` as long as the
    graph; replay it while no other exchange is in flight. CPU kernels do not follow; they read offsets on the host.

    Raises:
        ValueError: the engine has no ``sizes`` or a transport that is not ``replayable``; or the plans have other
            numbers of tokens.
        RuntimeError: a key is unknown.
        PeerError: an exchange has failed on the device since.
    """
    transport = engine.transport
    if engine.sizes is None or not (transport is None or transport.replayable):
        raise ValueError("copying plans takes an engine with sizes, and a transport that is replayable if rows move")
    mine, theirs = engine.plan(target), engine.plan(source)
    if transport is not None:
        transport.prepare([*mine.exchanges, *theirs.exchanges])
    mine.copy_(theirs)
