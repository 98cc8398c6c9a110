"""A small private certificate authority and its keys, for `atoll keys`. docs/security.md describes their use.

    keys/authority.pem    certificates of the authorities that are trusted, the newest first
    keys/authority.key    signs new keys. Keep it away from the islands
    keys/issued.json      who has a key, until when, and which are revoked
    keys/NAME/            one key: certificate.pem, key.pem, authority.pem. This directory goes to the island
    keys/syncer/          the syncer's; revoked.txt next to them

Only this module needs the `cryptography` package. Using keys needs only Python's ssl module.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.files import write_file
from atoll.transport.auth import ANY_LEARNER, LEARNER_URI_PREFIX, OPERATOR_URI, SYNCER_URI
from atoll.transport.tls import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, REVOKED_FILE, SYNCER_KEY_NAME

AUTHORITY_KEY_FILE = "authority.key"
ISSUED_FILE = "issued.json"
AUTHORITY_DAYS = 3650
DEFAULT_DAYS = 365
BACKDATE = timedelta(minutes=5)
"""A key is valid from a little before its creation, because clocks differ."""

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
MAX_LEARNER_ID = 1_000_000
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_OLD_AUTHORITIES = "authorities before the newest"


class KeyHolder(NamedTuple):
    """The roles of a key."""

    learners: tuple[int, ...] = ()
    is_any_learner: bool = False
    is_operator: bool = False
    hosts: tuple[str, ...] = ()  # names and addresses of the syncer that clients use

    def __str__(self) -> str:
        if self.hosts:
            return f"the syncer, at {', '.join(self.hosts)}"
        roles = [f"learner {number}" for number in self.learners]
        roles += ["any learner"] if self.is_any_learner else []
        roles += ["operator"] if self.is_operator else []
        return ", ".join(roles) or "none"


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """Issued certificate. A renewed name has several."""

    name: str
    holder: KeyHolder
    fingerprint: str
    since: str
    until: str
    revoked: str = ""  # date of the revocation

    def state(self, now: datetime) -> str:
        if self.revoked:
            return "revoked"
        return "expired" if datetime.fromisoformat(self.until) < now else "good"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            **self.holder._asdict(),
            "fingerprint": self.fingerprint,
            "since": self.since,
            "until": self.until,
            "revoked": self.revoked,
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> IssuedKey:
        holder = KeyHolder(tuple(raw["learners"]), raw["is_any_learner"], raw["is_operator"], tuple(raw["hosts"]))
        return cls(raw["name"], holder, raw["fingerprint"], raw["since"], raw["until"], raw["revoked"])


class Authority:
    """The directory of an authority. Every change is durable when its method returns."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            raw = json.loads((directory / ISSUED_FILE).read_text(encoding="utf-8"))
            self.issued = [IssuedKey.from_json(each) for each in raw["issued"]]
        except FileNotFoundError:
            raise ValueError(f"{directory} holds no authority: make one with atoll keys init {directory}") from None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{directory / ISSUED_FILE} is damaged: restore it from a backup") from None

    @classmethod
    def init(cls, directory: Path, hosts: Sequence[str] = (), days: int = DEFAULT_DAYS) -> Authority:
        """Create an authority, and the key of its syncer."""
        if directory.exists() and any(directory.iterdir()):
            raise ValueError(f"{directory} is not empty, and keys are never overwritten: use another directory")
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        key, certificate = _new_authority()
        write_key_file(directory / AUTHORITY_KEY_FILE, _key_pem(key), is_secret=True)
        write_key_file(directory / AUTHORITY_FILE, _pem(certificate))
        write_key_file(directory / ISSUED_FILE, b'{"issued": []}\n')
        made = cls(directory)
        made.issue(SYNCER_KEY_NAME, KeyHolder(hosts=_check_hosts(hosts)), days)
        made.write_revoked()
        return made

    # ----------------------------------------------------------------------------------------------------- changes

    def add(
        self,
        name: str,
        learners: Sequence[int] = (),
        is_any_learner: bool = False,
        is_operator: bool = False,
        days: int = DEFAULT_DAYS,
    ) -> IssuedKey:
        """Create a key for a learner or an operator. By default it is for the next learner without a key."""
        if not _NAME.fullmatch(name) or name in (SYNCER_KEY_NAME, "authority"):
            raise ValueError(f"{name!r} is not a valid key name: small letters, digits, and . _ - between them")
        if (self.directory / name).exists() or any(each.name == name for each in self._valid_keys()):
            raise ValueError(f"{name} has a key, and keys are never overwritten: atoll keys renew makes a new one")
        taken = {number: each.name for each in self._valid_keys() for number in each.holder.learners}
        for number in learners:
            if not 1 <= number <= MAX_LEARNER_ID:
                raise ValueError(f"learners are numbered from 1, got {number}")
            if number in taken:
                raise ValueError(f"learner {number} is named by the key of {taken[number]}: revoke that one first")
        if not learners and not is_any_learner and not is_operator:
            learners = (next(number for number in range(1, MAX_LEARNER_ID) if number not in taken),)
        return self.issue(name, KeyHolder(tuple(sorted(set(learners))), is_any_learner, is_operator), days)

    def renew(self, name: str, hosts: Sequence[str] = (), days: int = DEFAULT_DAYS) -> IssuedKey:
        """Create a new key for the same holder. The previous one is valid until it expires or is revoked."""
        before = self.find_key(name)
        if hosts and name != SYNCER_KEY_NAME:
            raise ValueError("--host is how the syncer is dialled: it is for the syncer's key only")
        if before.revoked:
            raise ValueError(f"the key of {name} is revoked: add another one under another name")
        holder = before.holder._replace(hosts=_check_hosts(hosts)) if hosts else before.holder
        return self.issue(name, holder, days)

    def renew_authority(self) -> str:
        """Add a new authority and return its fingerprint. The old ones are trusted until `retire_old_authorities`."""
        key, certificate = _new_authority()
        bundle = _pem(certificate) + (self.directory / AUTHORITY_FILE).read_bytes()
        write_key_file(
            self.directory / AUTHORITY_FILE, bundle, overwrite=True
        )  # trusted before anything is signed with it
        self._write_authorities()
        write_key_file(self.directory / AUTHORITY_KEY_FILE, _key_pem(key), is_secret=True, overwrite=True)
        return _fingerprint(certificate)

    def retire_old_authorities(self) -> int:
        """Trust only the newest authority, and return how many were removed. Fail if a key in use would be refused."""
        newest, _ = self._load_signing_key()
        old = [each for each in self.authorities() if each != newest]
        stranded = sorted(
            {
                each.name
                for each in self._newest_keys()
                if each.state(_now()) == "good" and not self._is_signed_by(newest, each)
            }
        )
        if stranded:
            raise ValueError(
                f"the keys of {', '.join(stranded)} are of {_OLD_AUTHORITIES}: renew them first (atoll keys renew)"
            )
        write_key_file(self.directory / AUTHORITY_FILE, _pem(newest), overwrite=True)
        self._write_authorities()
        return len(old)

    def revoke(self, name: str) -> list[IssuedKey]:
        """Revoke all keys of this name. The syncer refuses them as soon as it reads its new revoked.txt."""
        if name == SYNCER_KEY_NAME:
            raise ValueError(
                "the syncer's own key is not revoked, as learners have no list: renew it, and to make a stolen one"
                " worthless renew the authority (docs/security.md)"
            )
        self.find_key(name)
        when = _now().isoformat(timespec="seconds")
        self.issued = [
            replace(each, revoked=when) if each.name == name and not each.revoked else each for each in self.issued
        ]
        self._write_issued()
        self.write_revoked()
        return [each for each in self.issued if each.name == name]

    # ------------------------------------------------------------------------------------------------------ queries

    def find_key(self, name: str) -> IssuedKey:
        """Return the newest key of this name."""
        found = [each for each in self.issued if each.name == name]
        if not found:
            known = ", ".join(dict.fromkeys(each.name for each in self.issued))
            raise ValueError(f"{self.directory} has no key of {name}; there are: {known}")
        return found[-1]

    def authorities(self) -> list[x509.Certificate]:
        return x509.load_pem_x509_certificates((self.directory / AUTHORITY_FILE).read_bytes())

    def _valid_keys(self) -> Iterator[IssuedKey]:
        now = _now()
        return (each for each in self._newest_keys() if each.state(now) == "good")

    def _newest_keys(self) -> Iterable[IssuedKey]:
        return {each.name: each for each in self.issued}.values()

    def _is_signed_by(self, authority: x509.Certificate, issued: IssuedKey) -> bool:
        try:
            own = x509.load_pem_x509_certificate((self.directory / issued.name / CERTIFICATE_FILE).read_bytes())
            own.verify_directly_issued_by(authority)
        except (OSError, ValueError, TypeError, InvalidSignature):
            return False
        return True

    # ------------------------------------------------------------------------------------------------------ writing

    def issue(self, name: str, holder: KeyHolder, days: int) -> IssuedKey:
        if not 1 <= days <= AUTHORITY_DAYS:
            raise ValueError(f"a key is good for 1 to {AUTHORITY_DAYS} days, got {days}")
        authority, signing = self._load_signing_key()
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign(name, holder, key, signing, authority, timedelta(days=days))
        folder = self.directory / name
        folder.mkdir(mode=0o700, exist_ok=True)
        overwrite = (folder / CERTIFICATE_FILE).exists()
        issued = IssuedKey(
            name,
            holder,
            _fingerprint(certificate),
            certificate.not_valid_before_utc.isoformat(),
            certificate.not_valid_after_utc.isoformat(),
        )
        self.issued.append(issued)
        self._write_issued()  # first: a key that is not in the list could not be revoked
        write_key_file(folder / AUTHORITY_FILE, (self.directory / AUTHORITY_FILE).read_bytes(), overwrite=overwrite)
        write_key_file(folder / KEY_FILE, _key_pem(key), is_secret=True, overwrite=overwrite)
        write_key_file(folder / CERTIFICATE_FILE, _pem(certificate), overwrite=overwrite)
        return issued

    def _load_signing_key(self) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        """Return the authority that signs: the one whose key is here, also after an interrupted renewal."""
        path = self.directory / AUTHORITY_KEY_FILE
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except FileNotFoundError:
            raise ValueError(f"{path} is missing, and nothing can be signed without it: restore it") from None
        for each in self.authorities():
            if isinstance(key, ec.EllipticCurvePrivateKey) and each.public_key() == key.public_key():
                return each, key
        raise ValueError(f"{path} is not the key of an authority in {self.directory / AUTHORITY_FILE}")

    def _write_issued(self) -> None:
        text = json.dumps({"issued": [each.to_json() for each in self.issued]}, indent=1)
        write_key_file(self.directory / ISSUED_FILE, text.encode() + b"\n", overwrite=True)

    def _write_authorities(self) -> None:
        bundle = (self.directory / AUTHORITY_FILE).read_bytes()
        for name in {each.name for each in self.issued}:
            if (self.directory / name).is_dir():
                write_key_file(self.directory / name / AUTHORITY_FILE, bundle, overwrite=True)

    def write_revoked(self) -> None:
        lines = [f"{each.fingerprint} {each.name} {each.revoked}\n" for each in self.issued if each.revoked]
        if (self.directory / SYNCER_KEY_NAME).is_dir():
            write_key_file(self.directory / SYNCER_KEY_NAME / REVOKED_FILE, "".join(lines).encode(), overwrite=True)


