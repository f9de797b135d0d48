"""What moves a slot's bytes from a producer rank to a consumer rank. One module per fabric, all under the port in `base`."""

from pdserve.errors import ConfigError
from pdserve.kv.transports.base import Transport
from pdserve.kv.transports.shm import ShmTransport
from pdserve.kv.transports.tcp import TcpTransport

TRANSPORTS: dict[str, type[Transport]] = {"tcp": TcpTransport, "shm": ShmTransport}


def make_transport(name: str) -> Transport:
    """Return a transport by its configured name. Raises `ConfigError` for one that this build does not have."""
    if name not in TRANSPORTS:
        raise ConfigError("kv.transport", name, f"choose one of {', '.join(sorted(TRANSPORTS))}")
    return TRANSPORTS[name]()
