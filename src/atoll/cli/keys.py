"""`atoll keys`: a private certificate authority, and the keys of a run's syncer, learners and operators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli.output import JsonOption, Result
from atoll.core.settings import Setting

if TYPE_CHECKING:
    from atoll.transport.keys import Authority, IssuedKey

ACTIONS = ("init", "add", "show", "renew", "revoke", "retire")
EXPIRY_WARNING_DAYS = 30


def run(
    action: Annotated[str, typer.Argument(metavar="ACTION", help="init, add, show, renew, revoke or retire.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the authority; init creates it.")],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Holder of the key: an island, an operator, syncer, or authority (renew)."
        ),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        Setting(
            "Name or address by which learners reach the syncer; repeatable. [default: this machine's name]",
            "NAME",
            "host",
        ),
    ] = None,
    learners: Annotated[
        list[int] | None,
        Setting("Learner number that the key is valid for; repeatable. [default: next free one]", "N", "learner"),
    ] = None,
    any_learner: Annotated[bool, Setting("The key is valid for every learner: for a fleet with one key.")] = False,
    operator: Annotated[
        bool, Setting("The key may pause, change, snapshot and finish the run, and read metrics.")
    ] = False,
    days: Annotated[int | None, Setting("Lifetime of the key in days. [default: 365]", "D", min=1)] = None,
    as_json: JsonOption = False,
) -> Result:
    """Create and manage the TLS keys by which a syncer and its learners authenticate each other.

    init DIR creates an authority and the syncer's key, DIR/syncer. add DIR NAME creates the key of an island, DIR/NAME:
    copy that directory to the island, and nothing else. Then: atoll syncer --keys DIR/syncer, atoll learner --keys
    NAME. A key is valid only for the learner numbers that it contains.

    show DIR lists the keys and their expiry dates. renew DIR NAME creates a new key for the same holder. Copy it to the
    holder: it is used from the next connection on, without a restart. renew DIR authority starts a change of the
    authority, during which the old and the new one are trusted; retire DIR ends it. revoke DIR NAME revokes a key: the
    syncer refuses it within a second after syncer/revoked.txt changes. DIR/authority.key signs keys: keep it where no
    island can read it. See docs/security.md.
    """
    if action not in ACTIONS:
        raise ValueError(f"there is no action {action!r}; give one of {', '.join(ACTIONS)}")
    try:
        from atoll.transport.keys import DEFAULT_DAYS, Authority
    except ModuleNotFoundError as missing:
        raise ValueError(f"creating keys needs {missing.name}: pip install 'atoll[train]'") from None
    _check_arguments(action, name, bool(hosts), bool(learners) or any_learner or operator, days is not None)
    lifetime_days = days if days is not None else DEFAULT_DAYS
    if action == "init":
        authority = Authority.init(directory, hosts or (), lifetime_days)
        return _issued_result(
            authority, authority.issued[-1:], f"Keep {directory}/authority.key where no island can read it."
        )
    authority = Authority(directory)
    if action == "show":
        return _show_keys(authority)
    if action == "retire":
        count = authority.retire_old_authorities()
        return Result({"retired": count}, [f"{count} authorities are no longer trusted. {_DISTRIBUTE_ADVICE}"])
    if action == "renew" and name == "authority":
        fingerprint = authority.renew_authority()
        sentence = f"A new authority signs keys from now on; the old one is still trusted. {_DISTRIBUTE_ADVICE}"
        return Result({"authority": fingerprint}, [sentence])
    assert name is not None
    if action == "add":
        issued = [authority.add(name, learners or (), any_learner, operator, lifetime_days)]
        advice = f"Copy {directory}/{name} to its holder: atoll learner --keys {name} --syncer HOST:PORT"
    elif action == "renew":
        issued = [authority.renew(name, hosts or (), lifetime_days)]
        advice = f"Copy {directory}/{name} to its holder, in place of the old key; no restart is needed."
    else:
        issued = authority.revoke(name)
        advice = f"Copy {directory}/syncer/revoked.txt to the syncer, if it runs on another machine."
    return _issued_result(authority, issued, advice)


_DISTRIBUTE_ADVICE = "Copy the authority.pem of every key to its holder; docs/security.md has the steps."


def _check_arguments(action: str, name: str | None, has_hosts: bool, has_holder: bool, has_days: bool) -> None:
    takes_name = action in ("add", "renew", "revoke")
    if takes_name and name is None:
        raise ValueError(f"{action} needs the name of the key: atoll keys {action} DIR NAME")
    if not takes_name and name is not None:
        raise ValueError(f"{action} takes no name, got {name!r}")
    if has_hosts and action not in ("init", "renew"):
        raise ValueError("--host is for init, and for renew of the syncer's key")
    if has_holder and action != "add":
        raise ValueError("--learner, --any-learner and --operator are for add: a key's holder does not change")
    if has_days and action not in ("init", "add", "renew"):
        raise ValueError("--days is for init, add and renew")


def _issued_result(authority: Authority, keys: list[IssuedKey], advice: str) -> Result:
    fields = {"directory": str(authority.directory), "keys": [_key_fields(each) for each in keys]}
    return Result(fields, [*map(_key_line, keys), advice])


def _show_keys(authority: Authority) -> Result:
    from cryptography.hazmat.primitives import hashes

    authorities = [
        {
            "name": each.subject.rfc4514_string().removeprefix("CN="),
            "until": each.not_valid_after_utc.isoformat(),
            "fingerprint": each.fingerprint(hashes.SHA256()).hex(),
        }
        for each in authority.authorities()
    ]
    keys = [_key_fields(each) for each in authority.issued]
    lines = [f"{each['name']}, until {each['until'][:10]}, {each['fingerprint'][:16]}" for each in authorities]
    fields = {"directory": str(authority.directory), "authorities": authorities, "keys": keys}
    return Result(fields, [*lines, *map(_key_line, authority.issued)])


def _key_line(issued: IssuedKey) -> str:
    from datetime import UTC, datetime, timedelta

    now = datetime.now(UTC)
    until = datetime.fromisoformat(issued.until)
    state = issued.state(now)
    if state == "good":
        state = f"until {until.date()}" + (", soon" if until - now < timedelta(days=EXPIRY_WARNING_DAYS) else "")
    else:
        state = f"{state.upper()} {(issued.revoked or issued.until)[:10]}"
    return f"{issued.name}: {issued.holder}; {state}; {issued.fingerprint[:16]}"


def _key_fields(issued: IssuedKey) -> dict[str, Any]:
    from datetime import UTC, datetime

    return issued.to_json() | {"state": issued.state(datetime.now(UTC))}
