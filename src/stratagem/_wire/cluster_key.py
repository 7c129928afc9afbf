"""Find the cluster key: an argument, the environment, or the user's key file.

Workers run the functions that they receive, and every user of a machine can connect to loopback ports. So tasks always prove a
key to each other. Without one in the environment, all tasks of a user on this machine share a key file that is
created on first use.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from stratagem import config
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.tls import Tls, TlsFiles, files_from_environment

_KEY_BYTES: Final = 32
_REMEDY: Final = "Set STRATAGEM_CLUSTER_KEY or STRATAGEM_CLUSTER_KEY_FILE for every task instead"


def cluster_key(text: str | None = None, tls: TlsFiles | None = None) -> ClusterKey:
    """Return the key given, else that of the environment, else that of the user's key file.

    Connections are encrypted with the TLS files given, else with those of the environment.

    Raises:
        ValueError: the key is too short, or its file or a TLS file cannot be read.
        PermissionError: other users can read the file of a key.
    """
    text = text or config.cluster_key_text() or user_key_text()
    files = tls or files_from_environment()
    return ClusterKey.from_text(text, tls=None if files is None else Tls(files))


def user_key_path() -> Path:
    """Return where the user's key file is: in ``~/.config/stratagem``."""
    return config.user_directory() / "cluster.key"


def user_key_text() -> str:
    """Return the key of the user's key file; create the file on first use.

    Raises:
        PermissionError: the file cannot be created, or other users can read it.
    """
    path = user_key_path()
    try:
        if not path.exists():
            _create(path)
    except OSError as error:
        raise PermissionError(
            f"the key file {str(path)!r} cannot be created: {error}. {_REMEDY}."
        ) from error
    return config.read_key_file(path)


def _create(path: Path) -> None:
    """Write a random key; several processes may do so at once, and all get the same file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{secrets.token_hex(_KEY_BYTES)}\n")
        os.link(draft, path)  # fails if another process was faster
    except FileExistsError:
        pass
    finally:
        draft.unlink()
