"""What tests of several folders need."""

import socket

import pytest


@pytest.fixture
def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
