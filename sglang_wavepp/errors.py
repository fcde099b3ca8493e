"""Errors of WavePP. Every text names what happened, where (stage, wave, request) and why."""

from __future__ import annotations


class WavePPError(Exception):
    """Base of all errors that WavePP raises on purpose."""


class ConfigError(WavePPError):
    """The server was started with options that WavePP does not support."""


class HandshakeError(WavePPError):
    """The stages do not run the same thing, or one of them did not answer in time."""


class DivergenceError(WavePPError):
    """A stage holds something else than the decision log says. Serving on would give wrong answers."""


class ProtocolError(WavePPError):
    """A peer broke the rounds protocol, or a round did not end within its bound."""


class LeaseError(WavePPError):
    """A lease was used twice, by somebody else, or after its epoch."""


class LedgerError(WavePPError):
    """Escrow was consumed beyond its grant, or granted twice."""
