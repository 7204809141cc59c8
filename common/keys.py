"""shell: CURVE key files and who is let in (S5). Knows no session and no message.

A key folder holds ``server.key`` (public), ``server.key_secret``, ``client.key``, ``client.key_secret`` and
``authorized/NAME.key``: the public keys that may speak to the broker, read again whenever the folder changes, so that
keys come and go without a restart. ``add`` makes ``clients/NAME/``, a folder to hand to somebody: it holds that one
key pair and the server's public key. Names that start with ``admin`` see every job.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.auth import create_certificates, load_certificate

from common.errors import RefusedError, UsageError
from common.locks import exclusive

SERVER = "server"
CLIENT = "client"
AUTHORIZED = "authorized"
CLIENTS = "clients"
FIRST_NAME = "admin"
WEIGHT_MIN, WEIGHT_MAX = 0.01, 1000.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One side's own pair, and the server's public key (Z85 text as bytes, 40 each)."""

    public: bytes
    secret: bytes
    server: bytes


def init(directory: Path, if_absent: bool = False) -> bool:
    """Make server and first client keys in ``directory``. True if made, False if they were there and that is fine.

    Raises ``RefusedError`` when keys are there already and ``if_absent`` is false: overwriting would lock everyone out.
    The folder appears at once or not at all, so that two processes may try together.
    """
    _need_curve()
    if (directory / f"{SERVER}.key_secret").exists():
        if if_absent:
            return False
        raise RefusedError(f"{directory} already holds keys; remove it first, or choose another folder")
    if directory.exists() and not directory.is_dir():
        raise RefusedError(f"{directory} is a file; name a folder for the keys")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with exclusive(directory / ".lock"):
            return _init_in(directory)
    except OSError as error:
        raise RefusedError(f"cannot make keys in {directory}: {error.strerror}") from error


def _init_in(directory: Path) -> bool:
    if (directory / f"{SERVER}.key_secret").exists():
        return False
    work = directory / ".making"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o700)
    create_certificates(work, CLIENT)
    create_certificates(work, SERVER)
    (directory / AUTHORIZED).mkdir(exist_ok=True)
    shutil.copyfile(work / f"{CLIENT}.key", directory / AUTHORIZED / f"{FIRST_NAME}.key")
    # the server's secret goes last: while it is missing, the folder does not count as made
    for name in (f"{CLIENT}.key", f"{CLIENT}.key_secret", f"{SERVER}.key", f"{SERVER}.key_secret"):
        (work / name).chmod(0o600 if name.endswith("_secret") else 0o644)
        os.replace(work / name, directory / name)
    work.rmdir()
    return True


def add(directory: Path, name: str, weight: float = 1.0) -> Path:
    """Make a key pair for ``name``, let it in, and return the folder to hand over. ``weight``: its share of work."""
    _check_name(name)
    if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
        raise UsageError(f"--weight {weight:g} must lie between {WEIGHT_MIN} and {WEIGHT_MAX}")
    load_server(directory)
    target = directory / CLIENTS / name
    if (directory / AUTHORIZED / f"{name}.key").exists():
        raise RefusedError(f"a key named {name!r} is in {directory} already; choose another name or revoke it first")
    if target.exists():
        raise RefusedError(f"{target} holds a key that is let in no more; delete that folder, or choose another name")
    work = directory / f".adding.{name}.{os.getpid()}"
    work.mkdir(mode=0o700)
    try:
        create_certificates(work, CLIENT)
        (work / f"{CLIENT}.key_secret").chmod(0o600)
        shutil.copyfile(directory / f"{SERVER}.key", work / f"{SERVER}.key")
        target.parent.mkdir(mode=0o700, exist_ok=True)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if weight != 1.0:
        (directory / AUTHORIZED / f"{name}.weight").write_text(f"{weight}\n")
    public = directory / AUTHORIZED / f".{name}.new"
    shutil.copyfile(target / f"{CLIENT}.key", public)
    public.rename(directory / AUTHORIZED / f"{name}.key")
    return target


