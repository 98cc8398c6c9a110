"""`atoll keys`: a small private authority, and the keys of a run's syncer and islands."""

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
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the authority; init makes it.")],
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Whose key: an island, an operator, syncer, or authority (renew)."),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        Setting(
            "Name or address of the syncer for learners; repeatable. [default: this machine's name]", "NAME", "host"
        ),
    ] = None,
    learners: Annotated[
        list[int] | None,
        Setting("Learner as which the key may connect; repeatable. [default: next free one]", "N", "learner"),
    ] = None,
    any_learner: Annotated[bool, Setting("The key may speak as every learner: for a fleet with one key.")] = False,
    operator: Annotated[
        bool, Setting("The key may pause, change, snapshot and end the run, and read metrics.")
    ] = False,
    days: Annotated[int | None, Setting("How long the key is good. [default: 365]", "D", min=1)] = None,
    as_json: JsonOption = False,
) -> Result:
    """Make and look after the keys by which a syncer and its islands know each other.

    init DIR makes an authority and the syncer's key, DIR/syncer. add DIR NAME makes the key of an island, DIR/NAME:
    bring that directory to the island, and nothing else. Then: atoll syncer --keys DIR/syncer, atoll learner --keys
    NAME. A key names the learners as which it may speak, and nobody else can.

    show DIR tells who has a key, until when. renew DIR NAME makes a new one for the same holder; bring it there, and it
    is used from the next connection on, without a stop. renew DIR authority begins a change of the authority, under
    which old and new are trusted; retire DIR ends it. revoke DIR NAME makes a key worthless: the syncer refuses it
    within a second of seeing syncer/revoked.txt. DIR/authority.key signs keys: keep it where no island can read it.
    docs/security.md tells the rest.
    """
    if action not in ACTIONS:
        raise ValueError(f"there is no action {action!r}; give one of {', '.join(ACTIONS)}")
    try:
        from atoll.transport.keys import DEFAULT_DAYS, Authority
    except ModuleNotFoundError as missing:
        raise ValueError(f"making keys needs {missing.name}: pip install 'atoll[train]'") from None
    _check_arguments(action, name, bool(hosts), bool(learners) or any_learner or operator, days is not None)
    lasting = days if days is not None else DEFAULT_DAYS
    if action == "init":
        authority = Authority.init(directory, hosts or (), lasting)
        return _issued_result(
            authority, authority.issued[-1:], f"Keep {directory}/authority.key where no island can read it."
        )
    authority = Authority(directory)
    if action == "show":
        return _show_keys(authority)
    if action == "retire":
        count = authority.retire_old_authorities()
        return Result({"retired": count}, [f"{count} authorities are not trusted any more. {_DISTRIBUTE_ADVICE}"])
    if action == "renew" and name == "authority":
        fingerprint = authority.renew_authority()
        sentence = f"A new authority signs from now on; the old is trusted too. {_DISTRIBUTE_ADVICE}"
        return Result({"authority": fingerprint}, [sentence])
    assert name is not None
    if action == "add":
        made = [authority.add(name, learners or (), any_learner, operator, lasting)]
        advice = f"Bring {directory}/{name} to where it is used: atoll learner --keys {name} --syncer HOST:PORT"
    elif action == "renew":
        made = [authority.renew(name, hosts or (), lasting)]
        advice = f"Bring {directory}/{name} to where it is used, in the place of the old; nothing has to be stopped."
    else:
        made = authority.revoke(name)
        advice = f"Bring {directory}/syncer/revoked.txt to the syncer, if it runs elsewhere."
    return _issued_result(authority, made, advice)


_DISTRIBUTE_ADVICE = "Bring every key's authority.pem to where it is used; docs/security.md has the steps."


def _check_arguments(action: str, name: str | None, hosts: bool, holder: bool, days: bool) -> None:
    takes_name = action in ("add", "renew", "revoke")
    if takes_name and name is None:
        raise ValueError(f"say whose key: atoll keys {action} DIR NAME")
    if not takes_name and name is not None:
        raise ValueError(f"{action} takes no name, got {name!r}")
    if hosts and action not in ("init", "renew"):
        raise ValueError("--host is for init, and for renew of the syncer's key")
    if holder and action != "add":
        raise ValueError("--learner, --any-learner and --operator are for add: a key's holder does not change")
    if days and action not in ("init", "add", "renew"):
        raise ValueError("--days is for init, add and renew")


def _issued_result(authority: Authority, made: list[IssuedKey], advice: str) -> Result:
    fields = {"directory": str(authority.directory), "keys": [_key_fields(each) for each in made]}
    return Result(fields, [*map(_key_line, made), advice])


def _show_keys(authority: Authority) -> Result:
    from cryptography.hazmat.primitives import hashes

    known = [
        {
            "name": each.subject.rfc4514_string().removeprefix("CN="),
            "until": each.not_valid_after_utc.isoformat(),
            "fingerprint": each.fingerprint(hashes.SHA256()).hex(),
        }
        for each in authority.authorities()
    ]
    keys = [_key_fields(each) for each in authority.issued]
    lines = [f"{each['name']}, until {each['until'][:10]}, {each['fingerprint'][:16]}" for each in known]
    fields = {"directory": str(authority.directory), "authorities": known, "keys": keys}
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