def _check_hosts(given: Sequence[str]) -> tuple[str, ...]:
    """Return the names and addresses of the syncer, by default the name of this machine."""
    hosts = [each.removeprefix("[").removesuffix("]") for each in given] or [socket.gethostname()]
    for each in hosts:
        if not re.fullmatch(r"[A-Za-z0-9.:_-]+|\*\.[A-Za-z0-9.-]+", each):
            raise ValueError(f"{each!r} is not a host name or address")
    return tuple(dict.fromkeys([*hosts, *LOCAL_HOSTS]))


# --------------------------------------------------------------------------------------------------------------------
# Certificates


def _now() -> datetime:
    return datetime.now(UTC)


def _new_authority() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    now = _now()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"atoll authority {now:%Y-%m-%d %H:%M:%S}")])
    usage = _key_usage(signs_certificates=True)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def _sign(
    name: str,
    holder: KeyHolder,
    key: ec.EllipticCurvePrivateKey,
    by: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    lasting: timedelta,
) -> x509.Certificate:
    now = _now()
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if holder.hosts:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)  # a learner's key must not pass for a syncer's
    until = min(now + lasting, authority.not_valid_after_utc)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(_alternative_names(holder)), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
        .sign(by, hashes.SHA256())
    )


def _alternative_names(holder: KeyHolder) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in holder.hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    uris = [f"{LEARNER_URI_PREFIX}{number}" for number in holder.learners]
    uris += [f"{LEARNER_URI_PREFIX}{ANY_LEARNER}"] if holder.is_any_learner else []
    uris += [OPERATOR_URI] if holder.is_operator else []
    uris += [SYNCER_URI] if holder.hosts else []
    return [*names, *(x509.UniformResourceIdentifier(uri) for uri in uris)]


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _fingerprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write_key_file(path: Path, data: bytes, is_secret: bool = False, overwrite: bool = False) -> None:
    """Write a key or certificate. Without `overwrite`, refuse to replace a file."""
    try:
        write_file(path, [data], replace=overwrite, mode=0o600 if is_secret else 0o644)
    except FileExistsError:
        raise ValueError(f"{path} exists, and keys are never overwritten") from None
