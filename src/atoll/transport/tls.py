"""TLS 1.3 for a syncer and for those who dial it. docs/security.md says what that promises, and what not.

The files are those of `atoll keys`, or anybody's PEM files. They are looked at again while a run goes on: a key that
was renewed is used for the next connection, and nobody is stopped for it.
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
"""The name of the syncer's key, and of its directory beside those of the islands."""

NO_CHECK_TIME = 0x200000
"""Of OpenSSL, which has no name for it in Python. An expired key is refused by name, one step later (`Peer.find_problem`):
OpenSSL would end the handshake, and neither side would know whose key it was."""

_END = "-----END CERTIFICATE-----"

FileStamps = tuple[tuple[int, int, int] | None, ...]


class KeyFiles(NamedTuple):
    """`authority`: whoever has a key that it signed may speak; None: keys are not asked for."""

    certificate: Path
    key: Path
    authority: Path | None = None
    revoked: Path | None = None


def stamp_files(paths: tuple[Path | None, ...]) -> FileStamps:
    """Other than before when one of these files is another one, or is there or gone."""
    return tuple(_stamp_file(path) if path is not None else None for path in paths)


def _stamp_file(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def find_key_files(directory: Path, for_syncer: bool = False) -> KeyFiles:
    """The files of one key. For a syncer the directory of the authority will do: its key is in there."""
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
"""Told of the last word of a handshake that fails. asyncio closes such a connection without sending the alert that says
why; whoever has this can."""


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
    """What a syncer shows to those who dial it, and whom it trusts. `reload_if_changed` takes up files that have changed."""

    def __init__(self, files: KeyFiles) -> None:
        self.files = files
        self._stamp = stamp_files(files)
        self._refused: FileStamps = ()  # of files that could not be used
        self._reload_at = float("inf")  # when an authority expires
        self.revoked: frozenset[str] = frozenset()
        self.context = self._load()

    @property
    def requires_client_keys(self) -> bool:
        return self.files.authority is not None

    def reload_if_changed(self) -> str | None:
        """What has happened to the files since the last look; None: nothing. What cannot be used is not."""
        stamp = stamp_files(self.files)
        if stamp == self._stamp and time.time() < self._reload_at:
            return None
        try:
            self.context = self._load()
        except (OSError, ValueError) as wrong:
            if stamp == self._refused:
                return None
            self._refused = stamp
            return f"the keys have changed and cannot be used, those before stay in use: {wrong}"
        self._stamp, self._refused = stamp, ()
        return f"the keys have changed: new connections use them; {len(self.revoked)} keys are revoked"

    def _load(self) -> ssl.SSLContext:
        context = _AlertingSslContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # a session that is resumed would not show its key again
        context.set_alpn_protocols(["http/1.1"])
        _load_chain(context, self.files.certificate, self.files.key)
        revoked = read_revoked(self.files.revoked)
        if self.files.authority is not None:
            authorities = list(_read_valid_authorities(self.files.authority))
            context.load_verify_locations(cadata="\n".join(pem for pem, _ in authorities))
            self._reload_at = min(until for _, until in authorities)
            # Who shows none is refused with a sentence instead of a broken handshake.
            context.verify_mode = ssl.CERT_OPTIONAL
            context.verify_flags = ssl.VerifyFlags(context.verify_flags | NO_CHECK_TIME)
        self.revoked = revoked
        return context


def _load_chain(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    def no_password() -> str:
        raise ValueError(f"{key} is protected by a password, which nobody is there to give: store it without")

    try:
        context.load_cert_chain(certificate, key, no_password)
    except ssl.SSLError as wrong:
        raise ValueError(f"{certificate} and {key} are no certificate and its key: {wrong.reason or wrong}") from None


def _read_valid_authorities(path: Path) -> Iterator[tuple[str, float]]:
    """The authorities in a file, and until when; expired ones are left out."""
    some = False
    for piece in path.read_text(encoding="ascii", errors="replace").split(_END)[:-1]:
        pem = piece[piece.find("-----BEGIN") :] + _END
        probe = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            probe.load_verify_locations(cadata=pem)
            until = ssl.cert_time_to_seconds(str(probe.get_ca_certs()[0]["notAfter"]))
        except (ssl.SSLError, IndexError, KeyError, ValueError):
            raise ValueError(f"{path} holds something that is no certificate of an authority") from None
        if until > time.time():
            some = True
            yield pem, until
    if not some:
        raise ValueError(f"{path} names no authority that has not expired: renew it with atoll keys renew")


def read_revoked(path: Path | None) -> frozenset[str]:
    """Fingerprints: the first word of each line."""
    if path is None or not path.exists():
        return frozenset()
    return frozenset(line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


# --------------------------------------------------------------------------------------------------------------------
# The side of whoever dials


class ClientTls(NamedTuple):
    """How to know a syncer, and what to show it. Nothing given: by the authorities that this system trusts.

    `pinned`: this one certificate is the syncer's, whatever it is called; for commands on its own machine.
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
        """Made anew from the files as they are now; ValueError and OSError say what is wrong with them."""
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
# In words

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
"""By the code of OpenSSL."""

_PLAIN_TEXT_ANSWER = "what answers speaks plain text, not TLS: its syncer has no keys, or this is another port"
_TLS_PROBLEMS = {
    "WRONG_VERSION_NUMBER": _PLAIN_TEXT_ANSWER,
    "PACKET_LENGTH_TOO_LONG": _PLAIN_TEXT_ANSWER,
    "HTTP_REQUEST": "plain text came where TLS was due",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust the authority of this key",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it says that this key has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "it says that this key is revoked",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it does not accept this key",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it does not accept a key of this kind",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it does not accept this key",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a key, and none was given: give --keys",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it does not speak TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "it does not speak TLS 1.3",
}


def find_tls_problem(wrong: BaseException | None) -> str | None:
    """What is wrong with somebody's keys, of whoever was dialled; None where it is something else."""
    seen = 0
    while wrong is not None and seen < 8:
        inner = getattr(wrong, "certificate_error", None) or getattr(wrong, "reason", None)
        if isinstance(inner, ssl.SSLError):
            wrong = inner
        if isinstance(wrong, ssl.SSLCertVerificationError):
            return _VERIFY_PROBLEMS.get(wrong.verify_code, f"its certificate is refused: {wrong.verify_message}")
        said = getattr(wrong, "reason", None) if isinstance(wrong, ssl.SSLError) else None
        text = said if isinstance(said, str) else str(wrong)
        for reason, sentence in _TLS_PROBLEMS.items():
            if reason in text:
                return sentence
        wrong, seen = getattr(wrong, "os_error", None) or wrong.__cause__ or wrong.__context__, seen + 1
    return None