def revoke(directory: Path, name: str) -> Path:
    """Let ``name`` in no more; its open sessions end at their next message. Returns the folder that holds its key,
    which is deleted where it was made to be handed over."""
    _check_name(name)
    try:
        (directory / AUTHORIZED / f"{name}.key").unlink()
    except FileNotFoundError:
        known = ", ".join(sorted(path.stem for path in (directory / AUTHORIZED).glob("*.key"))) or "none"
        raise RefusedError(f"no key named {name!r} is let in by {directory}; there are: {known}") from None
    (directory / AUTHORIZED / f"{name}.weight").unlink(missing_ok=True)
    made = directory / CLIENTS / name
    if name == FIRST_NAME and not made.exists():  # this one was made with the broker's own, and lies beside them
        return directory / f"{CLIENT}.key_secret"
    shutil.rmtree(made, ignore_errors=True)
    return made


def load_server(directory: Path) -> KeyPair:
    """The broker's own pair."""
    public, secret = _load(directory / f"{SERVER}.key_secret", directory)
    return KeyPair(public, secret, public)


def load_client(directory: Path) -> KeyPair:
    """A worker's or client's pair and the server's public key."""
    public, secret = _load(directory / f"{CLIENT}.key_secret", directory)
    server, _ = _load(directory / f"{SERVER}.key", directory, secret=False)
    return KeyPair(public, secret, server)


def exposed(directory: Path) -> str:
    """In words, which of the folder's secret keys others on this machine can read, and what to do; empty if none."""
    open_to_all = []
    for path in sorted(directory.glob("*.key_secret")):
        try:
            reached, read = directory.stat().st_mode & 0o011, path.stat().st_mode & 0o044
        except OSError:  # it vanished, or its folder cannot be looked into: whoever needs it says so
            continue
        if reached and read:
            open_to_all.append(str(path))
    return f"others can read {', '.join(open_to_all)}: chmod go= it, or make new keys" if open_to_all else ""


class Authorized:
    """The public keys let in by a key folder, read again when its listing changes. Any thread may ask."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / AUTHORIZED
        self._stamp: tuple[tuple[str, int], ...] = ()
        self._names: dict[bytes, str] = {}
        self.weights: dict[str, float] = {}
        """Shares of the keys that have more or less than one; the same object for good."""
        self.refresh()

    def refresh(self) -> bool:
        """Read the folder again if it changed; True if it did."""
        try:
            found = sorted(path for path in self._folder.glob("*.key") if not path.name.startswith("."))
            weights = {path.stem: path for path in self._folder.glob("*.weight")}
            stamp = tuple((path.name, path.stat().st_mtime_ns) for path in (*found, *sorted(weights.values())))
            if stamp == self._stamp and self._names:
                return False
            self._names = {key: path.stem for path in found if (key := _public(path))}
            read = {name: _weight(path) for name, path in weights.items()}
        except OSError:  # a key vanished between listing and reading: the next refresh sees a settled folder
            return False
        self._stamp = stamp
        for name in self.weights.keys() - read.keys():
            self.weights.pop(name, None)  # the authenticator's thread may be at it too
        self.weights.update(read)
        return True

    def name(self, public: bytes) -> str | None:
        """Whose key this is (Z85, 40 bytes), or None: not let in."""
        return self._names.get(public)


def _public(path: Path) -> bytes:
    """The key in a file of ``authorized``; empty where there is none (yet): such a file lets nobody in."""
    try:
        return load_certificate(path)[0]
    except ValueError:
        return b""


def _weight(path: Path) -> float:
    try:
        return min(WEIGHT_MAX, max(WEIGHT_MIN, float(path.read_text())))
    except ValueError:  # somebody's hand was there: one share, as for all
        return 1.0


def _load(path: Path, directory: Path, secret: bool = True) -> tuple[bytes, bytes]:
    _need_curve()
    try:
        public, private = load_certificate(path)
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"no usable key at {path}; --keys names a folder made by: haulier keys init {directory}"
        ) from error
    if secret and private is None:
        raise RefusedError(f"{path} holds no secret key; --keys names a folder made by haulier keys init or add")
    return public, private or b""


def is_name(name: str) -> bool:
    """Whether ``name`` may be a key's: then it is also a safe name of a folder."""
    return _NAME.fullmatch(name) is not None


def _check_name(name: str) -> None:
    if not is_name(name):
        raise UsageError(f"a key's name is letters, digits, - and _, at most 64: not {name!r}")


def _need_curve() -> None:
    if not zmq.has("curve"):
        raise RefusedError("this ZeroMQ has no CURVE; install the pyzmq wheel (or use --insecure on loopback)")
