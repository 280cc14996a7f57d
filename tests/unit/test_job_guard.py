"""A rank's side of the talk with the launcher of `mpiplus run`."""

from __future__ import annotations

import socket

import pytest

from torchmpi_plugin.host.launchers import Identity
from torchmpi_plugin.jobs import guard
from torchmpi_plugin.jobs.channel import Channel


def test_an_order_that_comes_together_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """One read may bring both; a signal must not be lost in it."""
    server = socket.create_server(("127.0.0.1", 0))
    supervisors = socket.create_connection(server.getsockname())
    launcher = Channel(server.accept()[0])
    launcher.say(command=["true"])
    launcher.say(signal=15)
    monkeypatch.setattr(guard, "who_am_i", lambda environment: Identity(0, 1))
    monkeypatch.setattr(guard, "_connect", lambda addresses, port, secret: Channel(supervisors))
    channel, job, early = guard._greet({"addresses": [], "port": 0, "secret": ""})
    assert job == {"command": ["true"], "attachment": None}
    orders = [frame.message for frame in early]
    while not orders:
        orders = [frame.message for frame in channel.receive()]
    assert orders == [{"signal": 15}]
    for connection in (launcher, channel, server):
        connection.close()
