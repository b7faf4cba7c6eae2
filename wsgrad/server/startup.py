"""What is decided before a server runs: whether programs can be confined here, what to warn of; it starts nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from wsgrad.devices.confine import probe_driver_confinement, probe_node_confinement
from wsgrad.devices.sandbox import probe_compiler_confinement
from wsgrad.server.addresses import is_loopback

if TYPE_CHECKING:
    from wsgrad.server.config import Config

BROWSERS_REFUSE: Final = frozenset(
    {2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080}
)
"""The Fetch standard's bad ports above 1024."""


def settle(config: Config) -> tuple[Config, list[str]]:
    """Judge by trying what this system can confine; takes some milliseconds and forks.

    Returns:
        The settings to run with, and warnings for whoever runs the server. Where programs can't be confined, a server
        on loopback runs them all the same, since only this machine's users reach it; on any other, and to a hub, it
        offers no cpu.
    """
    warnings = []
    if not config.join and not is_loopback(config.host) and not config.tls:
        warnings.append(
            f"{config.host} can be reached from other machines, and without --tls tokens and data cross the "
            "network in the clear; use --tls, a reverse proxy or a tunnel"
        )
    if not config.join and config.port in BROWSERS_REFUSE:
        warnings.append(f"browsers connect to no port {config.port}: tabs can't join; choose another with --port")
    config, more = _settle_wrapped(config)
    warnings += more
    driven = [kind for kind in config.devices if kind != "cpu"]
    if driven and (missing := probe_driver_confinement()):
        lacks = "; ".join(missing)
        warnings.append(f"{', '.join(driven)}: its processes can't be confined fully: this system lacks {lacks}")
    if "cpu" not in config.devices:
        return config, warnings
    if config.unconfined:
        warnings.append(
            "--unconfined: programs of clients are confined only as far as this system can, perhaps not at all"
        )
        return config, warnings
    unmet = {f"node processes: {what}" for what in probe_node_confinement()}
    unmet |= {f"the compiler: {what}" for what in probe_compiler_confinement()}
    if not unmet:
        return config, warnings
    lacks = "; ".join(sorted(unmet))
    if is_loopback(config.host) and not config.join:
        warnings.append(f"programs of clients can't be confined fully: this system lacks for {lacks}")
        return replace(config, unconfined=True), warnings
    warnings.append(
        f"cpu is not offered, because programs can't be confined: this system lacks for {lacks}; "
        "--unconfined offers it all the same"
    )
    return replace(config, devices=tuple(kind for kind in config.devices if kind != "cpu")), warnings


def _settle_wrapped(config: Config) -> tuple[Config, list[str]]:
    """The same for devices of tinygrad's, which nothing seals: compilers are programs, and some run machine code."""
    wrapped = [kind for kind in config.devices if kind.startswith("tinygrad:")]
    if not wrapped:
        return config, []
    named = ", ".join(wrapped)
    if config.unconfined or (is_loopback(config.host) and not config.join):
        return config, [f"{named}: programs of clients are confined only by what files they can reach"]
    warning = (
        f"{named}: not offered, because programs can't be confined in processes of tinygrad's; "
        "--unconfined offers them all the same"
    )
    return replace(config, devices=tuple(kind for kind in config.devices if kind not in wrapped)), [warning]
