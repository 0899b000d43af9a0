"""A lost peer is called that wherever it is noticed."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch

from pipeplan.runtime.transport.base import PeerLostError, wait_all
from pipeplan.runtime.transport.gloo import GlooTransport
from pipeplan.runtime.transport.local_socket import SocketChannels


def _closed(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("[gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:22208. GLHF!")


class _Lost:
    send = recv = wait = staticmethod(_closed)


@pytest.mark.parametrize("verb", ["send", "receive"])
def test_loss_while_handing_over(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection found closed by a send or receive is a lost peer, without gloo's place."""
    transport = GlooTransport.__new__(GlooTransport)
    monkeypatch.setattr(transport, "_row", (0, 1), raising=False)
    monkeypatch.setattr(transport, "_group", _Lost(), raising=False)
    monkeypatch.setattr(transport, "_channels", SocketChannels(), raising=False)
    with pytest.raises(PeerLostError, match=r"^Connection closed by peer"):
        getattr(transport, verb)(torch.zeros(2), 1, 0)


def test_loss_while_waiting() -> None:
    """So is one found closed by a wait."""
    with pytest.raises(PeerLostError, match=r"^Connection closed by peer"):
        wait_all([_Lost()])
