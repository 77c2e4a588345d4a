"""How a session of training starts."""

import pytest

from torchtitan_cad.integration.cpu import enable_cpu

enable_cpu()

from torchtitan_cad.integration import session  # noqa: E402


def test_the_planner_is_compiled_before_ranks_watch_each_other(monkeypatch):
    """A rank that compiles for minutes on a busy machine must not look stalled to its neighbours."""
    order: list[str] = []

    def begin_session(*_: object) -> None:
        order.append("session, with its monitor")
        raise RuntimeError("far enough")

    monkeypatch.setattr(session, "warm_up", lambda report: order.append(f"planner, reported to {report.__self__.name}"))
    monkeypatch.setattr(session, "CadSession", begin_session)
    with pytest.raises(RuntimeError, match="far enough"):
        session.open_session(None, None, None)
    assert order == [f"planner, reported to {session.logger.name}", "session, with its monitor"]
