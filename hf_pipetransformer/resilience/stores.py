"""A separate TCP store for each attempt of a job, through which its processes connect to each other.

`torchrun` and `accelerate launch` keep one store for all attempts of a job. When they restart the job, the processes
read the addresses of the previous attempt in that store, and never connect. Therefore rank 0 creates a new store in
each attempt, and only its address is exchanged through the launcher's store.

A store listens on the job's own address only, and whoever can connect to it can write to it. So what its processes
tell each other through it is signed (`SignedStore`).
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import time
import uuid
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ..errors import printable

ADDRESS = "hf_pipetransformer/store"
"""Key in the launcher's store under which rank 0 writes the address; it may still hold that of an earlier attempt."""
ATTEMPT = "attempt"
"""Key in the new store that identifies the attempt it belongs to."""
CONNECTED, ALL_CONNECTED = "connected", "all connected"
TRY = timedelta(seconds=5)

_kept: list[dist.TCPStore] = []  # a store exists as long as its object


def own_address(towards: str | None) -> str:
    """The address of this host on its route to `towards` (an address or a name), where other hosts can reach it."""
    towards = towards or "localhost"
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                own = str(probe.getsockname()[0])
                # a host's own name often resolves to its loopback; other hosts can still reach it by that name
                return towards if own.startswith("127.") or own == "::1" else own
    return socket.getfqdn()


def keep_store(timeout: timedelta, address: str = "localhost") -> dist.TCPStore:
    """Create a new store in this process, on a free port that the system chooses.

    It listens on all addresses only if the job has several hosts and `address` does not say which one they can reach.

    Args:
        timeout: bound on every request.
        address: the address or name of this host by which the other processes reach it.
    """
    listener = _listener(address)
    host, port = listener.getsockname()[:2]
    host = "localhost" if ipaddress.ip_address(host).is_unspecified else host
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def _listener(address: str) -> socket.socket:
    world_size = os.environ.get("WORLD_SIZE")
    has_one_host = world_size is not None and os.environ.get("LOCAL_WORLD_SIZE") == world_size
    with suppress(OSError):
        family, _, _, _, found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        # a name of this host may lead to its loopback here, and to an outer address on the other hosts
        if has_one_host or not ipaddress.ip_address(found[0]).is_loopback:
            return socket.create_server((str(found[0]), 0), family=family)
    if has_one_host:
        return socket.create_server(("127.0.0.1", 0))
    is_dual = socket.has_dualstack_ipv6()
    return socket.create_server(("", 0), family=socket.AF_INET6 if is_dual else socket.AF_INET, dualstack_ipv6=is_dual)


class SignedStore:
    """Texts in a store that only a process of this job can have written; others are ignored.

    Args:
        store: the store, through a connection that only one thread uses at a time.
        secret: known to the processes of the job only; it is never written to the store.
    """

    def __init__(self, store: dist.TCPStore, secret: bytes) -> None:
        self._store, self._secret = store, secret

    def write(self, key: str, text: str) -> None:
        self._store.set(key, self._signed(key, text))

    def read(self, key: str) -> str | None:
        """Return the text, or None if there is none of this job."""
        return self._verified(key, self._store.get(key)) if self._store.check([key]) else None

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        """Return the texts of keys that have all been written, in one request."""
        return [self._verified(*one) for one in zip(keys, self._store.multi_get(list(keys)), strict=True)]

    def write_once(self, key: str, text: str) -> str:
        """Write a text unless another process has written one before. Returns the one that is there afterwards."""
        agreed = self._verified(key, self._store.compare_set(key, "", self._signed(key, text)))
        if agreed is None:
            self.write(key, text)
        return text if agreed is None else agreed

    def count(self, key: str) -> int:
        """Count this process in, and return how many have been counted."""
        return self._store.add(key, 1)

    def counted(self, key: str) -> int:
        return self._store.add(key, 0)

    def _signed(self, key: str, text: str) -> str:
        return f"{self._signature(key, text)} {text}"

    def _verified(self, key: str, value: bytes) -> str | None:
        signature, _, text = value.decode(errors="replace").partition(" ")
        return printable(text) if hmac.compare_digest(signature, self._signature(key, text)) else None

    def _signature(self, key: str, text: str) -> str:
        return hmac.new(self._secret, f"{key} {text}".encode(), "sha256").hexdigest()


def use_fresh_store(environ: MutableMapping[str, str], timeout: timedelta) -> None:
    """Make the process group use a store of this attempt only; call `wait_for_connections` once the group exists.

    Collective over all processes of a launcher.

    It does nothing if a process group exists already, or if no launcher keeps a store.

    Args:
        environ: environment of the process; `MASTER_ADDR` and `MASTER_PORT` are changed.
        timeout: how long the other processes wait for rank 0.

    Raises:
        ValueError: the launcher has set port 0.
        TimeoutError: rank 0 could not be reached in time; torch raises its own store error if rank 0 never started.
    """
    if "RANK" in environ and environ.get("MASTER_PORT") == "0" and not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "MASTER_PORT=0 is not supported, because the processes could not find each other. Pass a free port to"
            " torchrun (--master_port 29501), or let it choose one (--standalone, or --rdzv-backend=c10d"
            " --rdzv-endpoint=localhost:0)."
        )
    is_launched = environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if not is_launched or int(environ.get("WORLD_SIZE", "1")) == 1 or not dist.is_available() or dist.is_initialized():
        return
    if _kept:  # this process has called this function before, and its process group has been destroyed
        return
    launchers = dist.TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    if environ["RANK"] == "0":
        address = own_address(environ["MASTER_ADDR"])
        store, attempt = keep_store(timeout, address), uuid.uuid4().hex
        store.set(ATTEMPT, attempt)
        launchers.set(ADDRESS, f"{address} {store.port} {attempt}")
        port = str(store.port)
    else:
        store, address, port = _find_store(launchers, time.monotonic() + timeout.total_seconds())
    _kept.append(store)
    environ["MASTER_ADDR"], environ["MASTER_PORT"] = address, port


def wait_for_connections(timeout: timedelta) -> None:
    """Make rank 0 wait, after the process group was created, until all other processes have created theirs.

    They read rank 0's store to do so. If a user's error ended rank 0 before, they would report a different error.
    """
    if not _kept or not dist.is_initialized():
        return
    (store,) = _kept
    if dist.get_rank() > 0 and store.add(CONNECTED, 1) == dist.get_world_size() - 1:
        store.set(ALL_CONNECTED, "1")
    elif dist.get_rank() == 0:
        store.wait([ALL_CONNECTED], timeout)


def _find_store(launchers: dist.TCPStore, deadline: float) -> tuple[dist.TCPStore, str, str]:
    """Find rank 0's store. An address that an earlier attempt left behind cannot be connected to."""
    while True:
        address, port, attempt = launchers.get(ADDRESS).decode().split()
        try:
            socket.create_connection((address, int(port)), timeout=1).close()  # a store retries longer, and logs it
            store = dist.TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=TRY)
            if store.check([ATTEMPT]) and store.get(ATTEMPT).decode() == attempt:
                return store, address, port
        except (OSError, RuntimeError):  # nothing listens there, or it is not a store
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"Rank 0's store was not found: the last address was {address}:{port}.")
        time.sleep(0.05)
