"""TLS 1.3 for syncers and their clients. docs/security.md describes what it protects, and what it does not.

The files are those of `atoll keys`, or any PEM files. They are polled while a run is in progress: the next connection
uses a renewed key, and no process needs a restart.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

CERTIFICATE_FILE, KEY_FILE, AUTHORITY_FILE, REVOKED_FILE = "certificate.pem", "key.pem", "authority.pem", "revoked.txt"
"""The files in the directory of one key. The last is there for syncers only."""

SYNCER_KEY_NAME = "syncer"
"""Name of the syncer's key, and of its directory next to those of the islands."""

NO_CHECK_TIME = 0x200000
"""Flag of OpenSSL without a name in Python. `Peer.find_problem` refuses an expired key later, by name. OpenSSL would
end the handshake, and neither side would know which key it was."""

_END = "-----END CERTIFICATE-----"

FileStamps = tuple[tuple[int, int, int] | None, ...]


class KeyFiles(NamedTuple):
    """Files of one key. Without `authority`, clients need no keys. Otherwise it must have signed them."""

    certificate: Path
    key: Path
    authority: Path | None = None
    revoked: Path | None = None


def stamp_files(paths: tuple[Path | None, ...]) -> FileStamps:
    """Return a value that changes when one of these files is replaced, created or deleted."""
    return tuple(_stamp_file(path) if path is not None else None for path in paths)


