"""``keras.callbacks.BackupAndRestore`` under parameter servers: the servers write the backups.

So tables do not pass through the program, and a lost server is restored from the newest backup while ``fit`` continues. With other strategies
the callback is Keras' own.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import nn

from stratagem._checkpoint.checkpoint import Checkpoint
from stratagem._checkpoint.manager import CheckpointManager
from stratagem._keras.keras_names import names
from stratagem._keras.server_steps import is_remote, remote_part_of
from stratagem._owner import Owner

FOLDER = "servers"
"""The directory of the checkpoints, in the callback's ``backup_dir``."""


def apply_patch() -> None:
    """Replace the methods of the callback that load, save and delete."""
    callback_class = names().keras.callbacks.BackupAndRestore
    begin, save = callback_class.on_train_begin, callback_class._save_model
    end = callback_class.on_train_end

    @functools.wraps(begin)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        if not is_remote(self.model):
            begin(self, logs)
            return
        backup = Backup(self)
        if not backup.restore():
            begin(self, logs)  # perhaps there is a backup by Keras itself
            backup.save(0, 0)

    @functools.wraps(save)
    def _save_model(self: Any) -> None:
        if not is_remote(self.model):
            save(self)
        elif (backup := remote_part_of(self.model).backup) is not None:
            backup.save(self._current_epoch, self._last_batch_seen)

    @functools.wraps(end)
    def on_train_end(self: Any, logs: Any = None) -> None:
        if is_remote(self.model):
            # Finish a save before the files are deleted.
            remote_part_of(self.model).set_backup(None)
        end(self, logs)

    callback_class.on_train_begin = on_train_begin
    callback_class.on_train_end = on_train_end
    callback_class._save_model = _save_model


class Backup(Owner):
    """The checkpoints of one ``fit``. `ModelOnServers` owns it, and closes it when ``fit`` ends."""

    def __init__(self, callback: Any) -> None:
        self._model = callback.model
        self._on_servers = remote_part_of(callback.model)
        self._on_servers.prepare()
        optimizers = self._on_servers.optimizers
        self._checkpoint = Checkpoint(
            variables=nn.ParameterList([each._value for each in self._model.variables]),
            optimizers=[each.on_servers for each in optimizers],
            position={"epoch": 0, "batch": 0, "iterations": [0] * len(optimizers)},
        )
        self._manager = CheckpointManager(
            self._checkpoint,
            Path(callback.backup_dir) / FOLDER,
            max_to_keep=2 if callback.double_checkpoint else 1,
        )
        self._number = 0
        self._on_servers.set_backup(self)

    def restore(self) -> bool:
        """Continue from the newest checkpoint; return whether there is one."""
        self._number = self._manager.restore_or_initialize()
        if self._number == 0:
            return False
        position = self._checkpoint["position"]
        self._model._initial_epoch = position["epoch"]
        for optimizer, count in zip(
            self._on_servers.optimizers, position["iterations"], strict=True
        ):
            optimizer.restored(count)
        return True

    def save(self, epoch: int, batch: int) -> None:
        """Save when all scheduled steps have finished; the servers write while training continues."""
        self._on_servers.finish()
        self._checkpoint["position"] = {
            "epoch": epoch,
            "batch": batch,
            "iterations": [each.iterations for each in self._on_servers.optimizers],
        }
        self._number += 1
        self._manager.save(self._number)

    def close(self) -> None:
        """Finish a running save, and release the directory."""
        self._manager.close()
