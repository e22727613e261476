"""Serve's own sockets on this machine's loopback."""

from __future__ import annotations

import ipaddress
from typing import Any

import ray


def keep_to_loopback() -> None:
    """Have Serve's replica in this process listen where its node does, if that is the loopback.

    Its socket for calls by gRPC is on every interface otherwise, which Serve has no setting for.
    For a replica's constructor: Serve opens the socket after it.
    """
    node_ip = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(node_ip).is_loopback:
        return
    from ray.serve._private import replica

    module: Any = replica
    add_port = module.add_port_to_grpc_server

    def add_loopback_port(server: object, address: str) -> int:
        port: int = add_port(server, address.replace("[::]", node_ip))
        return port

    module.add_port_to_grpc_server = add_loopback_port