def _stamp_file(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def find_key_files(directory: Path, for_syncer: bool = False) -> KeyFiles:
    """Find the files of one key. A syncer may also use the directory of the authority, which has its key."""
    if (
        for_syncer
        and not (directory / CERTIFICATE_FILE).exists()
        and (directory / SYNCER_KEY_NAME / CERTIFICATE_FILE).exists()
    ):
        directory = directory / SYNCER_KEY_NAME
    files = KeyFiles(
        directory / CERTIFICATE_FILE,
        directory / KEY_FILE,
        directory / AUTHORITY_FILE,
        directory / REVOKED_FILE if for_syncer else None,
    )
    for path in files[:3]:
        if path is None or path.exists():
            continue
        if (directory / SYNCER_KEY_NAME / CERTIFICATE_FILE).exists():
            others = sorted(found.parent.name for found in directory.glob(f"*/{CERTIFICATE_FILE}"))
            which = (
                ", ".join(str(directory / name) for name in others if name != SYNCER_KEY_NAME) or "none is there yet"
            )
            raise ValueError(
                f"{directory} is an authority with the keys of all: give the directory of one island's key ({which})"
            )
        made = "atoll keys init DIR" if for_syncer else "atoll keys add DIR NAME"
        raise ValueError(f"{directory} holds no key: there is no {path.name}; make one with {made}")
    return files


# --------------------------------------------------------------------------------------------------------------------
# The syncer's side

TLS_ALERT_HANDLER: ContextVar[Callable[[bytes], None] | None] = ContextVar("TLS_ALERT_HANDLER", default=None)
"""Receiver of the alert of a failed handshake. asyncio closes such a connection without sending the alert, which tells
the client why. The receiver can send it."""


class _AlertingSslObject(ssl.SSLObject):
    unsent: Callable[[], bytes]
    on_alert: Callable[[bytes], None] | None = None

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:
            if self.on_alert is not None:
                self.on_alert(self.unsent())
            raise


class _AlertingSslContext(ssl.SSLContext):
    sslobject_class = _AlertingSslObject

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        assert isinstance(made, _AlertingSslObject)
        made.unsent, made.on_alert = outgoing.read, TLS_ALERT_HANDLER.get()
        return made


class ServerTls:
    """Certificate and trusted authorities of a syncer. `reload_if_changed` loads changed files."""

    def __init__(self, files: KeyFiles) -> None:
        self.files = files
        self._stamp = stamp_files(files)
        self._refused: FileStamps = ()  # stamps of files that could not be loaded
        self._reload_at = float("inf")  # time at which the first authority expires
        self.revoked: frozenset[str] = frozenset()
        self.context = self._load()

    @property
    def requires_client_keys(self) -> bool:
        return self.files.authority is not None

    def reload_if_changed(self) -> str | None:
        """Load changed files, and describe the change for the log. None: no change. Unusable files are ignored."""
        stamp = stamp_files(self.files)
        if stamp == self._stamp and time.time() < self._reload_at:
            return None
        try:
            self.context = self._load()
        except (OSError, ValueError) as error:
            if stamp == self._refused:
                return None
            self._refused = stamp
            return f"the keys have changed and cannot be used, the previous ones stay in use: {error}"
        self._stamp, self._refused = stamp, ()
        return f"the keys have changed: new connections use them; {len(self.revoked)} keys are revoked"

    def _load(self) -> ssl.SSLContext:
        context = _AlertingSslContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # no session resumption: a resumed session would not verify the client's key again
        context.set_alpn_protocols(["http/1.1"])
        _load_chain(context, self.files.certificate, self.files.key)
        revoked = read_revoked(self.files.revoked)
        if self.files.authority is not None:
            authorities = list(_read_valid_authorities(self.files.authority))
            context.load_verify_locations(cadata="\n".join(pem for pem, _ in authorities))
            self._reload_at = min(until for _, until in authorities)
            # Optional, so that a client without a key gets a refusal message and not a failed handshake.
            context.verify_mode = ssl.CERT_OPTIONAL
            context.verify_flags = ssl.VerifyFlags(context.verify_flags | NO_CHECK_TIME)
        self.revoked = revoked
        return context


def _load_chain(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    def no_password() -> str:
        raise ValueError(f"{key} is protected by a password: store it without one, so that Atoll can read it")

    try:
        context.load_cert_chain(certificate, key, no_password)
    except ssl.SSLError as error:
        raise ValueError(f"{certificate} and {key} are no certificate and its key: {error.reason or error}") from None


def _read_valid_authorities(path: Path) -> Iterator[tuple[str, float]]:
    """Yield the authorities in a file with their expiry times, without expired ones."""
    some = False
    for piece in path.read_text(encoding="ascii", errors="replace").split(_END)[:-1]:
        pem = piece[piece.find("-----BEGIN") :] + _END
        probe = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            probe.load_verify_locations(cadata=pem)
            until = ssl.cert_time_to_seconds(str(probe.get_ca_certs()[0]["notAfter"]))
        except (ssl.SSLError, IndexError, KeyError, ValueError):
            raise ValueError(f"{path} contains something other than authority certificates") from None
        if until > time.time():
            some = True
            yield pem, until
    if not some:
        raise ValueError(f"{path} names no authority that has not expired: renew it with atoll keys renew")


def read_revoked(path: Path | None) -> frozenset[str]:
    """Read the fingerprints of revoked keys: the first word of each line."""
    if path is None or not path.exists():
        return frozenset()
    return frozenset(line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


# --------------------------------------------------------------------------------------------------------------------
# Clients


class ClientTls(NamedTuple):
    """Settings of a client: how it verifies a syncer, and its own key. Without fields: the system's authorities.

    `pinned`: accept exactly this certificate under any name, for commands on the syncer's machine.
    """

    keys: Path | None = None
    ca: Path | None = None
    pinned: KeyFiles | None = None

    def stamp(self) -> FileStamps:
        own = (
            (self.keys / CERTIFICATE_FILE, self.keys / KEY_FILE, self.keys / AUTHORITY_FILE)
            if self.keys is not None
            else ()
        )
        return stamp_files((*own, self.ca))

    def make_context(self) -> ssl.SSLContext:
        """Build a context from the current files. Raise ValueError or OSError if they are unusable."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["http/1.1"])
        if self.pinned is not None:
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            _load_authorities(context, self.pinned.certificate)
            _load_chain(context, self.pinned.certificate, self.pinned.key)
            return context
        files = find_key_files(self.keys) if self.keys is not None else None
        if self.ca is not None:
            _load_authorities(context, self.ca)
        elif files is not None and files.authority is not None:
            _load_authorities(context, files.authority)
        else:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        if files is not None:
            _load_chain(context, files.certificate, files.key)
        return context


def _load_authorities(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise ValueError(f"{path} holds no certificates in PEM") from None
    except FileNotFoundError:
        raise ValueError(f"there is no {path} with the certificate of an authority") from None


# --------------------------------------------------------------------------------------------------------------------
# Error messages

_UNTRUSTED_AUTHORITY = (
    "its certificate is of an authority that is not trusted here (wrong --keys or --ca, or another machine)"
)
_ADDRESS_NOT_NAMED = "its certificate does not name this address: dial it as it is called, or renew its key with --host"
_VERIFY_PROBLEMS = {
    9: "its certificate is not valid yet: is a clock wrong?",
    10: "its certificate has expired: renew it with atoll keys renew",
    18: _UNTRUSTED_AUTHORITY,
    19: _UNTRUSTED_AUTHORITY,
    20: _UNTRUSTED_AUTHORITY,
    21: _UNTRUSTED_AUTHORITY,
    26: "its certificate is not one of a syncer",
    62: _ADDRESS_NOT_NAMED,
    64: _ADDRESS_NOT_NAMED,
}
"""By error code of OpenSSL."""

_PLAIN_TEXT_ANSWER = (
    "the server answers in plain text, not TLS: the syncer has no keys, or this is the port of another service"
)
_TLS_PROBLEMS = {
    "WRONG_VERSION_NUMBER": _PLAIN_TEXT_ANSWER,
    "PACKET_LENGTH_TOO_LONG": _PLAIN_TEXT_ANSWER,
    "HTTP_REQUEST": "received plain text, expected TLS",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust the authority of this key",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it rejects this key as expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "it rejects this key as revoked",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it does not accept this key",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it does not accept a key of this kind",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it does not accept this key",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it requires a key, and this process has none: give --keys",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it does not support TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "it does not support TLS 1.3",
}


def find_tls_problem(error: BaseException | None) -> str | None:
    """Describe the TLS problem that caused a connection error. Return None if the error has another cause."""
    seen = 0
    while error is not None and seen < 8:
        inner = getattr(error, "certificate_error", None) or getattr(error, "reason", None)
        if isinstance(inner, ssl.SSLError):
            error = inner
        if isinstance(error, ssl.SSLCertVerificationError):
            return _VERIFY_PROBLEMS.get(error.verify_code, f"its certificate is refused: {error.verify_message}")
        reason_field = getattr(error, "reason", None) if isinstance(error, ssl.SSLError) else None
        text = reason_field if isinstance(reason_field, str) else str(error)
        for reason, sentence in _TLS_PROBLEMS.items():
            if reason in text:
                return sentence
        error, seen = getattr(error, "os_error", None) or error.__cause__ or error.__context__, seen + 1
    return None
